"""Checks of a call's arguments before compiled code, which would clip wrong numbers silently."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxmodels.errors import InputError
from jaxmodels.transformer2d.block import Conditioning, check_conditioning
from jaxmodels.transformer2d.config import Transformer2DConfig

ArrayLike: TypeAlias = Any  # An array of JAX or NumPy, or a Python number.
CONDITIONS = {"resolution": 2, "aspect_ratio": 1}  # Name to numbers per element.


class Arguments(NamedTuple):
    """Checked arguments of a call, in the dtypes of the compiled program; a pytree.

    `objects` are for GLIGEN's fusers, `conditions` are resolution and aspect ratio, `scale` is for LoRA adapters.
    """

    hidden_states: Array
    encoder_hidden_states: Array | None = None
    timestep: Array | None = None
    class_labels: Array | None = None
    conditions: dict[str, Array] | None = None
    attention_mask: Array | None = None
    encoder_attention_mask: Array | None = None
    objects: Array | None = None
    scale: Array | None = None


def read_arguments(
    config: Transformer2DConfig,
    dtype: DTypeLike,
    hidden_states: ArrayLike,
    encoder_hidden_states: ArrayLike = None,
    timestep: ArrayLike = None,
    added_cond_kwargs: Mapping[str, ArrayLike] | None = None,
    class_labels: ArrayLike = None,
    cross_attention_kwargs: Mapping[str, Any] | None = None,
    attention_mask: ArrayLike = None,
    encoder_attention_mask: ArrayLike = None,
    conditioning: Conditioning | None = None,
) -> Arguments:
    """Check shapes and dtypes of a call's arguments or `conditioning`, and values unless they are tracers.

    Raises:
        InputError: names the argument, the value found and the accepted values.
    """
    for name, value in (("added_cond_kwargs", added_cond_kwargs), ("cross_attention_kwargs", cross_attention_kwargs)):
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{name} is a {type(value).__name__}; wanted a mapping of names to arrays")
    if conditioning is not None:
        _refuse_unprepared(encoder_hidden_states, timestep, added_cond_kwargs, class_labels)
    hidden = _hidden_states(config, dtype, hidden_states)
    batch, tokens = hidden.shape[0], token_count(config, hidden.shape)
    context = _context(config, dtype, encoder_hidden_states, batch)
    if conditioning is not None:
        check_conditioning(config, conditioning, batch)
        context_tokens, timing = conditioning.keys, Timing()
    else:
        context_tokens = None if context is None else math.prod(context.shape[1:-1])
        timing = read_timing(config, batch, timestep, class_labels, added_cond_kwargs)
    if context_tokens is None:
        check_no_context(config)
    heads = config.num_attention_heads
    second_keys = tokens if context_tokens is None else context_tokens
    first_keys = second_keys if config.only_cross_attention else tokens
    return Arguments(
        hidden,
        context,
        timing.timestep,
        timing.class_labels,
        timing.conditions,
        _mask("attention_mask", attention_mask, batch, heads, tokens, first_keys),
        _mask("encoder_attention_mask", encoder_attention_mask, batch, heads, tokens, second_keys)
        if config.has_cross_attention
        else None,
        _objects(config, dtype, cross_attention_kwargs, batch),
        read_scale(cross_attention_kwargs),
    )


class Timing(NamedTuple):
    """Conditions of the adaptive norms: timesteps, classes, resolution and aspect ratio."""

    timestep: Array | None = None
    class_labels: Array | None = None
    conditions: dict[str, Array] | None = None


def read_timing(
    config: Transformer2DConfig,
    batch: int | None,
    timestep: ArrayLike,
    class_labels: ArrayLike,
    added_cond_kwargs: Mapping[str, ArrayLike] | None,
) -> Timing:
    """Check the conditions of the norms for `batch` (None: unknown); drops unused ones, as diffusers does."""
    norm = config.block_norm
    if norm == "layer_norm":
        return Timing()
    if timestep is None:
        raise InputError(f"timestep is missing; {norm} wants {_TIMESTEPS[norm]}")
    if norm == "ada_norm_single" and config.kind != "patches":
        return Timing(_embedded_time(config, timestep, batch))
    times = _array("timestep", timestep)
    _check_per_element("timestep", times, batch)
    if norm == "ada_norm":
        _check_integers("timestep", times)
        limit = config.num_embeds_ada_norm or 0
        _check_range("timestep", times, limit, f"the model knows num_embeds_ada_norm = {limit} timesteps")
        return Timing(jnp.atleast_1d(times).astype(jnp.int32))
    times = jnp.atleast_1d(times).astype(jnp.float32)
    if norm == "ada_norm_single":
        return Timing(times, None, _conditions(config, added_cond_kwargs, batch))
    if class_labels is None:
        raise InputError("class_labels are missing; ada_norm_zero wants a class for each element, integers (batch,)")
    labels = _array("class_labels", class_labels)
    _check_per_element("class_labels", labels, batch)
    _check_integers("class_labels", labels)
    classes = config.num_embeds_ada_norm or 0
    _check_range("class_labels", labels, classes + 1, f"{classes} classes, and {classes} for no class")
    return Timing(times, jnp.atleast_1d(labels).astype(jnp.int32))


def token_count(config: Transformer2DConfig, shape: tuple[int, ...]) -> int:
    """Return the number of tokens of an input of this shape."""
    if config.kind == "discrete":
        return shape[1]
    patch = config.patch_size or 1
    return (shape[2] // patch) * (shape[3] // patch)


_TIMESTEPS = {
    "ada_norm": "an integer for all elements, or integers (batch,)",
    "ada_norm_zero": "a number for all elements, or numbers (batch,)",
    "ada_norm_single": "a number for all elements, or numbers (batch,)",
}


def _array(name: str, value: ArrayLike) -> Array | np.ndarray:
    if isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch raises RuntimeError for tensors with gradients.
        raise InputError(f"{name} is a {type(value).__name__}; wanted an array") from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} holds {array.dtype}; wanted an array of numbers")
    return array


def _shape(name: str, array: Array | np.ndarray) -> str:
    return f"{name} has shape {list(array.shape)}"


def _is_float(array: Array | np.ndarray) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _check_integers(name: str, array: Array | np.ndarray) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputError(f"{name} holds {array.dtype}; wanted integers, they are looked up in a table")


def _check_range(name: str, array: Array | np.ndarray, limit: int, reason: str) -> None:
    if isinstance(array, Tracer) or array.size == 0:
        return
    values = np.asarray(array)
    wrong = values[(values < 0) | (values >= limit)]
    if wrong.size:
        raise InputError(f"{name} {int(wrong.flat[0])} is out of range; wanted 0 to {limit - 1} ({reason})")


def _check_per_element(name: str, array: Array | np.ndarray, batch: int | None) -> None:
    if array.ndim > 1 or (array.ndim == 1 and batch is not None and array.shape[0] not in (1, batch)):
        count = "batch" if batch is None else batch
        raise InputError(f"{_shape(name, array)}; wanted one for all elements, or one per element: ({count},)")


def _hidden_states(config: Transformer2DConfig, dtype: DTypeLike, value: ArrayLike) -> Array:
    array = _array("hidden_states", value)
    if config.kind == "discrete":
        return _latent_pixels(config, array)
    if array.ndim != 4 or array.shape[1] != config.in_channels:
        raise InputError(
            f"{_shape('hidden_states', array)}; {config.kind} input wants (batch, {config.in_channels}, height, width)"
        )
    patch = config.patch_size or 1
    if min(array.shape[2:]) < patch or array.shape[0] == 0:
        raise InputError(f"{_shape('hidden_states', array)}; wanted one element and {patch}x{patch} pixels at least")
    if not _is_float(array):
        raise InputError(f"hidden_states hold {array.dtype}; {config.kind} input wants floating-point numbers")
    return jnp.asarray(array, dtype)


def _latent_pixels(config: Transformer2DConfig, array: Array | np.ndarray) -> Array:
    limit = (config.sample_size or 0) ** 2
    if array.ndim != 2 or not 1 <= array.shape[1] <= limit or array.shape[0] == 0:
        raise InputError(
            f"{_shape('hidden_states', array)}; discrete input wants (batch, latent pixels), at most {limit} of them "
            f"(sample_size {config.sample_size} squared)"
        )
    _check_integers("hidden_states", array)
    classes = config.num_vector_embeds or 0
    _check_range("hidden_states", array, classes, f"num_vector_embeds is {classes}, the last one is the masked class")
    return jnp.asarray(array, jnp.int32)


def _context(config: Transformer2DConfig, dtype: DTypeLike, value: ArrayLike, batch: int) -> Array | None:
    if value is None or not (config.has_cross_attention or config.only_cross_attention):
        return None
    array = _array("encoder_hidden_states", value)
    check_context(config, array, batch)
    return jnp.asarray(array, dtype)


def check_context(config: Transformer2DConfig, array: Array | np.ndarray, batch: int | None = None) -> None:
    """Check shape and dtype of encoder_hidden_states."""
    is_captions = config.kind == "patches" and config.caption_channels is not None
    widths = _context_widths(config)
    if is_captions:
        if widths != {config.inner_dim}:
            raise InputError(
                f"captions become {config.inner_dim} wide, but cross_attention_dim is {config.cross_attention_dim}"
            )
        widths = {config.caption_channels or 0}
    if len(widths) > 1:
        raise InputError(
            f"encoder_hidden_states cannot be both {config.first_context} wide, as the first attention wants, and "
            f"{config.second_context}, as the second does (double_self_attention); leave them out"
        )
    (width,) = widths
    ranks = (3, 4) if is_captions else (3,)
    is_empty = 0 in array.shape
    if array.ndim not in ranks or is_empty or array.shape[-1] != width or array.shape[0] != (batch or array.shape[0]):
        name = "caption_channels" if is_captions else "cross_attention_dim"
        raise InputError(
            f"{_shape('encoder_hidden_states', array)}; wanted ({batch or 'batch'}, tokens, {width}), where {width} is "
            f"the model's {name if width != config.inner_dim or is_captions else 'width'}"
        )
    if not _is_float(array):
        raise InputError(f"encoder_hidden_states hold {array.dtype}; wanted floating-point numbers")


def _context_widths(config: Transformer2DConfig) -> set[int]:
    widths = {config.second_context} if config.has_cross_attention else set()
    return widths if config.first_context is None else widths | {config.first_context}


def check_no_context(config: Transformer2DConfig) -> None:
    """Refuse a call without encoder_hidden_states of a model that needs them."""
    if config.kind == "patches" and config.caption_channels is not None:
        raise InputError(f"encoder_hidden_states are missing; wanted captions {config.caption_channels} wide")
    if _context_widths(config) - {config.inner_dim}:
        raise InputError(
            f"encoder_hidden_states are missing; without them cross-attention looks at the tokens themselves, which "
            f"are {config.inner_dim} wide, but cross_attention_dim is {config.cross_attention_dim}"
        )


def _embedded_time(config: Transformer2DConfig, timestep: ArrayLike, batch: int | None) -> Array:
    array = _array("timestep", timestep)
    size = 6 * config.inner_dim
    count = array.shape[0] if array.ndim else 0
    if array.ndim not in (2, 3) or array.size != count * size or count not in (1, batch or count):
        raise InputError(
            f"{_shape('timestep', array)}; ada_norm_single on {config.kind} input wants the embedded timestep, "
            f"({batch or 'batch'}, {size}): 6 times the width of the tokens"
        )
    return jnp.asarray(array, jnp.float32).reshape(count, 6, config.inner_dim)


def _conditions(
    config: Transformer2DConfig, conditions: Mapping[str, ArrayLike] | None, batch: int | None
) -> dict[str, Array] | None:
    if not config.has_conditions:
        return None
    missing = [name for name in CONDITIONS if conditions is None or conditions.get(name) is None]
    if conditions is None or missing:
        raise InputError(
            f"added_cond_kwargs lacks {' and '.join(missing)}; a model with use_additional_conditions wants "
            "{'resolution': (batch, 2), 'aspect_ratio': (batch, 1)}"
        )
    read = {}
    for name, count in CONDITIONS.items():
        array = _array(f"added_cond_kwargs[{name!r}]", conditions[name])
        if array.ndim != 2 or array.shape[1] != count or array.shape[0] not in (1, batch or array.shape[0]):
            raise InputError(f"{_shape(f'added_cond_kwargs[{name!r}]', array)}; wanted ({batch or 'batch'}, {count})")
        read[name] = jnp.asarray(array, jnp.float32)
    return read


def _objects(
    config: Transformer2DConfig, dtype: DTypeLike, objects: Mapping[str, Any] | None, batch: int
) -> Array | None:
    """Return the objects for GLIGEN's fusers in cross_attention_kwargs."""
    gligen = (objects or {}).get("gligen")
    if gligen is None:
        return None
    if not config.has_fuser:
        raise InputError(
            f"cross_attention_kwargs has 'gligen', but attention_type is {config.attention_type!r}; only gated models "
            "have fusers for its objects"
        )
    name, width = "cross_attention_kwargs['gligen']['objs']", config.cross_attention_dim
    if not isinstance(gligen, Mapping) or set(gligen) != {"objs"}:
        raise InputError(f"cross_attention_kwargs['gligen'] is no {{'objs': ({batch}, objects, {width})}}")
    array = _array(name, gligen["objs"])
    if array.ndim != 3 or array.shape[0] != batch or array.shape[2] != width:
        raise InputError(f"{_shape(name, array)}; wanted ({batch}, objects, {width}), cross_attention_dim wide")
    return jnp.asarray(array, dtype)


