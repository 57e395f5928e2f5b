"""Which accelerator a model runs on, and in which precision."""

from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmodels.errors import ConfigError

Device: TypeAlias = Any  # jax.Device is made at run time, so no type checker knows it
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MODEL_DTYPES = (*DTYPES, "float16")
PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def find_device(name: str | None) -> Device:
    """A device by name: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``; None is JAX's first choice here.

    Raises:
        ConfigError: there is no such device; the message lists those there are.
    """
    if name is None:
        return jax.local_devices()[0]
    platform, _, number = name.partition(":")
    backend = PLATFORMS.get(platform, platform)
    try:
        if not number:
            return jax.local_devices(backend=backend)[0]
        # By its id: where several processes have joined, those of one do not begin at 0.
        return next(device for device in jax.devices(backend) if device.id == int(number))
    except (RuntimeError, ValueError, IndexError, StopIteration) as error:
        there = ", ".join(device_name(device) for device in jax.devices())
        raise ConfigError(f"device is {name!r}; found {there} (and cpu:0)") from error


def device_name(device: Device) -> str:
    return f"{device.platform}:{device.id}"


def find_dtype(name: str | None) -> jnp.dtype:
    """The dtype a policy computes in.

    float32 by default, with true float32 products on every device. bfloat16 is meant for accelerators; on a CPU it
    is slower than float32 and allowed only because it is asked for by name.

    Raises:
        ConfigError: another name.
    """
    if name not in (None, *DTYPES):
        raise ConfigError(f"dtype is {name!r}; wanted one of {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[name or "float32"])


def read_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    """A model's dtype, by name or as NumPy and JAX write it; float32 when None.

    Raises:
        ConfigError: none of `MODEL_DTYPES`.
    """
    try:
        found = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError as error:
        raise ConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(MODEL_DTYPES)}") from error
    if found.name not in MODEL_DTYPES:
        raise ConfigError(f"dtype is {found.name}; wanted one of {', '.join(MODEL_DTYPES)}")
    return found


def exact_products(dtype: DTypeLike) -> AbstractContextManager[Any]:
    """While this is entered, float32 means float32: accelerators round products to fewer bits unless told otherwise."""
    return jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else None)
