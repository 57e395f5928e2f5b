"""Ahead-of-time compiled programs from frames to actions, over weights as a flat tuple.

A program is a sequence of executables. The first one resizes and normalises the observation, so that frames of another
size compile nothing else; the others are the stages of the policy, which compile in parallel. A call with a flat tuple
is faster than with an NNX state. All contents of a checkpoint are arguments, so that another checkpoint of the same
architecture runs in the same executables.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.devices import Placement, use_exact_products
from jaxmodels.memory import Demand, measure_program
from jaxmodels.normalization import Affine, Normalization
from jaxmodels.types import Language, Observation, Prefix

Size: TypeAlias = tuple[int, int]
# (serving weights by name, normalised observation, result of the stage before or None) to a result.
RunStage: TypeAlias = Callable[[Mapping[str, Array], "Observation", Any], Any]
# A spread or range that is smaller, relative to the number's size, is rounding in float32.
STILL = 1e-6


@dataclass(frozen=True)
class Inputs:
    """Shapes of an observation, which together with the architecture determine an executable.

    Attributes:
        frames: (height, width) of each camera's frames as they arrive; None for an absent camera.
        prefix: (t, a) of the plan that is continued, if any.
        language: (n, d) of an encoded instruction, or (n,) of tokens that the policy embeds.
        steps: consecutive observations in the input; with one there is no time axis.
        noise: (t, a) of the sampler's first noise, if it is given.
        noise_steps: number of noises that are given for the sampler's steps.
        has_masks: whether each member has a mask of its images.
    """

    batch: int
    frames: tuple[Size | None, ...]
    state: int | None
    environment_state: int | None
    prefix: Size | None = None
    language: tuple[int, ...] | None = None
    steps: int = 1
    noise: Size | None = None
    noise_steps: int = 0
    has_masks: bool = False

    def shapes(self, sharding: jax.sharding.Sharding) -> Observation:
        def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch, *sizes), dtype, sharding=sharding)

        time = () if self.steps == 1 else (self.steps,)
        step_noise = None
        if self.noise is not None and self.noise_steps:
            sizes = (self.noise_steps, self.batch, *self.noise)
            step_noise = jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)
        return Observation(
            images=tuple(size and shape(*time, *size, 3, dtype=jnp.uint8) for size in self.frames),
            state=None if self.state is None else shape(*time, self.state),
            environment_state=None if self.environment_state is None else shape(*time, self.environment_state),
            prefix=None
            if self.prefix is None
            else Prefix(shape(*self.prefix), shape(dtype=jnp.int32), shape(dtype=jnp.int32)),
            language=None
            if self.language is None
            else Language(
                shape(*self.language, dtype=jnp.int32 if len(self.language) == 1 else jnp.float32),
                shape(self.language[0], dtype=jnp.bool_),
            ),
            noise=None if self.noise is None else shape(*self.noise),
            step_noise=step_noise,
            image_masks=shape(len(self.frames), dtype=jnp.bool_) if self.has_masks else None,
        )


@dataclass(frozen=True)
class Scales:
    """Normalization of all inputs and outputs of a policy; for images, of pixels in [0, 1]."""

    images: tuple[Affine, ...]
    state: Affine | None
    environment_state: Affine | None
    action: Affine


jax.tree_util.register_dataclass(Scales, data_fields=["images", "state", "environment_state", "action"], meta_fields=[])


def build_scales(config: Any, normalization: Normalization) -> Scales:
    """Build the scales of a policy's features, with actions in the inverse direction."""
    inputs = normalization.inputs
    return Scales(
        images=tuple(inputs.get_affine(camera) for camera in config.cameras),
        state=None if config.state is None else inputs.get_affine(config.state),
        environment_state=None if config.environment_state is None else inputs.get_affine(config.environment_state),
        action=normalization.outputs.get_affine(config.action, inverse=True),
    )


def prepare_pixels(
    frames: UInt8[Array, "b *t h w 3"], size: Size | None, scale: Affine, dtype: DTypeLike
) -> Float[Array, "b *t h2 w2 3"]:
    """Resize frames to the policy's size, stretched where the aspect differs, and normalise them; None: no resize."""
    x = frames.astype(jnp.float32) / 255.0
    if size is not None and frames.shape[-3:-1] != size:
        x = jax.image.resize(x, (*frames.shape[:-3], *size, 3), "linear")
    return scale.normalize(x).astype(dtype)


