"""Named arrays of a served model, and their conversion to arguments of a call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmodels.errors import InputError
from jaxmodels.transformer2d import Transformer2DConfig

RESOLUTION = "added_cond_kwargs.resolution"
ASPECT_RATIO = "added_cond_kwargs.aspect_ratio"
OBJECTS = "cross_attention_kwargs.gligen.objs"
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Input:
    """Name, shape and dtype of one input array.

    Attributes:
        shape: sizes, or names of axes whose sizes are free.
        dtype: ``float32`` or ``int32``; others of the same kind are converted.
        note: what its numbers mean.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str
    is_required: bool
    note: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "required": self.is_required,
            "note": self.note,
        }


def inputs_of(config: Transformer2DConfig) -> tuple[Input, ...]:
    """Input arrays that a model of this config takes."""
    return (_hidden_states(config), *_context(config), *_timing(config), *_masks(config))


def output_shape(config: Transformer2DConfig) -> tuple[str | int, ...]:
    """Shape of the output sample."""
    if config.kind == "discrete":
        return ("batch", (config.num_vector_embeds or 1) - 1, "latent_pixels")
    channels = (config.in_channels if config.kind == "continuous" else config.outputs) or 0
    return ("batch", channels, "height", "width")


def read_inputs(inputs: tuple[Input, ...], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert arrays to the dtypes of the device (float32, int32 or bool); a single number becomes (1,).

    Raises:
        InputError: a name is unknown or missing, or an array holds what these dtypes cannot.
    """
    known = {entry.name for entry in inputs}
    unknown = sorted(map(repr, arrays.keys() - known))
    missing = [entry.name for entry in inputs if entry.is_required and entry.name not in arrays]
    if unknown or missing:
        errors = [f"lacks {', '.join(missing)}"] if missing else []
        errors += [f"has {', '.join(unknown)}, which this model does not take"] if unknown else []
        optional = [entry.name for entry in inputs if not entry.is_required]
        required = ", ".join(entry.name for entry in inputs if entry.is_required)
        raise InputError(f"the input {' and '.join(errors)}; wanted {required}, and if you like {', '.join(optional)}")
    return {entry.name: _read(entry, np.asarray(arrays[entry.name])) for entry in inputs if entry.name in arrays}


def to_call(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arrays by dotted name to the arguments of a call."""
    call: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        folder_values = call
        for folder in folders:
            folder_values = folder_values.setdefault(folder, {})
        folder_values[last] = array
    return call


def _read(entry: Input, array: np.ndarray) -> np.ndarray:
    """One dtype for what the model takes for the same, so that it is compiled once."""
    narrow = np.atleast_1d(_narrowed(entry.name, array))
    is_counting = narrow.dtype == np.int32 and entry.dtype == "float32" and not entry.name.endswith("hidden_states")
    return narrow.astype(np.float32) if is_counting else narrow


def _narrowed(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype == bool:
        return array
    if array.dtype.kind in "iu":
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            raise InputError(f"{name} holds integers beyond 32 bits; wanted {_INT32.min} to {_INT32.max}")
        return array.astype(np.int32, copy=False)
    # bfloat16 is no kind of NumPy's own.
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"{name} holds {array.dtype}; wanted floating-point numbers, integers or booleans")
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32, copy=False)
    if not np.isfinite(narrow).all():
        raise InputError(f"{name} holds NaN, infinity or more than float32 can; wanted finite numbers")
    return narrow


def _hidden_states(config: Transformer2DConfig) -> Input:
    if config.kind == "discrete":
        classes = config.num_vector_embeds or 0
        note = f"classes 0 to {classes - 1} (the masked one), at most {(config.sample_size or 0) ** 2} latent pixels"
        return Input("hidden_states", ("batch", "latent_pixels"), "int32", True, note)
    note = f"{config.patch_size}x{config.patch_size} patches" if config.kind == "patches" else "latents"
    return Input("hidden_states", ("batch", config.in_channels or 0, "height", "width"), "float32", True, note)


def _context(config: Transformer2DConfig) -> list[Input]:
    if not (config.has_cross_attention or config.only_cross_attention):
        return []
    has_captions = config.kind == "patches" and config.caption_channels is not None
    width = config.second_context if config.has_cross_attention else config.first_context or config.inner_dim
    is_needed = has_captions or width != config.inner_dim
    note = "captions" if has_captions else "what cross-attention looks at"
    note += "" if is_needed else "; the tokens themselves when left out"
    shape = ("batch", "context", (config.caption_channels or 0) if has_captions else width)
    inputs = [Input("encoder_hidden_states", shape, "float32", is_needed, note)]
    if config.has_fuser:
        shape = ("batch", "objects", config.cross_attention_dim or 0)
        inputs.append(Input(OBJECTS, shape, "float32", False, "objects that GLIGEN's fusers look at"))
    return inputs


def _timing(config: Transformer2DConfig) -> list[Input]:
    norm = config.block_norm
    if norm == "layer_norm":
        return []
    if norm == "ada_norm_single" and config.kind != "patches":
        shape = ("batch", 6 * config.inner_dim)
        return [Input("timestep", shape, "float32", True, "the embedded timestep, 6 times the width of the tokens")]
    if norm == "ada_norm":
        note = f"0 to {(config.num_embeds_ada_norm or 0) - 1}; a single number counts for all elements"
        return [Input("timestep", ("batch",), "int32", True, note)]
    inputs = [Input("timestep", ("batch",), "float32", True, "a single number counts for all elements")]
    if norm == "ada_norm_zero":
        note = f"0 to {config.num_embeds_ada_norm}; the last is no class"
        inputs.append(Input("class_labels", ("batch",), "int32", True, note))
    if config.has_conditions:
        inputs.append(Input(RESOLUTION, ("batch", 2), "float32", True, "height and width of the picture"))
        inputs.append(Input(ASPECT_RATIO, ("batch", 1), "float32", True, "height by width"))
    return inputs


def _masks(config: Transformer2DConfig) -> list[Input]:
    note = "1 keeps a token, 0 discards it; (batch, 1 or tokens, keys) is added to the scores"
    inputs = [Input("attention_mask", ("batch", "tokens"), "float32", False, note)]
    if config.has_cross_attention:
        inputs.append(Input("encoder_attention_mask", ("batch", "context"), "float32", False, note))
    return inputs
