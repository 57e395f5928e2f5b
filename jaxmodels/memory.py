"""Estimates of a policy's memory and operations from its config, and checks that the machine has room.

A config is a kilobyte, and what it asks for can be any amount: layers that are built one by one, tables of positions,
feature maps of frames. Here are the numbers in plain integers, in microseconds: `Sizes` of a policy, which its folder
computes (`PolicyType.sizes`), out of the parts that policies share. Parameters are exact; memory and work are
estimates, meant to tell what fits from what does not. Sizes are compared with the
files' headers in jaxmodels/policies/lerobot_folder.py, and with free memory here.

What does not fit is refused with figures. Without this a host that runs out of memory ends a process, maybe that of a
robot that moves; a device says so itself, but only after seconds of compiling and copying.
"""

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from jaxmodels.devices import Placement
from jaxmodels.errors import ConfigError, ObservationError, WeightsMismatch
from jaxmodels.layers import attention_kernels, vision
from jaxmodels.layers.vision import RESNETS, STAGE_WIDTHS, WIDTHS, BlockPlan, plan_blocks

Frame: TypeAlias = tuple[int, int]

# A module with more layers takes over a second to build; the names of all tensors are compared only where that is
# short, or the numbers of parameters say that file and config are of one policy.
QUICK_LAYERS = 32
NEAR = 100_000_000  # parameters; twice those of an ACT with three cameras
# Additions and multiplications of one chunk: ten seconds of a fast accelerator. The largest published policy (3e9
# parameters, a thousand tokens, ten steps) takes 6e13, ACT with three cameras of 480x640 3e11.
MAX_OPERATIONS = 10**15


@dataclass(frozen=True)
class Sizes:
    """Parameters, activations and operations that follow from a config.

    Attributes:
        parameters: numbers in the weights, as files hold them: exact.
        serving: numbers in what the program runs over, for `parameters` after folding.
        layers: modules that are built one by one; a stack of layers counts as one.
        pixels: of all frames, as the policy looks at them.
        tokens: of what is seen, whom attention compares with each other.
        activations: numbers in memory at the widest point of the program, beside weights.
        operations: additions and multiplications of one call.
        prefix: tokens of what is seen and said that are computed once per chunk, for all steps; 0 where there are none.
        runs_as_read: whether the program runs over the arrays that were read, and nothing is folded.
    """

    parameters: int
    serving: int
    layers: int
    pixels: int
    tokens: int
    activations: int
    operations: int
    prefix: int = 0
    runs_as_read: bool = False

    def check(self) -> None:
        """Refuse configs that nothing could compute in a time that a robot could wait.

        Raises:
            ConfigError: it is beyond any device.
        """
        if self.operations > MAX_OPERATIONS:
            raise ConfigError(
                f"one chunk takes about {self.operations:.0e} operations ({self.tokens} tokens of {self.pixels} "
                f"pixels, {self.parameters} parameters); wanted {MAX_OPERATIONS:.0e} at most"
            )

    def check_file(self, count: int, tensors: int, where: str) -> None:
        """Compare a file's count of parameters with the config's, before a module is built to compare names.

        Args:
            count: numbers in the file's tensors, of which there are `tensors`.

        Raises:
            WeightsMismatch: it has other parameters, and so many that its tensors are not worth comparing.
        """
        is_near = max(count, self.parameters) <= 4 * min(count, self.parameters) + NEAR
        if count != self.parameters and not (is_near and self.layers <= QUICK_LAYERS):
            raise WeightsMismatch(
                f"{where}: {count} parameters in {tensors} tensors; the config asks for {self.parameters} in "
                f"{self.layers} layers; the weights belong to another config, or the config was edited"
            )


