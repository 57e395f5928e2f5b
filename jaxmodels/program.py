"""Ahead-of-time compiled programs from frames to actions, over weights as a flat tuple.

A program is a sequence of executables. The first one resizes and normalises the observation, so that frames of another
size compile nothing else; the others are the stages of the policy, which compile in parallel. A call with a flat tuple
is faster than with an NNX state. All contents of a checkpoint are arguments, so that another checkpoint of the same
architecture runs in the same executables.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
from jaxmodels.policies import ActStage
from jaxmodels.quantization import join_scales
from jaxmodels.types import Language, Observation, Prefix

Size: TypeAlias = tuple[int, int]
for _kind in (Observation, Prefix, Language):
    jax.export.register_namedtuple_serialization(_kind, serialized_name=f"jaxmodels.{_kind.__name__}")
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


@dataclass(eq=False)
class Part:
    """An executable of a program, which other programs may share.

    Attributes:
        stage: whose computation it is; None for the preparation of an observation.
        traced: None once it is compiled.
        result: shapes of its result.
        key: identifies all that it depends on.
    """

    stage: ActStage | None
    traced: jax.stages.Traced | None
    result: Any
    demand: Demand
    key: Any
    compiled: jax.stages.Compiled | None = None

    @property
    def name(self) -> str:
        return "frames" if self.stage is None else self.stage.name

    def __call__(self, weights: Weights, prepared: Any, given: Any) -> Any:
        """Run the stage on `Prepared`, or on the raw observation if it prepares it itself, and the result before."""
        assert self.stage is not None
        assert self.compiled is not None
        if isinstance(prepared, Prepared):
            prepared = prepared._replace(observation=self.stage.select(prepared.observation))
        return self.compiled(weights.arrays, weights.scales, prepared, given)


@dataclass(frozen=True)
class Program:
    """Executables from an observation to a chunk, in order.

    Attributes:
        prepare: (scales, raw observation) to `Prepared`; it is small, and all that depends on the sizes of the frames.
            None if the only stage reads the raw observation.
        stages: the last result is the chunk (b, t, a), float32, not normalised.
    """

    prepare: jax.stages.Compiled | None
    stages: Sequence[Part]

    def __call__(self, weights: Weights, observation: Observation) -> Any:
        prepared: Any = observation if self.prepare is None else self.prepare(weights.scales, observation)
        given = None
        for stage in self.stages:
            given = stage(weights, prepared, given)
        return given


@dataclass(eq=False)
class Programs:
    """Executables of one architecture on one placement, compiled on first use.

    Attributes:
        stages: in order, without the argument of the config; the last one returns a normalised chunk.
        weights: shapes of the serving weights by name, in the order of the flat tuple.
        scales: any tree of the structure of the policy's `Scales`.
        sizes: (height, width) per camera; None for a policy that resizes frames itself.
        fit: pixels (b, h, w, 3) of [0, 1] to the pixels that the stages read; None if they read them as they are.
        read: serving weights, tokens (1, n) and their mask to `Language`; None without a text encoder.
        relative: which numbers of an action are relative to the state.
        joint_map: see `PolicyConfig`.
    """

    stages: Sequence[ActStage]
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
        self._parts: dict[Any, Part] = {}  # By key, compiled or only traced.
        self._demands: dict[Inputs, Demand] = {}
        self._lock = threading.Lock()

    def count_weights(self) -> int:
        """Return the number of numbers in the serving weights."""
        return sum(math.prod(shape.shape) for shape in self.weights.values())

    def count_bytes(self) -> int:
        """Return the bytes of the serving weights."""
        return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in self.weights.values())

    def has(self, inputs: Inputs) -> bool:
        return inputs in self._compiled

    def get_program(self, inputs: Inputs, check: Callable[[Demand], None] | None = None) -> Program:
        """Return the executables for these shapes, which are compiled if they are new, as by `compile`."""
        if inputs not in self._compiled:  # This needs no lock, which another compilation may hold for seconds.
            self.compile([inputs], check)
        return self._compiled[inputs]

    def compile(self, wanted: Iterable[Inputs], check: Callable[[Demand], None] | None = None) -> None:
        """Compile all executables that programs for these shapes lack, in parallel.

        `check` receives a new program's memory and operations before anything is compiled, and may raise an error.
        """
        with self._lock:  # Two threads that need the same program wait for one compilation.
            programs: dict[Inputs, list[Part]] = {}
            known = dict(self._parts)
            for inputs in wanted:
                if inputs in self._compiled:
                    continue
                programs[inputs] = parts = self._trace(inputs, known, is_prepared=not self._prepares_in_stage)
                known |= {part.key: part for part in parts}
                self._demands[inputs] = _add_demands(parts)
                if check is not None:
                    check(self._demands[inputs])
            new = {part.key: part for parts in programs.values() for part in parts if part.compiled is None}
            for part, compiled in zip(new.values(), self._compile([*new.values()]), strict=True):
                part.compiled, part.traced = compiled, None
            self._parts |= new
            for inputs, parts in programs.items():
                prepare = parts.pop(0).compiled if parts[0].stage is None else None
                self._compiled[inputs] = Program(prepare, parts)

    def measure(self, inputs: Inputs) -> Demand:
        """Return memory and operations of the program for these shapes, which is traced if it is not compiled."""
        with self._lock:
            if inputs not in self._demands:
                parts = self._trace(inputs, self._parts)
                self._parts |= {part.key: part for part in parts}  # They need not be traced again to compile them.
                self._demands[inputs] = _add_demands(parts)
            return self._demands[inputs]

    def trace(self, inputs: Inputs) -> dict[str, jax.stages.Traced]:
        """Trace the preparation of an observation, ``frames``, and the stages, by name."""
        return {part.name: part.traced for part in self._trace(inputs, {}) if part.traced is not None}

    @property
    def _prepares_in_stage(self) -> bool:
        # On a CPU, another executable takes 0.15 ms, a fifth of the time of the shipped ACT policy.
        return self.placement.is_host and len(self.stages) == 1

    def export(self, inputs: Inputs, platform: str) -> jax.export.Exported:
        """Lower the whole computation of a chunk to StableHLO for ``cpu``, ``cuda`` or ``tpu``, which may be absent.

        JAX cannot lower a kernel of one platform for several platforms at once.
        """

        def run(arrays: tuple[Array, ...], scales: Scales, observation: Observation) -> Array:
            prepared = self._prepare(scales, observation)
            given: Any = None
            for stage in self.stages:
                given = stage.run(self._name(arrays), prepared.observation, given)
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

    def _name(self, arrays: tuple[Array, ...]) -> dict[str, Any]:
        return join_scales(dict(zip(self.weights, arrays, strict=True)), self.dtype)

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

    def _trace(self, inputs: Inputs, known: Mapping[Any, Part], *, is_prepared: bool = True) -> list[Part]:
        """Return the parts of the program for these shapes; what is not `known` by its key is traced.

        Unless `is_prepared`, the only stage prepares the observation itself.
        """
        scales = self._shapes(self.scales)
        prepared: Any = inputs.shapes(self.placement.replicated)
        parts: list[Part] = []

        def add(stage: ActStage | None, run: Callable[..., Any], *shapes: Any) -> Any:
            key = (stage and stage.name, _identify(shapes))
            if key in known:
                parts.append(known[key])
            else:
                traced = self._trace_function(run, *((self._weight_shapes(),) if stage else ()), scales, *shapes)
                demand = measure_program(traced.jaxpr, self.placement.platform)
                parts.append(Part(stage, traced, self._shapes(traced.out_info), demand, key))
            return parts[-1].result

        if is_prepared:
            prepared = add(None, self._prepare, prepared)
        given = None
        for stage in self.stages:
            read = prepared._replace(observation=stage.select(prepared.observation)) if is_prepared else prepared
            given = add(stage, partial(self._run_stage, stage), read, given)
        return parts

    def _run_stage(self, stage: ActStage, arrays: tuple[Array, ...], scales: Scales, prepared: Any, given: Any) -> Any:
        prepared = self._prepare(scales, prepared) if isinstance(prepared, Observation) else prepared
        result = stage.run(self._name(arrays), prepared.observation, given)
        return self._finish(scales, prepared, result) if stage is self.stages[-1] else result

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
        use_compile_cache()
        with use_exact_products(self.dtype):
            return self._trace_function(run, self._weight_shapes(), ids, mask).lower().compile()

    def _compile(self, parts: Sequence[Part]) -> list[jax.stages.Compiled]:
        """Compile in parallel: XLA holds no lock of the interpreter while it compiles.

        One core stays free, because a policy of the same process may control a robot on the CPU.
        """
        use_compile_cache()
        traced = [part.traced for part in parts if part.traced is not None]
        cores = os.cpu_count() or 1
        with use_exact_products(self.dtype), ThreadPoolExecutor(max(min(len(traced), cores - 1), 1)) as threads:
            return [compiling.result() for compiling in [threads.submit(one.lower().compile) for one in traced]]

    def _trace_function(self, run: Callable[..., Any], *shapes: Any) -> jax.stages.Traced:
        with use_exact_products(self.dtype):
            return jax.jit(run, out_shardings=self.placement.replicated).trace(*shapes)


def _add_demands(parts: Iterable[Part]) -> Demand:
    """Return the memory of the largest part, and the operations of all parts."""
    demands = [part.demand for part in parts]
    return Demand(max(each.activations for each in demands), sum(each.operations for each in demands))


def _identify(shapes: Any) -> Any:
    """Return a key that is equal for trees of equal structure, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
