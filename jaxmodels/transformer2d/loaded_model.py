"""A 2D transformer for serving: named arrays in and out, a bounded number of executables."""

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxmodels.checkpoints.files import read_json
from jaxmodels.devices import Device, device_name, find_dtype
from jaxmodels.errors import InputError
from jaxmodels.hub import fetch
from jaxmodels.transformer2d import CompiledTransformer2D, Transformer2DConfig, Transformer2DModel, diffusers_folder
from jaxmodels.transformer2d.arguments import read_arguments, token_count
from jaxmodels.weights import flatten

RESOLUTION = "added_cond_kwargs.resolution"
ASPECT_RATIO = "added_cond_kwargs.aspect_ratio"
OBJECTS = "cross_attention_kwargs.gligen.objs"
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Input:
    """Name, shape and dtype of one input array.

    Attributes:
        shape: sizes, or names of axes with free sizes.
        dtype: ``float32`` or ``int32``; other dtypes of the same kind are converted.
        note: meaning of its numbers.
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
    """Return the input arrays that a model of this config takes."""
    return (_hidden_states(config), *_context(config), *_timing(config), *_masks(config))


def output_shape(config: Transformer2DConfig) -> tuple[str | int, ...]:
    """Return the shape of the output sample."""
    if config.kind == "discrete":
        return ("batch", (config.num_vector_embeds or 1) - 1, "latent_pixels")
    channels = (config.in_channels if config.kind == "continuous" else config.outputs) or 0
    return ("batch", channels, "height", "width")


def read_inputs(inputs: tuple[Input, ...], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert arrays to the device's dtypes; raises InputError for wrong names or values. A number becomes (1,)."""
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


def _read(entry: Input, array: np.ndarray) -> np.ndarray:
    """Convert to the entry's dtype, so that the model is compiled once for integers and floats."""
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
    # NumPy has no kind for bfloat16.
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


class ForwardCost(NamedTuple):
    """Operations, memory and output size of one forward pass.

    Attributes:
        operations: additions and multiplications.
        memory: bytes of activations at the widest point of a block, with blocked attention (on a CPU).
        answer: bytes of the sample, float32.
    """

    operations: float
    memory: int
    answer: int


# Numbers per token and channel at the widest point of a block.
_WIDTHS = 18
_SCORES = 1 << 22  # Scores of blocked attention in memory at once.
_FLOAT = 4


def forward_cost(
    config: Transformer2DConfig, matrices: int, shapes: Mapping[str, tuple[int, ...]], item: int = _FLOAT
) -> ForwardCost:
    """Estimate the cost of a forward pass roughly, to distinguish a second from an hour.

    Args:
        matrices: numbers in the weights that every token is multiplied with.
        shapes: shapes of the arguments by flat name; hidden_states has the right rank.
        item: bytes of a number in the model's dtype.
    """
    shape = shapes["hidden_states"]
    batch, tokens, width = shape[0], token_count(config, shape), config.inner_dim
    context = math.prod(shapes.get("encoder_hidden_states", (0, tokens, 0))[1:-1])
    products = 2.0 * batch * max(tokens, context) * matrices
    keys = tokens + (context if config.has_cross_attention else 0)
    scores = 4.0 * config.num_layers * batch * tokens * keys * width
    answer = batch * _count_outputs(config, shape)
    at_once = min(batch * config.num_attention_heads * tokens * max(tokens, context), _SCORES)
    memory = item * batch * _WIDTHS * max(tokens, context) * width + _FLOAT * (at_once + answer)
    return ForwardCost(products + scores, memory, _FLOAT * answer)


def _count_outputs(config: Transformer2DConfig, shape: tuple[int, ...]) -> int:
    if config.kind == "discrete":
        return ((config.num_vector_embeds or 1) - 1) * shape[1]
    if config.kind == "continuous":
        return math.prod(shape[1:])
    patch = config.patch_size or 1
    return (config.outputs or 0) * (shape[2] // patch * patch) * (shape[3] // patch * patch)


Key: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]