def normalize_plan(actions: Float[Array, "b t a"], scale: Affine) -> Float[Array, "b t a"]:
    """Convert a plan's un-normalised actions to the policy's normalised ones."""
    # If a joint never moved in the data, its rounding divided by nearly 0 could be any number.
    moves = scale.scale > STILL * (1 + jnp.abs(scale.offset))
    return jnp.where(moves, (actions - scale.offset) / jnp.where(moves, scale.scale, 1), 0) + scale.shift


def normalize(
    observation: Observation,
    scales: Scales,
    sizes: tuple[Size | None, ...],
    dtype: DTypeLike = jnp.float32,
    relative: tuple[bool, ...] | None = None,
) -> Observation:
    """Normalise a raw observation (uint8 frames); `relative` marks numbers of an action relative to the state."""

    def vector(x: Any, scale: Affine | None) -> Any:
        return None if scale is None else scale.normalize(x).astype(dtype)

    images = zip(observation.images, sizes, scales.images, strict=True)
    return Observation(
        images=tuple(
            # A policy that resizes frames itself also rounds them itself.
            None if frames is None else prepare_pixels(frames, size, scale, jnp.float32 if size is None else dtype)
            for frames, size, scale in images
        ),
        state=vector(observation.state, scales.state),
        environment_state=vector(observation.environment_state, scales.environment_state),
        prefix=None if observation.prefix is None else _normalize_prefix(observation, scales.action, relative),
        language=None if observation.language is None else _cast_language(observation.language, dtype),
        noise=observation.noise,
        step_noise=observation.step_noise,
        image_masks=observation.image_masks,
    )


def _cast_language(language: Language, dtype: DTypeLike) -> Language:
    """Return encoded language in the policy's precision; tokens of a tokenizer stay integers."""
    is_encoded = jnp.issubdtype(language.tokens.dtype, jnp.floating)
    return language._replace(tokens=language.tokens.astype(dtype)) if is_encoded else language


def _normalize_prefix(observation: Observation, scale: Affine, relative: tuple[bool, ...] | None) -> Prefix:
    assert observation.prefix is not None
    actions = observation.prefix.actions
    if relative is not None:
        actions = actions - get_origin(observation.state, relative)
    return observation.prefix._replace(actions=normalize_plan(actions, scale))


def get_origin(state: Float[Array, "b s"], relative: tuple[bool, ...]) -> Float[Array, "b 1 a"]:
    """Return the origin of actions: the raw state for relative numbers, 0 for absolute numbers."""
    width = len(relative)
    start = jnp.pad(state[:, :width], ((0, 0), (0, max(width - state.shape[1], 0))))
    return jnp.where(jnp.asarray(relative), start, 0.0)[:, None]


@dataclass(frozen=True)
class Weights:
    """Serving weights and scales of one checkpoint on its devices: the arguments of a `Program`."""

    arrays: tuple[jax.Array, ...]
    scales: Scales


class Prepared(NamedTuple):
    """Normalised observation, and the origin of actions that are relative to the state."""

    observation: Observation
    origin: Float[Array, "b 1 a"] | None


@dataclass(frozen=True)
class Program:
    """Executables from an observation to a chunk, in order.

    Attributes:
        prepare: (scales, raw observation) to `Prepared`; it is small, and all that depends on the sizes of the frames.
            None if the only stage reads the raw observation.
        stages: by name, (arrays and scales of the weights, `Prepared`, result of the stage before or None) to a
            result. The last result is the chunk (b, t, a), float32, not normalised.
    """

    prepare: jax.stages.Compiled | None
    stages: Mapping[str, jax.stages.Compiled]

    def __call__(self, weights: Weights, observation: Observation) -> Any:
        prepared: Any = observation if self.prepare is None else self.prepare(weights.scales, observation)
        given = None
        for stage in self.stages.values():
            given = stage(weights.arrays, weights.scales, prepared, given)
        return given


