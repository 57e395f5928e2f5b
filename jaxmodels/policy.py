"""Policies: requirements, and acting on observations and instructions."""

import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.export
import numpy as np
from jaxtyping import Float

from jaxmodels import observations
from jaxmodels.checkpoints.bundle import Manifest
from jaxmodels.devices import PLATFORMS, Placement, find_dtype, find_placement
from jaxmodels.errors import ConfigError
from jaxmodels.instructions import Instructions, Prompts, read_prompt_cuts, read_texts
from jaxmodels.memory import Demand, Needs, check_running, estimate_needs
from jaxmodels.normalization import get_outside_name
from jaxmodels.policies import CONSTANTS, get_policy_type, lerobot_folder
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.policies.lerobot_processors import get_relative_actions
from jaxmodels.program import Inputs, Program, Programs, Scales, build_scales
from jaxmodels.quantization import (
    find_policy_dtypes,
    get_own_dtypes,
    list_stored,
    quantize_weights,
)
from jaxmodels.ranges import shorten_value
from jaxmodels.roofline import ChunkWork, count_work
from jaxmodels.text import tokenizer
from jaxmodels.types import (
    CUT_TASK,
    PROMPT_CUT,
    PROMPT_CUTS,
    TASK,
    Language,
    Observation,
    Requirements,
    StageTime,
    camera_name,
    is_empty_camera,
)
from jaxmodels.weights import check_fit


def build_requirements(description: lerobot_folder.Description) -> Requirements:
    """Return the requirements of a policy with the robot's names."""
    config = description.config
    name = partial(get_outside_name, description.renames)
    return Requirements(
        policy_type=config.type,
        cameras={
            camera_name(name(camera.name)): camera.shape[1:]
            for camera in config.cameras
            if not is_empty_camera(camera.name)
        },
        state=None if config.state is None else config.state.shape[0],
        environment_state=None if config.environment_state is None else config.environment_state.shape[0],
        action=config.action.shape[0],
        chunk=config.chunk_size,
        action_steps=config.n_action_steps,
        joint_names=description.sidecar.joint_names,
        rate=description.sidecar.rate,
        action_range=description.action_range,
        temporal_ensemble_coeff=config.temporal_ensemble_coeff,
        takes_prefix=get_policy_type(config.type).takes_prefix,
        trained_delay=config.trained_delay,
        language=config.text_encoder is not None or config.prompt_length is not None,
        observation_steps=config.observation_steps,
        controls_joints=config.controls_joints,
        is_positional=config.openpi is not None,
        metadata=config.client_metadata,
    )


