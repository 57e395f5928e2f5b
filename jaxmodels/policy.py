"""A policy ready to act: a checkpoint's weights on a device, and the programs that run them."""

import time
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxmodels import observations
from jaxmodels.checkpoints import lerobot
from jaxmodels.checkpoints.contents import Checkpoint
from jaxmodels.description import requirements_of
from jaxmodels.devices import find_dtype
from jaxmodels.errors import ConfigError
from jaxmodels.instructions import Instructions, texts_of
from jaxmodels.memory import Needs, check_running, needs_of
from jaxmodels.placement import find_placement
from jaxmodels.policies import policy_type
from jaxmodels.program import Inputs, Programs, Scales
from jaxmodels.sizes import Sizes
from jaxmodels.text import tokenizer
from jaxmodels.types import TASK, Language, Observation, Requirements


class Policy:
    """Observations in, chunks of actions out. Safe to call from any one thread at a time.

    `compile` may run in one thread while `act` runs in another.

    Attributes:
        commit: what its files are called: the commit of a repo of the Hub; None for a folder, unless whoever loaded it
            knows a name for its content and says so.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str | None = None,
        device: str | None = None,
        _programs: Programs | None = None,
    ):
        config: Any = checkpoint.config
        self.commit: str | None = None
        self._checkpoint = checkpoint
        self._kind = policy_type(config.type)
        self._dtype, self._place = find_dtype(dtype), find_placement(device)
        scales = _scales(checkpoint)
        serving = self._kind.prepare(config, checkpoint.weights, self._place.platform)
        if _programs is None:
            shapes = {
                name: jax.ShapeDtypeStruct(np.shape(array), self._dtype) for name, array in sorted(serving.items())
            }
            plan, read = self._kind.architecture(config), self._kind.read
            act, read = partial(self._kind.act, plan), read and partial(read, plan)
            _programs = Programs(act, shapes, scales, config.frames, self._dtype, self._place, read)
        self._programs = _programs
        self._weights = _programs.flatten(serving, scales)
        self._instructions: Instructions | None = None
        if config.text_encoder is not None:
            reads = tokenizer(config.text_encoder, checkpoint.tokenizer)
            self._instructions = Instructions(reads, self._encode, self._place)
        renames = checkpoint.normalization.renames
        needs = requirements_of(lerobot.Description(config, checkpoint.sidecar, renames))
        self._requirements = replace(needs, action_range=checkpoint.normalization.outputs.range_of(config.action))
        self._reader = observations.Reader(checkpoint)
        self._timings: dict[str, float] = {}

    @property
    def requirements(self) -> Requirements:
        return self._requirements

    @property
    def device(self) -> str:
        """Where it runs, e.g. ``cpu:0``."""
        return self._place.name

    @property
    def dtype(self) -> str:
        return self._dtype.name

    @property
    def sizes(self) -> Sizes:
        """How large it is and what a chunk takes, as its config says."""
        return self._kind.sizes(self._checkpoint.config, platform=self._place.platform)

    @property
    def needs(self) -> Needs:
        """Bytes of memory that it takes, estimated."""
        return needs_of(self.sizes, self._dtype.itemsize)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds that the last `act` spent on ``to_device``, ``compute`` and ``to_host``; empty before the first.

        ``to_device`` is handing over what is sent: it travels while the program is started, and on a CPU not at all.
        """
        return MappingProxyType(self._timings)

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def act(self, observation: Mapping[str, np.ndarray]) -> Float[np.ndarray, "b t a"]:
        """A chunk of un-normalised actions, float32.

        Args:
            observation: LeRobot's feature names to arrays with a leading batch axis; ``observation.state``
                (b, s) and ``observation.environment_state`` (b, e) numbers, ``observation.images.<camera>``
                (b, h, w, 3) uint8. Frames of another size than the policy's are resized in the program. A batch
                or frame size that is new compiles first; see `is_compiled`. For a policy that reads language, ``task``:
                b texts, a list or an array. A text is encoded when it is new; see `prepare_task`.

        Raises:
            ObservationError: a feature is missing, has the wrong shape or dtype, or is not finite.
        """
        seen, inputs = self._reader.read(observation)
        if self._instructions is not None:
            seen = seen._replace(language=self._instructions(texts_of(observation, inputs.batch)))
        program = self._program(inputs)
        actions, self._timings = self._run(program, seen)
        return actions

    def prepare_task(self, text: str) -> None:
        """Reads an instruction ahead, so that the next `act` need not; nothing for a policy that reads no language.

        May run in one thread while `act` runs in another.

        Raises:
            ObservationError: the policy cannot read it.
        """
        if self._instructions is not None:
            self._instructions(texts_of({TASK: [text]}, 1))

    def _encode(self, ids: np.ndarray, mask: np.ndarray) -> Language:
        program = self._programs.reading(ids.shape[1])
        return program(self._weights, *self._place.put((ids, mask), self._place.whole))

    def _program(self, inputs: Inputs) -> Any:
        """The executable for these shapes; where it is new, after a look at whether there is room to run it.

        Raises:
            ObservationError: there is none.
        """
        if not self._programs.has(inputs):
            config, place = self._checkpoint.config, self._place
            sizes = self._kind.sizes(config, inputs.batch, inputs.frames, platform=place.platform)
            frames = ", ".join(f"{height}x{width}" for height, width in inputs.frames)
            check_running(sizes, place, self._dtype.itemsize, f"a batch of {inputs.batch} with frames of {frames}")
        return self._programs.get(inputs)

    def _run(self, program: Any, seen: Observation) -> tuple[np.ndarray, dict[str, float]]:
        start = time.perf_counter()
        # A program on the CPU reads the arrays where they are, when they are aligned; a device_put of its own before
        # took 0.2 ms of 1.2. An accelerator computes while nobody waits for what was sent.
        placed = seen if self._place.is_host else self._place.put(seen, self._place.whole)
        sent = time.perf_counter()
        chunk = jax.block_until_ready(program(self._weights, placed))
        computed = time.perf_counter()
        actions = np.array(chunk)  # a copy: the buffer may be the device's own
        ended = time.perf_counter()
        return actions, {"to_device": sent - start, "compute": computed - sent, "to_host": ended - computed}

    def _zeros(self, inputs: Inputs) -> Observation:
        shapes = inputs.shapes(self._place.whole)
        zeros: Observation = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
        if zeros.language is None:
            return zeros
        # A text without a token is none.
        return zeros._replace(language=zeros.language._replace(mask=np.ones_like(zeros.language.mask)))

    def build(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> None:
        """What `compile` does, but for the run: nothing is asked of the devices.

        Over the devices of several processes, runs have to come in the same order in all of them; this need not.

        Raises:
            ObservationError: a camera the policy does not have, or one left out.
        """
        inputs = self._reader.inputs(batch, cameras)
        if inputs.language is not None:
            self._programs.reading(inputs.language[0])
        self._program(inputs)

    def compile(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Compiles for frames of these sizes (the policy's own by default) and runs once on zeros.

        Args:
            cameras: camera name to (height, width) of the frames that will arrive.

        Raises:
            ObservationError: a camera the policy does not have, or one left out.
        """
        inputs = self._reader.inputs(batch, cameras)
        if inputs.language is not None:
            length = inputs.language[0]
            self._encode(np.zeros((1, length), np.int32), np.ones((1, length), bool))
        self._run(self._program(inputs), self._zeros(inputs))

    def rehearse(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> float:
        """Seconds that `act` takes for such a batch just now, measured with zeros; compiles first when it has to."""
        inputs = self._reader.inputs(batch, cameras)
        program, zeros = self._program(inputs), self._zeros(inputs)
        start = time.perf_counter()
        self._run(program, zeros)
        return time.perf_counter() - start

    def is_compiled(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None) -> bool:
        return self._programs.has(self._reader.inputs(batch, cameras))

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Whether another checkpoint can run in the programs compiled for this one."""
        mine, other = self._checkpoint.config, checkpoint.config
        return type(mine) is type(other) and self._kind.architecture(mine) == self._kind.architecture(other)

    def with_weights(self, checkpoint: Checkpoint) -> "Policy":
        """The same programs over another checkpoint: a swap that compiles nothing.

        Raises:
            ConfigError: its architecture is another one.
        """
        if not self.fits(checkpoint):
            raise ConfigError("the checkpoint has another architecture; load it as a policy of its own")
        return Policy(checkpoint, dtype=self.dtype, device=self.device, _programs=self._programs)

    def on(self, device: str | None) -> "Policy":
        """The same policy on another device; on its own, one that shares weights and programs with it.

        Raises:
            ConfigError: there is no such device.
        """
        if find_placement(device) == self._place:
            other = copy(self)
            other._timings = {}
            return other
        other = Policy(self._checkpoint, dtype=self.dtype, device=device)
        other.commit = self.commit
        return other

    def save(self, path: str | Path) -> None:
        """Writes LeRobot's layout, and ``robojax.json`` for what it has no field for."""
        lerobot.write(Path(path), self._checkpoint)


def _scales(checkpoint: Checkpoint) -> Scales:
    config: Any = checkpoint.config
    inputs, outputs = checkpoint.normalization.inputs, checkpoint.normalization.outputs
    return Scales(
        images=tuple(inputs.forward(feature) for feature in config.cameras),
        state=None if config.state is None else inputs.forward(config.state),
        environment_state=None if config.environment_state is None else inputs.forward(config.environment_state),
        action=outputs.backward(config.action),
    )
