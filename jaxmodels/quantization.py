"""Products of 8-bit weights and activations: weights have a scale per output channel, activations one per token.

The matrices of attention and feed-forward layers, Diffusion Policy's convolutions over time, and tables of words are
quantized; all other weights keep the policy's dtype. Sources: https://arxiv.org/abs/2208.07339 (scales of rows and
columns), https://arxiv.org/abs/2209.05433 (float8_e4m3fn).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

from jaxmodels.devices import DTYPES, find_dtype
from jaxmodels.errors import ConfigError

INT8_WEIGHTS = "int8-weights"
# Names to dtypes of weights. Activations have the same dtype, except for INT8_WEIGHTS, which only saves memory.
WEIGHT_DTYPES: Mapping[str, DTypeLike] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, INT8_WEIGHTS: jnp.int8}
AUTO = "auto"
# Dtypes that ``auto`` tries by platform, the fastest first. All have the same size; int8 rounds less than fp8.
AUTO_DTYPES: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gpu", "tpu"), ("int8", INT8_WEIGHTS))
# Largest number of each dtype, which the largest number of a channel or token becomes.
_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
# Smaller matrices keep their dtype, because a quantization costs more than it saves.
SMALLEST = 1 << 14
# The scale of NAME is NAME.scale, or NAME.weight_scale if activations keep the policy's dtype.
SCALE, WEIGHT_SCALE = ".scale", ".weight_scale"
_MATRICES = re.compile(
    r"(attention|feed_forward)\.(query|key|value|out|gate|up|down)\.(kernel|weight)$|^unet\..*\.convolution\.kernel$"
)
_TABLES = ("paligemma.embedding", "vlm.embedding")


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight in 8 bits, in the place of an array of `dtype`.

    Attributes:
        values: (out, in) int8 or float8_e4m3fn, in which a GPU needs no copy of them.
        scale: (out,) float32; a channel's values times its scale are its weights. A table has a scale per word.
        dtype: dtype that the policy computes in.
        quantizes_tokens: whether activations are quantized for the product.
    """

    values: Any
    scale: Any
    dtype: DTypeLike
    quantizes_tokens: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> Any:
        """Return the matrix for ``...``, and rows of a table of words, in `dtype`, for an array of integers."""
        if index is ...:
            return self
        if not hasattr(index, "dtype"):
            raise TypeError(f"a quantized matrix was indexed with {index}; this weight must keep the policy's dtype")
        return (self.values[index].astype(jnp.float32) * self.scale[index][..., None]).astype(self.dtype)


jax.tree_util.register_dataclass(QuantizedMatrix, ["values", "scale"], ["dtype", "quantizes_tokens"])