MAX_SHAPES = 16
UNSAID_SIZE = 32  # Side of an example's latents if the config has none.
CONTEXT = 77  # Tokens of an example's context, as CLIP encodes a text.
# Operations per second of the slowest machine, so that a first, small forward does not look like a slow machine.
SLOWEST = 1e10
# Number of dropped executables after which JAX's caches are cleared, which keep 0.5 MB for each.
CLEAR_AFTER = 32
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def load_model(
    path_or_repo: str | Path,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    *,
    subfolder: str | None = None,
    prefix: str | None = None,
    on_progress: Callable[[str], None] | None = None,
    inspect: Callable[[Path], None] = lambda folder: None,
) -> "LoadedModel":
    """Load a diffusers folder of a `Transformer2DModel` (or DiT, or PixArt) from the disk or from the Hub.

    Args:
        path_or_repo: a folder, a repo id like ``owner/name``, or a folder in a repo like ``owner/name/transformer``.
        revision: branch, tag or commit of a repo.
        dtype: ``float32`` (default) or ``bfloat16``, which is slow on a CPU.
        device: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``; JAX's first choice when None.
        subfolder: folder in the folder or repo, e.g. ``transformer``.
        prefix: a transformer in a UNet, e.g. ``down_blocks.0.attentions.1``.
        on_progress: called with ``downloading``, ``reading``, ``ready``.
        inspect: called with the folder of the model before it is read; raises CheckpointError to refuse it.

    Raises:
        HubError: the repo cannot be fetched.
        ConfigError: the config, dtype or device is not valid.
        CheckpointError: files are missing, malformed, or do not fit the config.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from jaxmodels import Transformer2DModel, load_model
        >>> model = Transformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=4, in_channels=4, norm_num_groups=2, sample_size=4
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     loaded = load_model(folder, device="cpu")
        >>> loaded.description["kind"], loaded.dtype
        ('continuous', 'float32')
    """
    source, folder = _split(str(path_or_repo), subfolder)
    model = Transformer2DModel.from_pretrained(
        source,
        folder,
        revision,
        find_dtype(dtype),
        prefix=prefix,
        device=device,
        on_progress=on_progress,
        inspect=inspect,
    )
    return LoadedModel(model)


def is_model(path_or_repo: str | Path, revision: str | None = None, subfolder: str | None = None) -> bool:
    """Return whether a folder is a diffusers model, whose ``config.json`` names a class instead of a policy type.

    Raises:
        HubError: the repo cannot be fetched.
        CheckpointError: ``config.json`` is missing or malformed, and the folder is not a pipeline.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from jaxmodels import Transformer2DModel, is_model
        >>> model = Transformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=4, in_channels=4, norm_num_groups=2, sample_size=4
        ... )
        >>> with TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     is_model(folder)
        True
    """
    source, inside = _split(str(path_or_repo), subfolder)
    if inside is not None:
        return True
    folder = Path(os.path.expanduser(source))
    if not source or not folder.is_dir():
        folder = fetch(source, revision, files=(diffusers_folder.CONFIG, diffusers_folder.PIPELINE))
    is_pipeline = (folder / diffusers_folder.PIPELINE).exists() and not (folder / diffusers_folder.CONFIG).exists()
    return is_pipeline or "_class_name" in read_json(folder / diffusers_folder.CONFIG)


def _split(source: str, subfolder: str | None) -> tuple[str, str | None]:
    """Split ``owner/name/transformer`` into repo and folder, unless it, or ``owner/name``, is a local folder."""
    owner, *rest = source.split("/")
    repo, inside = "/".join([owner, *rest[:1]]), "/".join([*rest[1:], *([subfolder] if subfolder else [])])
    if source.startswith(("/", "~", ".")) or any(Path(path).is_dir() for path in (source, repo)):
        return source, subfolder
    return repo, inside or None


