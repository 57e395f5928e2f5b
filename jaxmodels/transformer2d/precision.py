"""What a model computes in, by name or dtype, and with how many bits."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmodels.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def read_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    """One of `DTYPES`, given by name or as NumPy or JAX write it; float32 when None.

    Raises:
        ConfigError: another dtype.
    """
    try:
        found = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError as error:
        raise ConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPES)}") from error
    if found.name not in DTYPES:
        raise ConfigError(f"dtype is {found.name}; wanted one of {', '.join(DTYPES)}")
    return found


def exact_products(dtype: DTypeLike) -> AbstractContextManager[Any]:
    """Accelerators round float32 products to fewer bits unless told otherwise."""
    return jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else None)