class Policy:
    """A loaded policy: observations to chunks of actions. One thread at a time may use it.

    `compile` may run in one thread while `act` runs in another.

    Attributes:
        checkpoint: content of the policy's folder.
        commit: commit of a repo of the Hub; None for a folder, unless the caller sets a name for its content.
        dtype: ``float32``, ``bfloat16``, or a name of `WEIGHT_DTYPES`: quantized, which only `load_policy` tests.
        requirements: what the policy needs from a robot.

    Example:
        >>> from jaxmodels import load_policy
        >>> policy = load_policy("robojax/sim/policy", device="cpu")
        >>> state, image = np.zeros((1, 6), np.float32), np.zeros((1, 96, 96, 3), np.uint8)
        >>> policy.act({"observation.state": state, "observation.images.front": image}).shape
        (1, 20, 6)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str | None = None,
        device: str | None = None,
        prompt_cut: str = CUT_TASK,
        platform: str | None = None,
        _programs: Programs | None = None,
    ):
        check_prompt_cut(prompt_cut)
        config: Any = checkpoint.config
        self.commit: str | None = None
        self._prompt_cut = prompt_cut
        self.checkpoint = checkpoint
        self._kind = get_policy_type(config.type)
        self._placement = find_placement(device)
        self._platform = platform or self._placement.platform
        bundle = checkpoint.bundle
        if bundle is not None:
            _check_bundle(bundle, dtype, self._placement)
            dtype = bundle.dtype
        self._dtype, small = find_policy_dtypes(dtype, self._platform, self._kind.accelerator_dtype)
        self.dtype = small or self._dtype.name
        scales = build_scales(checkpoint.config, checkpoint.normalization)
        prepare = partial(self._kind.prepare, config, platform=self._platform)
        if bundle is None:
            serving = prepare(checkpoint.weights)
            serving |= {} if small is None else quantize_weights(serving, small)
        else:
            serving = dict(checkpoint.weights)
            expected = jax.eval_shape(prepare, lerobot_folder.model_blueprint(config).shapes)
            expected = {name: shape.shape for name, shape in expected.items()}
            check_fit(
                {name: array.shape for name, array in serving.items()},
                expected if small is None else expected | list_stored(expected, small),
                where="weights of the bundle",
            )
        if _programs is None:
            _programs = self._plan_programs(serving, scales)
        self._programs = _programs
        self._weights = _programs.put(serving, scales)
        self._instructions: Instructions | None = None
        self._prompts: Prompts | None = None
        if config.prompt_length is not None:
            assert checkpoint.tokenizer is not None, "the reader of the checkpoint refuses a policy without a tokenizer"
            self._prompts = Prompts(config, scales.state, checkpoint.tokenizer, prompt_cut)
        if config.text_encoder is not None:
            reads = tokenizer(config.text_encoder, checkpoint.tokenizer)
            self._instructions = Instructions(reads, self._encode, self._placement)
        renames = checkpoint.normalization.renames
        needs = build_requirements(lerobot_folder.Description(config, checkpoint.sidecar, renames))
        inputs, outputs = checkpoint.normalization.inputs, checkpoint.normalization.outputs
        # With a joint map, the statistics describe mapped joints, which no robot reports.
        state = config.state if config.joint_map is None else None
        self.requirements = replace(
            needs,
            action_range=outputs.get_range(config.action),
            state_statistics=None if state is None else inputs.get_statistics(state),
            prompt_cuts=() if self._prompts is None else self._prompts.cuts,
        )
        self._reader = observations.Reader(checkpoint)
        self._timings: dict[str, float] = {}

    def _plan_programs(self, serving: Mapping[str, Any], scales: Scales) -> Programs:
        config, kind = self.checkpoint.config, self._kind
        plan, kept = config.architecture(), get_own_dtypes(serving)

        def dtype(name: str) -> Any:
            return np.float32 if name.startswith(CONSTANTS) else kept.get(name, self._dtype)

        return Programs(
            stages=[replace(stage, run=partial(stage.run, plan)) for stage in kind.stages],
            weights={name: jax.ShapeDtypeStruct(np.shape(serving[name]), dtype(name)) for name in sorted(serving)},
            scales=scales,
            sizes=(None,) * len(config.frames) if config.resizes_frames else config.frames,
            dtype=self._dtype,
            placement=self._placement,
            fit=kind.fit and partial(kind.fit, plan),
            read=kind.read and partial(kind.read, plan),
            relative=get_relative_actions(self.checkpoint.normalization, config.action.shape[0]),
            joint_map=config.joint_map,
        )

    @property
    def device(self) -> str:
        """Name of the device it runs on, e.g. ``cpu:0``."""
        return self._placement.name

    @property
    def platform(self) -> str:
        """Platform of JAX for which its weights were prepared, e.g. ``gpu``."""
        return self._platform

    @property
    def device_kind(self) -> str:
        """JAX's name of the device's kind, e.g. ``NVIDIA H200``; with their number if there are several."""
        kind, count = self._placement.devices[0].device_kind, len(self._placement.devices)
        return kind if count == 1 else f"{count} x {kind}"

    @property
    def prefix_tokens(self) -> int:
        """Tokens of images and words that are computed once per chunk; 0 for a policy without them."""
        return self.checkpoint.config.prefix_tokens

    @property
    def demand(self) -> Demand:
        """Memory and operations of its program for a batch of one with frames of its own sizes."""
        return self._programs.measure(self._reader.inputs(1, None))

    @property
    def needs(self) -> Needs:
        """Estimated bytes of memory that it takes for a batch of one with frames of its own sizes."""
        read, served = self.count_parameters(), self._programs.count_weights()
        needs = estimate_needs(sum(read.values()), served, self._dtype.itemsize, self._kind.runs_as_read)
        return replace(needs, weights=self._programs.count_bytes(), activations=self.demand.activations)

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of the last `act` in ``to_device``, ``compute`` and ``to_host``; empty before the first.

        A single device receives its inputs while the program starts, which counts as ``compute``.
        """
        return MappingProxyType(self._timings)

    def act(
        self,
        observation: Mapping[str, np.ndarray],
        *,
        noise: Float[np.ndarray, "b t2 a2"] | None = None,
        step_noise: Float[np.ndarray, "n b t2 a2"] | None = None,
    ) -> Float[np.ndarray, "b t a"]:
        """Compute a chunk of un-normalised actions, float32.

        Args:
            observation: LeRobot's feature names to arrays with a leading batch axis: ``observation.state`` (b, s) and
                ``observation.environment_state`` (b, e) numbers, ``observation.images.<camera>`` (b, h, w, 3) uint8.
                The program resizes frames of other sizes. A new batch or frame size compiles first; see `is_compiled`.
                A policy that reads language also takes ``task``, b texts (see `prepare_task`), and optionally
                ``prompt_cut``, b of `PROMPT_CUTS`. With `Requirements.observation_steps` above one, arrays have a time
                axis after the batch axis, oldest first.
            noise: noise that the sampler starts from, in the model's own shape; None for the policy's own, which is
                always the same.
            step_noise: noise that the sampler adds in its steps (DDPM: in each but the last); requires `noise`.

        Raises:
            ObservationError: a feature is missing, has the wrong shape or dtype, or is not finite; or the policy takes
                no such noise.
        """
        arrays, inputs = self._reader.read(observation, noise, step_noise)
        if self._instructions is not None:
            arrays = arrays._replace(language=self._instructions(read_texts(observation, inputs.batch)))
        if self._prompts is not None:
            texts, cuts = read_texts(observation, inputs.batch), read_prompt_cuts(observation, inputs.batch)
            language = self._prompts(texts, arrays.state, cuts)
            arrays, inputs = arrays._replace(language=language), replace(inputs, language=language.tokens.shape[1:])
        program = self._program(inputs)
        actions, self._timings = self._run(program, arrays)
        return actions

    def prepare_task(self, text: str, prompt_cut: str | None = None) -> int:
        """Encode an instruction before the next `act`, perhaps in another thread; does nothing without language.

        Args:
            prompt_cut: a value of `PROMPT_CUTS`; the policy's own when None.

        Returns:
            Number of tokens that do not fit into the prompt with a state of zeros (see `describe_cut`).

        Raises:
            ObservationError: the policy cannot read it.
        """
        if self._instructions is None and self._prompts is None:
            return 0
        texts = read_texts({TASK: [text]}, 1)
        if prompt_cut is not None:
            read_prompt_cuts({PROMPT_CUT: [prompt_cut]}, 1)
        if self._instructions is not None:
            self._instructions(texts)
        return 0 if self._prompts is None else self._prompts.count_cut(text, self.requirements.state, prompt_cut)

    def get_serving_weights(self) -> dict[str, np.ndarray]:
        """Return the arrays of the serving program by name, on the host."""
        return dict(zip(self._programs.weights, map(np.asarray, self._weights.arrays), strict=True))

    def _encode(self, ids: np.ndarray, mask: np.ndarray) -> Language:
        program = self._programs.get_reader(ids.shape[1])
        return program(self._weights.arrays, *jax.device_put((ids, mask), self._placement.replicated))

    def _program(self, inputs: Inputs) -> Program:
        """Return the executable for these shapes; raises ObservationError if there is too little memory for it."""
        return self._programs.get_program(inputs, partial(self._check_memory, inputs))

    def _check_memory(self, inputs: Inputs, demand: Demand) -> None:
        frames = ", ".join(f"{size[0]}x{size[1]}" for size in inputs.frames if size is not None)
        check_running(demand, self._placement, f"a batch of {inputs.batch} with frames of {frames}")

    def _run(self, program: Program, arrays: Observation) -> tuple[np.ndarray, dict[str, float]]:
        start = time.perf_counter()
        # The program takes host arrays itself, because a device_put costs 0.2 ms more.
        is_single = len(self._placement.devices) == 1
        on_device = arrays if is_single else jax.device_put(arrays, self._placement.replicated)
        sent = time.perf_counter()
        chunk = program(self._weights, on_device)
        if not self._placement.is_host:
            chunk.copy_to_host_async()  # The copy starts as soon as the chunk is computed.
        jax.block_until_ready(chunk)
        computed = time.perf_counter()
        actions = np.array(chunk)  # Copied, because the buffer may belong to the device.
        ended = time.perf_counter()
        return actions, {"to_device": sent - start, "compute": computed - sent, "to_host": ended - computed}

    def _make_zeros(self, inputs: Inputs) -> Observation:
        shapes = inputs.shapes(self._placement.replicated)
        zeros: Observation = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
        if zeros.language is None:
            return zeros
        # A text without a valid token would give NaN.
        return zeros._replace(language=zeros.language._replace(mask=np.ones_like(zeros.language.mask)))

    def compile(
        self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, *, with_plan: bool = False
    ) -> None:
        """Compile for frames of these sizes (the policy's own by default) and run once on zeros.

        It compiles all programs that `act` may need, also for short instructions.

        Args:
            cameras: camera name to (height, width) in pixels.
            with_plan: whether observations may have a plan to continue. Compiling its program takes as long again.

        Raises:
            ObservationError: a camera is unknown or missing.
        """
        variants = self._reader.list_variants(batch, cameras, with_plan=with_plan)
        if self._instructions is not None and variants[0].language is not None:
            length = variants[0].language[0]
            self._encode(np.zeros((1, length), np.int32), np.ones((1, length), bool))
        self._programs.compile(variants, partial(self._check_memory, variants[0]))
        for inputs in variants:
            self._run(self._program(inputs), self._make_zeros(inputs))

    def profile(
        self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, *, with_plan: bool = False
    ) -> float:
        """Measure the seconds of one `act` on a batch of zeros; compiles first when needed."""
        inputs = self._reader.inputs(batch, cameras, with_plan=with_plan)
        program, zeros = self._program(inputs), self._make_zeros(inputs)
        start = time.perf_counter()
        self._run(program, zeros)
        return time.perf_counter() - start

    def profile_stages(self, runs: int = 10, batch: int = 1) -> tuple[StageTime, ...]:
        """Measure each part of `act` on a batch of zeros; median of `runs`."""
        inputs = self._reader.inputs(batch, None)
        program, zeros, weights = self._program(inputs), self._make_zeros(inputs), self._weights

        def measure(run: Callable[[], Any]) -> tuple[Any, float]:
            result, seconds = jax.block_until_ready(run()), []
            for _ in range(runs):
                start = time.perf_counter()
                jax.block_until_ready(run())
                seconds.append(time.perf_counter() - start)
            return result, float(np.median(seconds))

        prepared, times, given = zeros, [], None
        if program.prepare is not None:
            prepared, seconds = measure(partial(program.prepare, weights.scales, zeros))
            times = [StageTime("frames", seconds, 1)]
        for stage, part in zip(self._kind.stages, program.stages, strict=True):
            given, seconds = measure(partial(part, weights, prepared, given))
            count = stage.count(self.checkpoint.config)
            times.append(StageTime(stage.name, seconds / count, count))
        return tuple(times)

    def count_work(self, batch: int = 1, dtype: str | None = None) -> ChunkWork:
        """Count the operations and bytes of each part of `act` on an accelerator, which may be absent.

        Args:
            dtype: ``float32`` or ``bfloat16``; None for the type's own on an accelerator.

        Raises:
            ConfigError: the dtype is unknown.
            ObservationError: the batch is out of range.
        """
        return count_work(self._describe_programs("gpu", dtype), self._reader.inputs(batch, None))

    def export(
        self, platform: str, batch: int = 1, dtype: str | None = None, *, with_plan: bool = False
    ) -> jax.export.Exported:
        """Lower the computation of `act` to StableHLO for ``cpu``, ``cuda`` or ``tpu``, which may be absent.

        Its arguments are the weights that it serves on that platform in the order of their names, the scales, and an
        `Observation`, which has a plan to continue only if `with_plan`. For `dtype` and errors see `count_work`.
        """
        target = PLATFORMS.get(platform, platform)
        is_own = target == self._platform and dtype is None
        programs = self._programs if is_own else self._describe_programs(target, dtype)
        return programs.export(self._reader.inputs(batch, None, with_plan=with_plan), platform)

    def _describe_programs(self, platform: str, dtype: str | None) -> Programs:
        """Return programs over the weights of another platform, for tracing."""
        served = find_dtype(dtype, platform, self._kind.accelerator_dtype)
        prepare = partial(self._kind.prepare, self.checkpoint.config, platform=platform)
        shapes = {
            name: jax.ShapeDtypeStruct(shape.shape, np.float32 if name.startswith(CONSTANTS) else served)
            for name, shape in sorted(jax.eval_shape(prepare, dict(self.checkpoint.weights)).items())
        }
        return replace(self._programs, weights=shapes, dtype=served)

    def count_parameters(self) -> dict[str, int]:
        """Count the numbers in the weights by part of the network, such as ``vision``."""
        counts: dict[str, int] = {}
        for name, array in self.checkpoint.weights.items():
            if name.startswith(CONSTANTS):
                continue  # A bundle has them; they are computed from parameters.
            part = next(part for start, part in self._kind.parts.items() if name.startswith(start))
            counts[part] = counts.get(part, 0) + int(np.size(array))
        return counts

    @property
    def lerobot(self) -> str | None:
        """Version of LeRobot whose reading of the files is followed; None where 0.4 and 0.6 read them alike."""
        return self.checkpoint.config.lerobot

    def is_compiled(
        self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, *, with_plan: bool = False
    ) -> bool:
        return all(map(self._programs.has, self._reader.list_variants(batch, cameras, with_plan=with_plan)))

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Return whether another checkpoint can run in the compiled programs of this policy."""
        mine, other = self.checkpoint.config, checkpoint.config
        return type(mine) is type(other) and mine.architecture() == other.architecture()

    def with_weights(self, checkpoint: Checkpoint, prompt_cut: str | None = None) -> "Policy":
        """Return a policy with another checkpoint's weights in the same programs: nothing is compiled.

        Raises:
            ConfigError: its architecture differs.
        """
        if not self.fits(checkpoint):
            raise ConfigError("the checkpoint has another architecture; load it as a separate policy")
        cut = prompt_cut or self._prompt_cut
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "platform": self._platform}
        return Policy(checkpoint, prompt_cut=cut, _programs=self._programs, **options)

    def on(self, device: str | None) -> "Policy":
        """Return this policy on another device; on the same device it shares weights and programs.

        Raises:
            ConfigError: there is no such device.
        """
        if find_placement(device) == self._placement:
            other = copy(self)
            other._timings = {}
            return other
        options: dict[str, Any] = {"dtype": self.dtype, "device": device, "platform": self._platform}
        other = Policy(self.checkpoint, prompt_cut=self._prompt_cut, **options)
        other.commit = self.commit
        return other

    def save(self, path: str | Path) -> None:
        """Write the policy in LeRobot's layout, with ``robojax.json`` for the fields LeRobot lacks.

        Tensors that acting does not need (the language heads of SmolVLA and pi0) are written as zeros.
        """
        lerobot_folder.write_checkpoint(Path(path), self.checkpoint)


def _check_bundle(bundle: Manifest, dtype: str | None, placement: Placement) -> None:
    """Raise ConfigError if a bundle was exported for another platform or dtype than it is loaded for."""
    if PLATFORMS.get(bundle.platform, bundle.platform) != placement.platform:
        raise ConfigError(
            f"the bundle is for {bundle.platform}, and the device is {placement.name}; export the policy again, "
            f"--for {placement.platform}, or choose another device"
        )
    if dtype not in (None, bundle.dtype):
        raise ConfigError(
            f"dtype is {dtype}, and the bundle has {bundle.dtype}; leave it out, or export the policy again"
        )


def check_prompt_cut(prompt_cut: str) -> None:
    """Raise ConfigError for a name that is not in `PROMPT_CUTS`."""
    if prompt_cut not in PROMPT_CUTS:
        raise ConfigError(f"{PROMPT_CUT} is {shorten_value(prompt_cut)}; wanted one of {', '.join(PROMPT_CUTS)}")