def count_linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer."""
    return inputs * outputs + outputs


def count_attention(width: int) -> int:
    return 4 * count_linear(width, width)


def count_feed_forward(width: int, hidden: int, inputs: int = 1) -> int:
    """Parameters of a `FeedForward`; gated activations take two inputs for one."""
    return count_linear(width, hidden) + count_linear(hidden // inputs, width)


def count_layer_norm(width: int) -> int:
    return 2 * width


def count_attention_scores(queries: int, keys: int, heads: int, batch: int = 1, *, platform: str = "cpu") -> int:
    """Attention scores in memory at once, as the kernels of jaxmodels/layers/attention_kernels.py hold them."""
    scores, every = queries * keys, batch * heads * queries * keys
    if platform != "cpu":
        return 2 * min(every, max(attention_kernels.WHOLE_SCORES, batch * heads * keys))
    if scores <= attention_kernels.BATCHED_PER_HEAD:
        return 2 * every
    if scores <= attention_kernels.WRITTEN_OUT_PER_HEAD and batch * heads <= attention_kernels.WRITTEN_OUT_HEADS:
        return 2 * scores
    if every <= attention_kernels.BATCHED:
        return 2 * every
    # Of one block, whose exponentials take the place of its scores.
    return min(scores, max(attention_kernels.BLOCK_SCORES, attention_kernels.BLOCK_QUERIES * keys))


@dataclass(frozen=True)
class Backbone:
    """Sizes of a vision backbone, and what one frame takes in it.

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
            height, width = _halve(height), _halve(width)
        return height, width

    def activations(self, frame: Frame, together: int = 1, *, folded: bool = False, platform: str = "cpu") -> int:
        """Numbers at the widest point, for this many frames at once.

        Args:
            folded: norms are part of the convolutions, which on a CPU may be Winograd's.
        """
        height, width = frame
        if self.name not in RESNETS:
            pixels, first = height * width, _halve(height) * _halve(width) * WIDTHS[0]
            return together * (8 * pixels + 2 * first)
        stem = _halve(height) * _halve(width) * STAGE_WIDTHS[0]
        copies = 1 if folded else 2
        most = 3 * height * width + copies * stem
        for block in plan_blocks(self.name, self.dilate):
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
            planes = vision.count_winograd_bytes(rows, columns, inputs)
            if is_plain and planes <= 12 << 20:
                most = max(most, before + area * block.outputs + 2 * planes // 4)
        return most

    def operations(self, frame: Frame) -> int:
        height, width = frame
        if self.name not in RESNETS:
            total, inputs = 0, 5
            for outputs in WIDTHS:
                height, width = _halve(height), _halve(width)
                total += 18 * inputs * outputs * height * width
                inputs = outputs
            return total
        total = 2 * 49 * 3 * STAGE_WIDTHS[0] * _halve(height) * _halve(width)
        for block in plan_blocks(self.name, self.dilate):
            area = -(-height // block.scale) * -(-width // block.scale)
            total += 2 * area * _kernels(block)
        return total


def measure_backbone(name: str, dilate: bool = False) -> Backbone:
    """Sizes of the vision backbone of this name."""
    if name not in RESNETS:
        inputs = (3 + 2, *WIDTHS[:-1])
        count = sum(9 * before * after + 3 * after for before, after in zip(inputs, WIDTHS, strict=True))
        return Backbone(count, count, WIDTHS[-1], name)
    kernels, channels, last = 49 * 3 * STAGE_WIDTHS[0], STAGE_WIDTHS[0], 0
    for block in plan_blocks(name, dilate):
        kernels += _kernels(block)
        widths = [inputs for inputs, *_ in block.convolutions[1:]] + [block.outputs]
        channels += sum(widths) + (block.outputs if block.projects else 0)
        last = block.outputs
    return Backbone(kernels + 4 * channels, kernels + channels, last, name, dilate)


def count_resize_numbers(frames: Sequence[Frame], sizes: Sequence[Frame]) -> int:
    """Numbers in memory while frames are resized (`jaxmodels.program.prepare_pixels`)."""
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


def _halve(pixels: int) -> int:
    return -(-pixels // 2)


FLOAT = 4  # bytes of a weight as it is read, whatever it is served in
# Always there, or the machine is lost anyway: what needs less is not compared, so that a small policy is never refused
# for an estimate.
SPARE = 64 << 20
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Needs:
    """Estimated bytes that a policy takes on the host and on the device.

    Attributes:
        host: of the machine's memory, on its own side: weights as they were read, and while they are prepared.
        weights: on the device.
        activations: on the device, while a chunk is computed.
    """

    host: int
    weights: int
    activations: int

    @property
    def device(self) -> int:
        return self.weights + self.activations


def estimate_needs(sizes: Sizes, item: int = FLOAT) -> Needs:
    """Estimate the bytes that loading and running a policy takes.

    Args:
        item: bytes of a number on the device.
    """
    read = FLOAT * sizes.parameters
    # What is not folded is converted an array at a time: 0.9 to 1.18 of the weights were measured (vla_latency).
    host = read + read // 5 if sizes.runs_as_read else read + FLOAT * sizes.serving
    return Needs(host, item * sizes.serving, item * sizes.activations)


def check_loading(sizes: Sizes, placement: Placement, item: int = FLOAT) -> None:
    """Refuse to load a policy for which there is no room.

    Raises:
        ConfigError: there is not; with what it needs, what for, and what is free.
    """
    needs = estimate_needs(sizes, item)
    weights = needs.host
    if placement.platform == "cpu" and not (sizes.runs_as_read and item == FLOAT):  # those that it runs over are others
        weights += needs.weights
    what = (
        f"weights {_format_bytes(weights)}, activations "
        f"{_format_bytes(needs.activations)} for {sizes.tokens} tokens of {sizes.pixels} pixels"
    )
    if placement.platform == "cpu":
        _compare(weights + needs.activations, get_free_host_memory(), "the machine", what)
    else:
        _compare(
            needs.host,
            get_free_host_memory(),
            "the machine",
            f"weights {_format_bytes(needs.host)} before they are sent",
        )
        share = needs.weights // len(placement.devices) + needs.activations
        _compare(share, get_free_device_memory(placement), placement.name, what)


def check_running(sizes: Sizes, placement: Placement, item: int, what: str) -> None:
    """Refuse to compile one more program of a loaded policy when there is no room to run it.

    Args:
        what: of which frames and batch it is, for the error.

    Raises:
        ObservationError: there is not.
    """
    needed = item * sizes.activations
    free = get_free_host_memory() if placement.platform == "cpu" else get_free_device_memory(placement)
    if free is not None and needed > max(free, SPARE):
        raise ObservationError(
            f"{what} need about {_format_bytes(needed)} of memory; {_format_bytes(free)} are free on {placement.name}"
        )


def check_host(bytes_needed: int, what: str) -> None:
    """Refuse arrays of so many bytes when they do not fit into this machine's memory.

    Raises:
        ConfigError: they do not.
    """
    _compare(bytes_needed, get_free_host_memory(), "the machine", what)


def get_free_device_memory(placement: Placement) -> int | None:
    """Free bytes of the fullest device of a placement; None when devices do not say."""
    known = [stats for device in placement.devices if (stats := _stats(device)) is not None]
    return min((stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in known), default=None)


def get_free_host_memory() -> int | None:
    """Bytes that this process can still allocate, by the machine, its control group (a container's limit) and its own
    limits; None when unknown."""
    limits = [*_machine(), *_list_group_limits(), *_list_process_limits()]
    return max(min(limits), 0) if limits else None


def _compare(needed: int, free: int | None, where: str, what: str) -> None:
    if free is not None and needed > max(free, SPARE):
        raise ConfigError(
            f"it needs about {_format_bytes(needed)} of memory ({what}); {_format_bytes(free)} are free on {where}. "
            "Use a smaller policy or more memory"
        )


def _stats(device: Any) -> dict[str, int] | None:
    stats = device.memory_stats()
    return stats if stats and "bytes_limit" in stats else None


def _machine() -> list[int]:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(_PROC / "meminfo"), re.MULTILINE)
    return [int(match[1]) << 10] if match else []


def _list_group_limits() -> list[int]:
    """Bytes left of the memory limits of this process' control group and of all above it."""
    limits = []
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0":
            root, limit, used, cache = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            root, limit, used, cache = (
                _GROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (root / inside, *(root / parent for parent in inside.parents)):
            most, now = _read(folder / limit).strip(), _read(folder / used).strip()
            if most.isdecimal() and now.isdecimal():
                # Files that were read lie in memory as long as nobody else needs it.
                spare = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                limits.append(int(most) - int(now) + (int(spare[1]) if spare else 0))
    return limits


def _list_process_limits() -> list[int]:
    limits, status = [], _read(_PROC / "self" / "status")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        now = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        if most != resource.RLIM_INFINITY and now:
            limits.append(most - (int(now[1]) << 10))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _format_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