def read_scale(cross_attention_kwargs: Mapping[str, Any] | None) -> Array | None:
    """Return the scale of LoRA adapters in cross_attention_kwargs; raises InputError for other keys or values."""
    options = cross_attention_kwargs or {}
    unknown = sorted(set(options) - {"gligen", "scale"})
    if unknown:
        raise InputError(f"cross_attention_kwargs has {', '.join(map(repr, unknown))}; known: 'gligen', 'scale'")
    if options.get("scale") is None:
        return None
    scale = _array("cross_attention_kwargs['scale']", options["scale"])
    if scale.ndim != 0 or scale.dtype == bool:
        raise InputError(f"{_shape('scale in cross_attention_kwargs', scale)}; wanted one number, e.g. 0.5")
    return jnp.asarray(scale, jnp.float32)


def _refuse_unprepared(*given: Any) -> None:
    names = ("encoder_hidden_states", "timestep", "added_cond_kwargs", "class_labels")
    both = [name for name, value in zip(names, given, strict=True) if value is not None]
    if both:
        raise InputError(f"{', '.join(both)} and conditioning are given; conditioning was prepared from them already")


def _mask(name: str, value: ArrayLike, batch: int, heads: int, tokens: int, keys: int) -> Array | None:
    if value is None:
        return None
    array = _array(name, value)
    shape = array.shape
    is_right = (
        (array.ndim == 2 and shape[0] in (1, batch))
        or (array.ndim == 3 and shape[0] in (1, batch, batch * heads) and shape[1] in (1, tokens))
        or (array.ndim == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2] in (1, tokens))
    )
    if not is_right or shape[-1] != keys:
        raise InputError(
            f"{_shape(name, array)}; wanted a mask ({batch}, {keys}) of 1 to keep and 0 to discard, or a bias "
            f"({batch}, 1, {keys}) or ({batch}, {tokens}, {keys}) to add, for {keys} keys"
        )
    return jnp.asarray(array) if array.dtype == bool else jnp.asarray(array, jnp.float32)
