"""Ahead-of-time compiled programs from frames to actions, over weights as a flat tuple.

A call with a flat tuple is faster than with an NNX state. All contents of a checkpoint are arguments, so that another
checkpoint of the same architecture runs in the same executable.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
Weights: TypeAlias = tuple[jax.Array, ...]
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


@dataclass(eq=False)
class Programs:
    """Executables of one architecture on one placement, compiled on first use.

    Attributes:
        act: serving weights (by name) and a normalised observation to a normalised chunk.
        weights: shapes of the serving weights by name, in the order of the flat tuple.
        scales: any tree of the structure of the policy's `Scales`.
        sizes: (height, width) per camera; None for a model that resizes frames itself.
        read: serving weights, tokens (1, n) and their mask to `Language`; None without a text encoder.
        relative: which numbers of an action are relative to the state.
        joint_map: see `PolicyConfig`.
    """

    act: Callable[[Mapping[str, Array], Observation], Array]
    weights: Mapping[str, jax.ShapeDtypeStruct]
    scales: Scales
    sizes: tuple[Size | None, ...]
    dtype: DTypeLike
    placement: Placement
    read: Callable[[Mapping[str, Array], Array, Array], Language] | None = None
    relative: tuple[bool, ...] | None = None
    joint_map: Any = None

    def __post_init__(self) -> None:
        self._reading: dict[int, jax.stages.Compiled] = {}
        self._compiled: dict[Inputs, jax.stages.Compiled] = {}
        self._demands: dict[Inputs, Demand] = {}
        self._lock = threading.Lock()

    def count_weights(self) -> int:
        """Return the number of numbers in the serving weights."""
        return sum(math.prod(shape.shape) for shape in self.weights.values())

    def has(self, inputs: Inputs) -> bool:
        return inputs in self._compiled

    def get_program(self, inputs: Inputs, check: Callable[[Demand], None] | None = None) -> jax.stages.Compiled:
        """Return the executable for these shapes: ``(flat weights and scales, observation) -> (b, t, a) float32``.

        `check` receives a new program's memory and operations before it is compiled, and may raise an error.
        """
        compiled = self._compiled.get(inputs)
        if compiled is not None:
            return compiled  # This needs no lock, which another compilation may hold for seconds.
        with self._lock:  # Two threads that need the same program wait for one compilation.
            if inputs not in self._compiled:
                traced = self.trace_chunk(inputs)
                demand = self._demands[inputs] = measure_program(traced.jaxpr, self.placement.platform)
                if check is not None:
                    check(demand)
                self._compiled[inputs] = self._compile(traced)
            return self._compiled[inputs]

    def measure(self, inputs: Inputs) -> Demand:
        """Return memory and operations of the program for these shapes, which is traced if it is not compiled."""
        with self._lock:
            if inputs not in self._demands:
                traced = self.trace_chunk(inputs)
                self._demands[inputs] = measure_program(traced.jaxpr, self.placement.platform)
            return self._demands[inputs]

    def get_reader(self, length: int) -> jax.stages.Compiled:
        """Return the executable for a text length: ``(weights and scales, tokens (1, n), mask (1, n)) -> Language``."""
        if length in self._reading:
            return self._reading[length]
        with self._lock:
            if length not in self._reading:
                self._reading[length] = self._compile_reading(length)
            return self._reading[length]

    def flatten(self, weights: Mapping[str, Any], scales: Scales) -> Weights:
        """Put weights and scales on the device, in the order of the executables' arguments."""
        # Split arrays are cast on the host, because one device may be too small for a whole array. A CPU then uses
        # aligned float32 arrays in place.
        cast = jnp.asarray if len(self.placement.devices) == 1 and not self.placement.is_host else np.asarray
        arrays = [cast(weights[name], shape.dtype) for name, shape in self.weights.items()]
        everything = [*arrays, *jax.tree.leaves(scales)]
        shardings = self.placement.shard_weights([np.shape(array) for array in arrays])
        shardings += [self.placement.replicated] * (len(everything) - len(shardings))
        return tuple(jax.device_put(everything, shardings))

    def _unflatten(self, flat: tuple[Array, ...]) -> tuple[dict[str, Array], Scales]:
        names, tree = list(self.weights), jax.tree.structure(self.scales)
        return dict(zip(names, flat, strict=False)), jax.tree.unflatten(tree, flat[len(names) :])

    def _read_joints(self, observation: Observation) -> Observation:
        return observation if self.joint_map is None else self.joint_map.read(observation)

    def _normalize(self, observation: Observation, scales: Scales) -> Observation:
        return normalize(observation, scales, self.sizes, self.dtype, self.relative)

    def compile_stages(self, stages: Sequence[Callable[..., Any]], inputs: Inputs) -> list[jax.stages.Compiled]:
        """Compile parts: ``(flat weights and scales, observation, result of the stage before) -> result``."""
        return [self._compile(traced) for traced in self.trace_stages(stages, inputs)]

    def trace_stages(self, stages: Sequence[Callable[..., Any]], inputs: Inputs) -> list[jax.stages.Traced]:
        """Trace parts for `compile_stages`.

        Each stage takes serving weights, a normalised observation and the stage before's result (None for the first).
        """
        every: list[jax.stages.Traced] = []
        observation, given = inputs.shapes(self.placement.replicated), None
        for stage in stages:

            def run(flat: tuple[Array, ...], raw: Observation, given: Any, stage: Callable[..., Any] = stage) -> Any:
                weights, scales = self._unflatten(flat)
                return stage(weights, self._normalize(self._read_joints(raw), scales), given)

            every.append(self._trace(run, observation, given))
            given = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.placement.replicated),
                every[-1].out_info,
            )
        return every

    def trace_chunk(self, inputs: Inputs) -> jax.stages.Traced:
        """Trace the program of `get_program`."""
        return self._trace(self._run_chunk, inputs.shapes(self.placement.replicated))

    def export(self, inputs: Inputs, platform: str) -> jax.export.Exported:
        """Lower the program of `get_program` to StableHLO for ``cpu``, ``cuda`` or ``tpu``, which may be absent.

        JAX cannot lower a kernel of one platform for several platforms at once.
        """
        with use_exact_products(self.dtype):
            lower = jax.export.export(jax.jit(self._run_chunk), platforms=[platform])
            return lower(self.describe_weights(), inputs.shapes(self.placement.replicated))

    def _run_chunk(self, flat: tuple[Array, ...], observation: Observation) -> Array:
        weights, scales = self._unflatten(flat)
        observation = self._read_joints(observation)
        normalized = self._normalize(observation, scales)
        chunk = scales.action.unnormalize(self.act(weights, normalized).astype(jnp.float32))
        if self.relative is not None:
            chunk = chunk + get_origin(observation.state, self.relative)
        return chunk if self.joint_map is None else self.joint_map.write_actions(chunk)

    def _compile_reading(self, length: int) -> jax.stages.Compiled:
        read, names = self.read, list(self.weights)
        assert read is not None, "the policy reads no language"

        def run(flat: tuple[Array, ...], ids: Array, mask: Array) -> Language:
            tokens, is_token = read(dict(zip(names, flat, strict=False)), ids, mask)
            return Language(tokens.astype(jnp.float32), is_token)

        kinds = (jnp.int32, jnp.bool_)
        shapes = (jax.ShapeDtypeStruct((1, length), kind, sharding=self.placement.replicated) for kind in kinds)
        return self._compile(self._trace(run, *shapes))

    def _compile(self, traced: jax.stages.Traced) -> jax.stages.Compiled:
        use_compile_cache()
        with use_exact_products(self.dtype):
            return traced.lower().compile()

    def _trace(self, run: Callable[..., Any], *shapes: Any) -> jax.stages.Traced:
        with use_exact_products(self.dtype):
            return jax.jit(run, out_shardings=self.placement.replicated).trace(self.describe_weights(), *shapes)

    def describe_weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shapes and shardings of the flat weights and scales."""
        whole = self.placement.replicated
        weights = self.weights.values()
        flat = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(
                weights, self.placement.shard_weights(leaf.shape for leaf in weights), strict=True
            )
        ]
        leaves = jax.tree.leaves(self.scales)
        return (*flat, *(jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=whole) for leaf in leaves))