class LoadedModel:
    """2D transformer for serving. One thread at a time may compute; all threads may read its properties.

    Args:
        model: the model to serve. Drop other references to it, because its weights are copied.

    Attributes:
        shapes_kept: maximum number of executables, one per set of shapes; the least recently used is dropped.

    Example:
        >>> from jaxmodels import LoadedModel, Transformer2DModel
        >>> model = Transformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=4, in_channels=4, norm_num_groups=2, sample_size=4
        ... )
        >>> loaded = LoadedModel(model)
        >>> loaded.forward(loaded.example())["sample"].shape
        (1, 4, 4, 4)
    """

    def __init__(self, model: Transformer2DModel, *, shapes_kept: int = MAX_SHAPES):
        weights = flatten(model)
        self._device: Device = next(iter(weights.values())).devices().pop()
        self._config: Transformer2DConfig = model.config
        self._dtype = np.dtype(model.dtype)
        self._inputs = inputs_of(model.config)
        self._description = MappingProxyType(self._describe(weights))
        self._matrices = sum(array.size for name, array in weights.items() if _is_matrix(name))
        del weights
        self._compiled = CompiledTransformer2D(model)
        self._cached_shapes: OrderedDict[Key, dict[str, jax.ShapeDtypeStruct]] = OrderedDict()
        self._lock = threading.Lock()
        self._fastest = SLOWEST
        self._seconds: dict[Key, float] = {}
        self._forgotten = 0
        self._timings: dict[str, float] = {}
        self.shapes_kept = shapes_kept

    @property
    def description(self) -> Mapping[str, Any]:
        """Description for JSON: class, kind, config, parameters, bytes, dtype, device, inputs, outputs.

        Inputs have a name, a shape whose free axes are named, a dtype, whether they are required, and a note.
        """
        return self._description

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self._inputs

    @property
    def device(self) -> str:
        """Name of the device it runs on, e.g. ``cpu:0``."""
        return device_name(self._device)

    @property
    def dtype(self) -> str:
        return self._dtype.name

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of the last `forward` in ``to_device``, ``compute`` and ``to_host``; empty before it."""
        return MappingProxyType(self._timings)

    @property
    def compiled_shapes(self) -> int:
        """Number of sets of shapes with an executable."""
        return len(self._cached_shapes)

    def example(self, batch: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
        """Return example inputs of the model's size: noise, and 0 for an index."""
        config, random = self._config, np.random.default_rng(seed)
        side = config.sample_size or UNSAID_SIZE
        sizes = {"batch": batch, "height": side, "width": side, "latent_pixels": side**2, "context": CONTEXT}
        arrays = {}
        for entry in self._inputs:
            is_context = entry.name == "encoder_hidden_states"
            if entry.is_required or is_context:
                shape = tuple(sizes[size] if isinstance(size, str) else size for size in entry.shape)
                if entry.dtype == "int32":
                    arrays[entry.name] = np.zeros(shape, np.int32)
                else:
                    arrays[entry.name] = random.standard_normal(shape, np.float32)
        return arrays

    def cost(self, inputs: Mapping[str, np.ndarray]) -> tuple[float, int, int]:
        """Estimate seconds, bytes of memory and bytes of output of a forward pass; nothing is compiled.

        The fastest pass with these shapes gives the seconds, or for new shapes the fastest pass of all. Memory is 0 on
        accelerators, which report an error when memory is short.

        Raises:
            InputError: an input is wrong.
        """
        arrays = read_inputs(self._inputs, inputs)
        self._check(arrays)
        cost = self._forward_cost(arrays)
        seconds = self._seconds.get(_key(_abstract(arrays)), cost.operations / self._fastest)
        return seconds, cost.memory if self._device.platform == "cpu" else 0, cost.answer

    def is_compiled(self, inputs: Mapping[str, np.ndarray]) -> bool:
        """Return whether there is an executable for arrays of these shapes."""
        return _key(_abstract(read_inputs(self._inputs, inputs))) in self._cached_shapes

    def compile(self, inputs: Mapping[str, np.ndarray]) -> float:
        """Compile for arrays of these shapes; returns the seconds it took, 0 if the executable existed.

        Raises:
            InputError: an input is wrong.
        """
        return self._compile(read_inputs(self._inputs, inputs))

    def forward(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a forward pass; compiles first when the shapes are new (see `is_compiled`).

        Args:
            inputs: arrays by the names of `description`, of any float or integer dtype.

        Returns:
            ``sample``, float32.

        Raises:
            InputError: an input is missing, unknown or has the wrong shape, dtype or value; or device memory is too
                small.
        """
        arrays = read_inputs(self._inputs, inputs)
        self._compile(arrays)
        operations = self._forward_cost(arrays).operations
        try:
            start = time.perf_counter()
            on_device = jax.block_until_ready(jax.device_put(arrays, self._device))
            sent = time.perf_counter()
            sample = jax.block_until_ready(self._compiled(**unflatten_dict(on_device, sep=".")))
            computed = time.perf_counter()
        except jax.errors.JaxRuntimeError as error:
            raise _convert_error(error) from error
        seconds, key = computed - sent, _key(_abstract(arrays))
        self._fastest = max(self._fastest, operations / max(seconds, 1e-9))
        self._seconds[key] = min(seconds, self._seconds.get(key, seconds))
        host = np.array(sample, np.float32)  # Copied, because the buffer may belong to the device.
        self._timings = {"to_device": sent - start, "compute": seconds, "to_host": time.perf_counter() - computed}
        return {"sample": host}

    def _describe(self, weights: Mapping[str, jax.Array]) -> dict[str, Any]:
        shape = list(output_shape(self._config))
        return {
            "class": "Transformer2DModel",
            "kind": self._config.kind,
            "config": self._config.to_json(),
            "parameters": sum(array.size for array in weights.values()),
            "bytes": sum(array.nbytes for array in weights.values()),
            "dtype": self.dtype,
            "device": self.device,
            "inputs": [entry.to_json() for entry in self._inputs],
            "outputs": [{"name": "sample", "shape": shape, "dtype": "float32"}],
        }

    def _forward_cost(self, arrays: Mapping[str, np.ndarray]) -> ForwardCost:
        shapes = {name: array.shape for name, array in arrays.items()}
        return forward_cost(self._config, self._matrices, shapes, self._dtype.itemsize)

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Check shapes and values of inputs before anything is compiled or estimated."""
        read_arguments(self._config, self._dtype, **unflatten_dict(arrays, sep="."))

    def _compile(self, arrays: Mapping[str, np.ndarray]) -> float:
        shapes = _abstract(arrays)
        key = _key(shapes)
        with self._lock:
            if key in self._cached_shapes:
                self._cached_shapes.move_to_end(key)
                return 0.0
            self._check(arrays)
            while len(self._cached_shapes) >= self.shapes_kept:
                oldest, shapes_of_it = self._cached_shapes.popitem(last=False)
                self._compiled.forget(**unflatten_dict(shapes_of_it, sep="."))
                self._seconds.pop(oldest, None)
                self._forgotten += 1
                if not self._forgotten % CLEAR_AFTER:
                    jax.clear_caches()
            start = time.perf_counter()
            try:
                self._compiled.compile(**unflatten_dict(shapes, sep="."))
            except jax.errors.JaxRuntimeError as error:
                raise _convert_error(error) from error
            self._cached_shapes[key] = shapes
            return time.perf_counter() - start


def _abstract(arrays: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


def _key(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Key:
    return tuple(sorted((name, shape.shape, str(shape.dtype)) for name, shape in shapes.items()))


def _is_matrix(name: str) -> bool:
    """Return whether every token is multiplied with a weight; modulations are computed once for all tokens."""
    is_modulating = "norm" in name or "adaln" in name or name.startswith("proj_out_1")
    return name.endswith("kernel") and not is_modulating


def _convert_error(error: Exception) -> Exception:
    """Return an InputError for an error of too little memory, or else the error itself."""
    if OUT_OF_MEMORY in str(error):
        return InputError("the forward pass does not fit into the device's memory; send a smaller batch or size")
    return error
