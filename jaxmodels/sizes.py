"""How large a policy is and what one chunk takes, from its config alone, before anything of it is built.

A config is a kilobyte, and what it asks for can be any amount: layers that are built one by one, tables of positions,
feature maps of frames. Here are the numbers in plain integers, in microseconds: `Sizes` of a policy, which its folder
computes (`PolicyType.sizes`), out of the parts that policies share. Parameters are exact; memory and work are
estimates, meant to tell what fits from what does not. Sizes are compared with files in jaxmodels/checkpoints/lerobot.py
and with memory in jaxmodels/memory.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxmodels.errors import ConfigError, WeightsMismatch
from jaxmodels.layers import winograd
from jaxmodels.layers.kernels import blocked, whole
from jaxmodels.layers.resnet import RESNETS, STAGE_WIDTHS, BlockPlan, blocks
from jaxmodels.layers.small_cnn import WIDTHS

Frame: TypeAlias = tuple[int, int]

# A module with more layers takes over a second to build; the names of all tensors are compared only where that is
# short, or the numbers of parameters say that file and config are of one policy.
QUICK_LAYERS = 32
NEAR = 100_000_000  # parameters; twice those of an ACT with three cameras
# Additions and multiplications of one chunk: ten seconds of a fast accelerator. The largest published policy (3e9
# parameters, a thousand tokens, ten steps) takes 6e13, ACT with three cameras of 480x640 3e11.
MOST_OPERATIONS = 10**15


@dataclass(frozen=True)
class Sizes:
    """What follows from a config.

    Attributes:
        parameters: numbers in the weights, as files hold them: exact.
        serving: numbers in what the program runs over, for `parameters` after folding.
        layers: modules that are built one by one; a stack of layers counts as one.
        pixels: of all frames, as the policy looks at them.
        tokens: of what is seen, whom attention compares with each other.
        activations: numbers in memory at the widest point of the program, beside weights.
        operations: additions and multiplications of one call.
    """

    parameters: int
    serving: int
    layers: int
    pixels: int
    tokens: int
    activations: int
    operations: int

    def check(self) -> None:
        """Whether anything can compute it in a time that a robot could wait.

        Raises:
            ConfigError: it is beyond any device.
        """
        if self.operations > MOST_OPERATIONS:
            raise ConfigError(
                f"one chunk takes about {self.operations:.0e} operations ({self.tokens} tokens of {self.pixels} "
                f"pixels, {self.parameters} parameters); wanted {MOST_OPERATIONS:.0e} at most"
            )

    def check_found(self, found: int, tensors: int, where: str) -> None:
        """Whether a file can be of the config, before a module is built for the names of its tensors.

        Args:
            found: numbers in the file's tensors, of which there are `tensors`.

        Raises:
            WeightsMismatch: it has other parameters, and so many that its tensors are not worth comparing.
        """
        is_near = max(found, self.parameters) <= 4 * min(found, self.parameters) + NEAR
        if found != self.parameters and not (is_near and self.layers <= QUICK_LAYERS):
            raise WeightsMismatch(
                f"{where}: {found} parameters in {tensors} tensors; the config asks for {self.parameters} in "
                f"{self.layers} layers; the weights belong to another config, or the config was edited"
            )


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer."""
    return inputs * outputs + outputs


def attention(width: int) -> int:
    return 4 * linear(width, width)


