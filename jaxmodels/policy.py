"""Policy: load, describe requirements, act on instructions."""

import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from jaxmodels import observations
from jaxmodels.checkpoints.folder import PolicyFolder
from jaxmodels.devices import Placement, find_dtype, find_placement
from jaxmodels.errors import ConfigError, HubError, ObservationError
from jaxmodels.hub import POLICY_FILES, fetch, find_policy
from jaxmodels.memory import Needs, Sizes, check_loading, check_running, needs_of
from jaxmodels.policies import lerobot_folder, policy_type
from jaxmodels.policies.integrity import check_weights, read_small
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.program import Inputs, Programs, Scales
from jaxmodels.text import Tokenizer, tokenizer
from jaxmodels.types import TASK, Language, Observation, Requirements, camera_name

DESCRIBING = tuple(name for name in POLICY_FILES if name != lerobot_folder.WEIGHTS)


def read_requirements(
    path_or_repo: str | Path,
    revision: str | None = None,
    *,
    read: Callable[[PolicyFolder], Mapping[str, Any]] = read_small,
    roots: Iterable[Path] | None = None,
) -> Requirements:
    """What a policy in a folder or on the Hub needs, from its small files alone.

    Args:
        path_or_repo: a folder, or a repo id like ``owner/name``.
        revision: branch, tag or commit of a repo.
        read: reads these files, e.g. in another process.
        roots: as of `jaxmodels.load_policy`.

    Raises:
        HubError: the repo cannot be fetched.
        ConfigError: the config makes no sense.
        CheckpointError: files are missing or malformed. Weights are only looked for, so loading may still fail.
    """
    folder = Path(os.path.expanduser(path_or_repo))
    if str(path_or_repo) and folder.is_dir():
        if revision is not None:
            raise ConfigError(f"{folder.name} is a folder; a revision ({revision!r}) belongs to a repo of the Hub")
        with PolicyFolder(folder, roots=roots) as opened:
            check_weights(opened, has_orbax=opened.has_tree())
            return _of(lerobot_folder.described(read(opened)))
    # A cache of its own: half a policy in the usual one would pass for a whole policy when the Hub cannot be reached.
    with tempfile.TemporaryDirectory(prefix="robojax-description-") as cache:
        try:
            found = fetch(str(path_or_repo), revision, files=DESCRIBING, cache=Path(cache))
        except HubError:
            found = fetch(str(path_or_repo), revision, files=DESCRIBING)
        with PolicyFolder(found, roots=found.parents[1:2]) as opened:
            return _of(lerobot_folder.described(read(opened)))


def _of(description: lerobot_folder.Description) -> Requirements:
    """Of a policy that is still a stranger's: whether anything could compute it is asked, too."""
    config = description.config
    sizes: Sizes = policy_type(config.type).sizes(config)
    sizes.check()
    return requirements_of(description)


def requirements_of(description: lerobot_folder.Description) -> Requirements:
    """The same in the words of whoever runs a robot."""
    config = description.config
    name = description.outside_name
    return Requirements(
        policy_type=config.type,
        cameras={camera_name(name(camera.name)): camera.shape[1:] for camera in config.cameras},
        state=None if config.state is None else config.state.shape[0],
        environment_state=None if config.environment_state is None else config.environment_state.shape[0],
        action=config.action.shape[0],
        chunk=config.chunk_size,
        action_steps=config.n_action_steps,
        joint_names=description.sidecar.joint_names,
        rate=description.sidecar.rate,
        temporal_ensemble_coeff=config.temporal_ensemble_coeff,
        takes_prefix=policy_type(config.type).takes_prefix,
        language=config.text_encoder is not None,
    )


Key = TypeVar("Key")
Value = TypeVar("Value")

# Texts, and batches of them, that are kept; those that were longest unused go first. A long CLIP text is 0.2 MB.
TEXTS_KEPT = 64
BATCHES_KEPT = 32


def texts_of(observation: Mapping[str, Any], batch: int) -> tuple[str, ...]:
    """What each member of a batch is told to do.

    Raises:
        ObservationError: it is missing, says nothing, or is not one text for each member.
    """
    wanted = f"wanted {batch} text{'s' if batch > 1 else ''}, e.g. {TASK!r}: {['pick up the cube'] * min(batch, 2)}"
    if TASK not in observation:
        raise ObservationError(f"{TASK} is missing: this policy is told what to do; {wanted}")
    found = observation[TASK]
    if isinstance(found, str):
        raise ObservationError(f"{TASK} is one text without a batch axis; {wanted}")
    texts = found.tolist() if isinstance(found, np.ndarray) and found.ndim == 1 else found
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ObservationError(f"{TASK} is {type(found).__name__}{list(np.shape(found))}; {wanted}")
    if len(texts) != batch:
        raise ObservationError(f"{TASK} has {len(texts)} texts and the other features {batch} members; {wanted}")
    for member, text in enumerate(texts):
        if not text.strip():
            raise ObservationError(f"{TASK} is blank for member {member}; this policy is told what to do, in words")
    return tuple(texts)