def quantize(x: Any, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return rows (..., d) in 8 bits, and their float32 scales (..., 1)."""
    x, largest = jnp.asarray(x, jnp.float32), _LARGEST[jnp.dtype(dtype)]
    most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(most > 0, most, 1) / largest
    scaled = x / scale
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale


def multiply(x: Any, weight: Any, axis: int) -> Any:
    """Multiply tokens (..., d) by a matrix, whose `axis` is the inputs if it is not quantized.

    The axis is 1 in torch's layout (e, d), and 0 in (d, e), also of a convolution (k, d / k, e) over windows of tokens.
    Tokens are quantized if the matrix demands it. A CPU multiplies the same 8-bit numbers in float32, because XLA's
    products of 8 bits take 100 times longer there; sums of products of int8 are exact up to 1,040 inputs.
    """
    if not isinstance(weight, QuantizedMatrix):
        return jnp.einsum("...d,ed->...e", x, weight) if axis else x @ weight.reshape(-1, weight.shape[-1])
    axes = (((x.ndim - 1,), (1,)), ((), ()))

    def dot(tokens: jax.Array, values: jax.Array, dtype: DTypeLike, sums: DTypeLike = jnp.float32) -> jax.Array:
        tokens, values = tokens.astype(dtype), values.astype(dtype)
        return lax.dot_general(tokens, values, axes, preferred_element_type=sums).astype(jnp.float32)

    if not weight.quantizes_tokens:
        return (dot(x, weight.values, x.dtype) * weight.scale).astype(x.dtype)
    tokens, scale = quantize(x, weight.values.dtype)
    sums = jnp.int32 if tokens.dtype == jnp.int8 else jnp.float32
    of_8_bits, of_floats = partial(dot, dtype=tokens.dtype, sums=sums), partial(dot, dtype=jnp.float32)
    with jax.default_matmul_precision("default"):  # A higher one would split numbers of 8 bits.
        product = lax.platform_dependent(tokens, weight.values, cpu=of_floats, default=of_8_bits)
    return (product * scale * weight.scale).astype(x.dtype)


def _promote(arrays: tuple[Any, ...], /, *, dtype: DTypeLike | None = None) -> Any:
    x, kernel, bias = arrays
    if not isinstance(kernel, QuantizedMatrix):
        return promote_dtype(arrays, dtype=dtype)
    x, bias = promote_dtype((x, bias), dtype=dtype)
    return x, kernel, bias


def _dot_general(x: Any, kernel: Any, *arguments: Any, **options: Any) -> Any:
    if isinstance(kernel, QuantizedMatrix):
        return multiply(x, kernel, 0)
    return lax.dot_general(x, kernel, *arguments, **options)


# Arguments of `nnx.Linear` for a layer whose kernel may be quantized.
QUANTIZABLE: Mapping[str, Any] = {"promote_dtype": _promote, "dot_general": _dot_general}


def find_policy_dtypes(name: str | None, platform: str, accelerator_dtype: str) -> tuple[jnp.dtype, str | None]:
    """Return the dtype that a policy computes in, and the name in `WEIGHT_DTYPES`, if it is one.

    Args:
        name: a name of `DTYPES` or `WEIGHT_DTYPES`; None and ``auto`` as in `find_dtype`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in (None, AUTO, *DTYPES, *WEIGHT_DTYPES):
        raise ConfigError(f"dtype is {name!r}; wanted one of {', '.join((*DTYPES, *WEIGHT_DTYPES, AUTO))}")
    if name in WEIGHT_DTYPES:
        return find_dtype(None, platform, "bfloat16"), name
    return find_dtype(None if name == AUTO else name, platform, accelerator_dtype), None


def list_quantized(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, tuple[int, int]]:
    """Return the shapes (out, in) of the weights that are quantized, by name; tables of words are (words, width)."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        is_matrix = _MATRICES.search(name) and len(shape) == (3 if name.startswith("unet.") else 2)
        if math.prod(shape) >= SMALLEST and (is_matrix or name in _TABLES):
            out = shape[-1] if name.endswith("kernel") else shape[0]
            found[name] = (out, math.prod(shape) // out)
    if not found:
        raise ConfigError(
            f"dtype is {dtype}, and the policy has no matrix of an attention or feed-forward layer with "
            f"{SMALLEST:,} numbers or more; use float32 or bfloat16"
        )
    return found


def quantize_weights(weights: Mapping[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Return the quantized matrices of serving weights, and their scales, by name; `dtype` is of `WEIGHT_DTYPES`.

    Raises:
        ConfigError: none of the weights can be quantized.
    """
    # On the CPU, which is faster than NumPy and needs no memory of the device.
    run, place = jax.jit(quantize, static_argnums=1), jax.local_devices(backend="cpu")[0]
    quantized: dict[str, np.ndarray] = {}
    for name, (out, width) in list_quantized({name: np.shape(array) for name, array in weights.items()}, dtype).items():
        array = np.asarray(weights[name], np.float32)
        matrix = array.reshape(width, out).T if name.endswith("kernel") else array
        # Rows of words have int8's smaller error, because no product needs another dtype.
        kind = jnp.dtype(jnp.int8 if name in _TABLES else WEIGHT_DTYPES[dtype])
        values, scale = run(jax.device_put(matrix, place), kind)
        quantized |= {name: np.asarray(values), name + _get_suffix(dtype): np.asarray(scale)[:, 0]}
    return quantized


def _get_suffix(dtype: str) -> str:
    return WEIGHT_SCALE if dtype == INT8_WEIGHTS else SCALE


def list_stored(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of quantized matrices and of their scales, by name."""
    matrices = list_quantized(shapes, dtype)
    return {**matrices, **{name + _get_suffix(dtype): shape[:1] for name, shape in matrices.items()}}


def get_own_dtypes(weights: Mapping[str, Any]) -> dict[str, DTypeLike]:
    """Return the dtypes of quantized matrices and of their scales, by name; other weights get the policy's dtype."""
    matrices = [name for name, array in weights.items() if array.dtype.itemsize == 1]
    kept = [*matrices, *(name + suffix for name in matrices for suffix in (SCALE, WEIGHT_SCALE))]
    return {name: weights[name].dtype for name in kept if name in weights}


def join_scales(weights: Mapping[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Return weights in which each quantized matrix and its scale are one `QuantizedMatrix`."""
    joined = dict(weights)
    for name in weights:
        matrix, dot, last = name.rpartition(".")
        if dot + last in (SCALE, WEIGHT_SCALE) and matrix in weights:
            joined[matrix] = QuantizedMatrix(weights[matrix], joined.pop(name), dtype, dot + last == SCALE)
    return joined