def feed_forward(width: int, hidden: int, inputs: int = 1) -> int:
    """As `jaxmodels.layers.feed_forward.FeedForward`; gated activations take two inputs for one."""
    return linear(width, hidden) + linear(hidden // inputs, width)


def layer_norm(width: int) -> int:
    return 2 * width


def attention_scores(queries: int, keys: int, heads: int, batch: int = 1, *, platform: str = "cpu") -> int:
    """Numbers of an attention's scores that are in memory at once, as jaxmodels/layers/kernels does it."""
    scores, every = queries * keys, batch * heads * queries * keys
    if platform != "cpu":
        return 2 * min(every, max(whole.SCORES, batch * heads * keys))
    if scores <= blocked.BATCHED_PER_HEAD:
        return 2 * every
    if scores <= blocked.WRITTEN_OUT_PER_HEAD and batch * heads <= blocked.WRITTEN_OUT_HEADS:
        return 2 * scores
    if every <= blocked.BATCHED:
        return 2 * every
    return 3 * min(scores, max(blocked.SCORES, blocked.QUERIES * keys))


@dataclass(frozen=True)
class Backbone:
    """A vision backbone: what it has, and what a frame takes in it.

    Attributes:
        parameters: those of its norms, and their statistics, are among them.
        serving: the same when norms are part of the convolutions before them.
        width: channels of its last feature map.
    """

    parameters: int
    serving: int
    width: int
    name: str
    dilate: bool = False

    def rows(self, frame: Frame) -> Frame:
        """Height and width of the last feature map."""
        height, width = frame
        for _ in range(4 if self.name not in RESNETS or self.dilate else 5):
            height, width = _half(height), _half(width)
        return height, width

    def activations(self, frame: Frame, together: int = 1, *, folded: bool = False, platform: str = "cpu") -> int:
        """Numbers at the widest point of so many frames at once.

        Args:
            folded: norms are part of the convolutions, which on a CPU may be Winograd's.
        """
        height, width = frame
        if self.name not in RESNETS:
            pixels, first = height * width, _half(height) * _half(width) * WIDTHS[0]
            return together * (8 * pixels + 2 * first)
        stem = _half(height) * _half(width) * STAGE_WIDTHS[0]
        copies = 1 if folded else 2
        most = 3 * height * width + copies * stem
        for block in blocks(self.name, self.dilate):
            most = max(most, self._of_block(block, frame, folded=folded, platform=platform))
        return together * most

    def _of_block(self, block: BlockPlan, frame: Frame, *, folded: bool, platform: str) -> int:
        rows, columns = -(-frame[0] // block.scale), -(-frame[1] // block.scale)
        area = rows * columns
        before = area * block.stride**2 * block.inputs
        is_bottleneck = len(block.convolutions) == 3
        most = before + (3 if is_bottleneck else 2) * area * block.outputs
        if is_bottleneck:
            most += area * block.convolutions[1][0]
        for inputs, size, stride, dilation in block.convolutions:
            is_plain = (size, stride, dilation) == (3, 1, 1) and folded and platform == "cpu"
            planes = winograd.intermediate_bytes(rows, columns, inputs)
            if is_plain and planes <= 12 << 20:
                most = max(most, before + area * block.outputs + 2 * planes // 4)
        return most

    def operations(self, frame: Frame) -> int:
        height, width = frame
        if self.name not in RESNETS:
            total, inputs = 0, 5
            for outputs in WIDTHS:
                height, width = _half(height), _half(width)
                total += 18 * inputs * outputs * height * width
                inputs = outputs
            return total
        total = 2 * 49 * 3 * STAGE_WIDTHS[0] * _half(height) * _half(width)
        for block in blocks(self.name, self.dilate):
            area = -(-height // block.scale) * -(-width // block.scale)
            total += 2 * area * _kernels(block)
        return total


def backbone(name: str, dilate: bool = False) -> Backbone:
    """A vision backbone by its name."""
    if name not in RESNETS:
        inputs = (3 + 2, *WIDTHS[:-1])
        count = sum(9 * before * after + 3 * after for before, after in zip(inputs, WIDTHS, strict=True))
        return Backbone(count, count, WIDTHS[-1], name)
    kernels, channels, last = 49 * 3 * STAGE_WIDTHS[0], STAGE_WIDTHS[0], 0
    for block in blocks(name, dilate):
        kernels += _kernels(block)
        widths = [inputs for inputs, *_ in block.convolutions[1:]] + [block.outputs]
        channels += sum(widths) + (block.outputs if block.projects else 0)
        last = block.outputs
    return Backbone(kernels + 4 * channels, kernels + channels, last, name, dilate)


def resized(frames: Sequence[Frame], sizes: Sequence[Frame]) -> int:
    """Numbers in memory while frames of any size become those that a policy looks at (`jaxmodels.program.pixels`)."""
    total = 0
    for (height, width), (rows, columns) in zip(frames, sizes, strict=True):
        total += 3 * height * width
        if (height, width) != (rows, columns):
            total += 3 * rows * width + height * rows + width * columns
    return total


def _kernels(block: BlockPlan) -> int:
    """Numbers in the kernels of a residual block."""
    widths = [inputs for inputs, *_ in block.convolutions[1:]] + [block.outputs]
    kernels = sum(
        inputs * outputs * size**2 for (inputs, size, *_), outputs in zip(block.convolutions, widths, strict=True)
    )
    return kernels + (block.inputs * block.outputs if block.projects else 0)


def _half(pixels: int) -> int:
    return -(-pixels // 2)