class Instructions:
    """Texts in, what their encoder makes of them out. May be used from several threads.

    Args:
        tokenizer: of the policy's folder.
        encode: tokens (1, n) and their mask to `Language`, in a compiled program.
        place: where the policy runs.
    """

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[np.ndarray, np.ndarray], Language], place: Placement):
        self._tokenizer = tokenizer
        self._encode = encode
        self._place = place
        self._texts: OrderedDict[str, Language] = OrderedDict()
        self._batches: OrderedDict[tuple[str, ...], Language] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, texts: tuple[str, ...]) -> Language:
        """(b, n, d) where the policy runs, for one text per member.

        Raises:
            ObservationError: a text cannot be read.
        """
        found = self._kept(self._batches, texts)
        if found is not None:
            return found
        members = [self._read(text) for text in texts]
        together = Language(*(np.concatenate(parts) for parts in zip(*members, strict=True)))
        placed = self._place.put(together, self._place.whole)
        self._keep(self._batches, texts, placed, BATCHES_KEPT)
        return placed

    def _read(self, text: str) -> Language:
        found = self._kept(self._texts, text)
        if found is None:
            found = Language(*map(np.asarray, self._encode(*self._tokenizer([text]))))
            self._keep(self._texts, text, found, TEXTS_KEPT)
        return found

    def _kept(self, kept: "OrderedDict[Key, Value]", key: Key) -> Value | None:
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
            return kept.get(key)

    def _keep(self, kept: "OrderedDict[Key, Value]", key: Key, value: Value, most: int) -> None:
        with self._lock:
            kept[key] = value
            if len(kept) > most:
                kept.popitem(last=False)


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
        needs = requirements_of(lerobot_folder.Description(config, checkpoint.sidecar, renames))
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
        lerobot_folder.write(Path(path), self._checkpoint)


def _scales(checkpoint: Checkpoint) -> Scales:
    config: Any = checkpoint.config
    inputs, outputs = checkpoint.normalization.inputs, checkpoint.normalization.outputs
    return Scales(
        images=tuple(inputs.forward(feature) for feature in config.cameras),
        state=None if config.state is None else inputs.forward(config.state),
        environment_state=None if config.environment_state is None else inputs.forward(config.environment_state),
        action=outputs.backward(config.action),
    )


def load_policy(
    path_or_repo: str | Path,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    *,
    like: Policy | None = None,
    on_progress: Callable[[str], None] | None = None,
    inspect: Callable[[PolicyFolder], None] | None = None,
    largest: int | None = None,
    roots: Iterable[Path] | None = None,
) -> Policy:
    """Reads a LeRobot policy from a folder or from the Hub.

    Args:
        path_or_repo: a folder, or a repo id like ``owner/name``.
        revision: branch, tag or commit of a repo.
        dtype: ``float32`` (default) or ``bfloat16``, which is meant for accelerators and slow on a CPU.
        device: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``, ``cuda:0+cuda:1`` for a policy too large for one of them;
            JAX's first choice when None.
        like: a policy whose compiled programs are shared when the architecture is the same.
        on_progress: told ``downloading``, ``reading``, ``ready``.
        inspect: given the folder, whose files are open, before anything in it is read; raises CheckpointError when it
            should not be.
        largest: bytes that the files of a repo may have, asked before they are fetched, or the weights of a folder.
        roots: folders that a folder's files have to be in, wherever links lead to; anywhere when None. A repo's are in
            the Hub's cache.

    Raises:
        HubError: the repo cannot be fetched, or is larger.
        ConfigError: the config, dtype or device makes no sense.
        CheckpointError: files are missing, malformed, or do not fit the config.
    """
    tell = on_progress or (lambda stage: None)
    where, compute = find_placement(device), find_dtype(dtype)
    folder, commit = find_policy(path_or_repo, revision, on_progress=tell, largest=largest)
    tell("reading")
    # A snapshot of the Hub's cache links to files beside it.
    with PolicyFolder(folder, roots=roots if commit is None else folder.parents[1:2], largest=largest) as opened:
        if inspect is not None:
            inspect(opened)
        checkpoint = lerobot_folder.read(opened, admit=lambda sizes: check_loading(sizes, where, compute.itemsize))
    same_place = like is not None and (like.dtype, like.device) == (compute.name, where.name)
    if like is not None and same_place and like.fits(checkpoint):
        policy = like.with_weights(checkpoint)
    else:
        policy = Policy(checkpoint, dtype=dtype, device=device)
    policy.commit = commit
    tell("ready")
    return policy