@dataclass(eq=False)
class Programs:
    """Executables of one architecture on one placement, compiled on first use.

    Attributes:
        stages: by name, in order; the last one returns a normalised chunk.
        weights: shapes of the serving weights by name, in the order of the flat tuple.
        scales: any tree of the structure of the policy's `Scales`.
        sizes: (height, width) per camera; None for a policy that resizes frames itself.
        fit: pixels (b, h, w, 3) of [0, 1] to the pixels that the stages read; None if they read them as they are.
        read: serving weights, tokens (1, n) and their mask to `Language`; None without a text encoder.
        relative: which numbers of an action are relative to the state.
        joint_map: see `PolicyConfig`.
    """

    stages: Mapping[str, RunStage]
    weights: Mapping[str, jax.ShapeDtypeStruct]
    scales: Scales
    sizes: tuple[Size | None, ...]
    dtype: DTypeLike
    placement: Placement
    fit: Callable[[Array], Array] | None = None
    read: Callable[[Mapping[str, Array], Array, Array], Language] | None = None
    relative: tuple[bool, ...] | None = None
    joint_map: Any = None

    def __post_init__(self) -> None:
        self._reading: dict[int, jax.stages.Compiled] = {}
        self._compiled: dict[Inputs, Program] = {}
        # Programs that differ in the sizes of the frames alone share their stages.
        self._stages: dict[Any, Mapping[str, jax.stages.Compiled]] = {}
        self._demands: dict[Inputs, Demand] = {}
        self._lock = threading.Lock()

    def count_weights(self) -> int:
        """Return the number of numbers in the serving weights."""
        return sum(math.prod(shape.shape) for shape in self.weights.values())

    def has(self, inputs: Inputs) -> bool:
        return inputs in self._compiled

    def get_program(self, inputs: Inputs, check: Callable[[Demand], None] | None = None) -> Program:
        """Return the executables for these shapes.

        `check` receives a new program's memory and operations before it is compiled, and may raise an error.
        """
        program = self._compiled.get(inputs)
        if program is not None:
            return program  # This needs no lock, which another compilation may hold for seconds.
        with self._lock:  # Two threads that need the same program wait for one compilation.
            if inputs not in self._compiled:
                prepare = None if self._prepares_in_stage else self._trace_preparation(inputs)
                shapes = inputs.shapes(self.placement.replicated) if prepare is None else prepare.out_info
                key = _identify(shapes)
                stages = {} if key in self._stages else self._trace_stages(shapes)
                demand = self._measure(prepare, stages)
                if check is not None:
                    check(demand)
                compiled = self._compile([traced for traced in (prepare, *stages.values()) if traced is not None])
                first = None if prepare is None else compiled.pop(0)
                if stages:
                    self._demands[inputs] = demand
                    self._stages[key] = dict(zip(stages, compiled, strict=True))
                self._compiled[inputs] = Program(first, self._stages[key])
            return self._compiled[inputs]

    def measure(self, inputs: Inputs) -> Demand:
        """Return memory and operations of the program for these shapes, which is traced if it is not compiled."""
        with self._lock:
            if inputs not in self._demands:
                prepare = self._trace_preparation(inputs)
                self._demands[inputs] = self._measure(prepare, self._trace_stages(prepare.out_info))
            return self._demands[inputs]

    def _measure(self, prepare: jax.stages.Traced | None, stages: Mapping[str, jax.stages.Traced]) -> Demand:
        platform = self.placement.platform
        traced = [one for one in (prepare, *stages.values()) if one is not None]
        parts = [measure_program(one.jaxpr, platform) for one in traced]
        return Demand(max(part.activations for part in parts), sum(part.operations for part in parts))

    @property
    def _prepares_in_stage(self) -> bool:
        # On a CPU, another executable takes 0.15 ms, a fifth of the time of the shipped ACT policy.
        return self.placement.is_host and len(self.stages) == 1

    def export(self, inputs: Inputs, platform: str) -> jax.export.Exported:
        """Lower the whole computation of a chunk to StableHLO for ``cpu``, ``cuda`` or ``tpu``, which may be absent."""

        def run(arrays: tuple[Array, ...], scales: Scales, observation: Observation) -> Array:
            prepared = self._prepare(scales, observation)
            given: Any = None
            for stage in self.stages.values():
                given = stage(self._name(arrays), prepared.observation, given)
            return self._finish(scales, prepared, given)

        shapes = self._weight_shapes(), self._shapes(self.scales), inputs.shapes(self.placement.replicated)
        with use_exact_products(self.dtype):
            return jax.export.export(jax.jit(run), platforms=[platform])(*shapes)

    def get_reader(self, length: int) -> jax.stages.Compiled:
        """Return the executable for a text length: ``(arrays, tokens (1, n), mask (1, n)) -> Language``."""
        if length in self._reading:
            return self._reading[length]
        with self._lock:
            if length not in self._reading:
                self._reading[length] = self._compile_reading(length)
            return self._reading[length]

    def put(self, weights: Mapping[str, Any], scales: Scales) -> Weights:
        """Put weights and scales on the device."""
        # Split arrays are cast on the host, because one device may be too small for a whole array. A CPU then uses
        # aligned float32 arrays in place.
        cast = jnp.asarray if len(self.placement.devices) == 1 and not self.placement.is_host else np.asarray
        arrays = [cast(weights[name], shape.dtype) for name, shape in self.weights.items()]
        shardings = self.placement.shard_weights([np.shape(array) for array in arrays])
        return Weights(tuple(jax.device_put(arrays, shardings)), jax.device_put(scales, self.placement.replicated))

    def _name(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        return dict(zip(self.weights, arrays, strict=True))

    def _prepare(self, scales: Scales, raw: Observation) -> Prepared:
        observation = raw if self.joint_map is None else self.joint_map.read(raw)
        normalized = normalize(observation, scales, self.sizes, self.dtype, self.relative)
        if self.fit is not None:
            images = tuple(pixels if pixels is None else self.fit(pixels) for pixels in normalized.images)
            normalized = normalized._replace(images=images)
        return Prepared(normalized, None if self.relative is None else get_origin(observation.state, self.relative))

    def _finish(self, scales: Scales, prepared: Prepared, chunk: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
        actions = scales.action.unnormalize(chunk.astype(jnp.float32))
        if prepared.origin is not None:
            actions = actions + prepared.origin
        return actions if self.joint_map is None else self.joint_map.write_actions(actions)

    def _trace_preparation(self, inputs: Inputs) -> jax.stages.Traced:
        return self._trace(self._prepare, self._shapes(self.scales), inputs.shapes(self.placement.replicated))

    def _trace_stages(self, prepared: Any) -> dict[str, jax.stages.Traced]:
        """Trace the stages for the shapes of `Prepared`, or of the raw observation that the only stage prepares."""
        scales, prepared, given = self._shapes(self.scales), self._shapes(prepared), None
        traced: dict[str, jax.stages.Traced] = {}
        for name, stage in self.stages.items():
            is_last = len(traced) + 1 == len(self.stages)

            def run(
                arrays: tuple[Array, ...],
                scales: Scales,
                prepared: Any,
                given: Any,
                stage: RunStage = stage,
                is_last: bool = is_last,
            ) -> Any:
                prepared = self._prepare(scales, prepared) if isinstance(prepared, Observation) else prepared
                result = stage(self._name(arrays), prepared.observation, given)
                return self._finish(scales, prepared, result) if is_last else result

            traced[name] = self._trace(run, self._weight_shapes(), scales, prepared, given)
            given = self._shapes(traced[name].out_info)
        return traced

    def _weight_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        weights = self.weights.values()
        sharded = zip(weights, self.placement.shard_weights(leaf.shape for leaf in weights), strict=True)
        return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf, sharding in sharded)

    def _shapes(self, tree: Any) -> Any:
        """Return the shapes of a tree of arrays that are whole on every device."""
        whole = self.placement.replicated
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=whole), tree)

    def _compile_reading(self, length: int) -> jax.stages.Compiled:
        read = self.read
        assert read is not None, "the policy reads no language"

        def run(arrays: tuple[Array, ...], ids: Array, mask: Array) -> Language:
            tokens, is_token = read(self._name(arrays), ids, mask)
            return Language(tokens.astype(jnp.float32), is_token)

        ids, mask = (self._shapes(jax.ShapeDtypeStruct((1, length), kind)) for kind in (jnp.int32, jnp.bool_))
        return self._compile([self._trace(run, self._weight_shapes(), ids, mask)])[0]

    def _compile(self, traced: Sequence[jax.stages.Traced]) -> list[jax.stages.Compiled]:
        """Compile in parallel: XLA holds no lock of the interpreter while it compiles."""
        use_compile_cache()
        with use_exact_products(self.dtype), ThreadPoolExecutor(len(traced)) as threads:
            return [compiling.result() for compiling in [threads.submit(one.lower().compile) for one in traced]]

    def _trace(self, run: Callable[..., Any], *shapes: Any) -> jax.stages.Traced:
        with use_exact_products(self.dtype):
            return jax.jit(run, out_shardings=self.placement.replicated).trace(*shapes)


def _identify(shapes: Any) -> Any:
    """Return a key that is equal for trees of equal structure, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
