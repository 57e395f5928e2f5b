"""Which accelerator a policy runs on, and in which precision."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxmodels.errors import ConfigError

Device: TypeAlias = Any  # jax.Device is made at run time, so no type checker knows it
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def find_device(name: str | None) -> Device:
    """A device by name: ``cpu``, ``gpu``, ``cuda:1``, ``tpu:0``; None is JAX's first choice.

    Raises:
        ConfigError: there is no such device; the message lists those there are.
    """
    if name is None:
        return jax.devices()[0]
    platform, _, number = name.partition(":")
    try:
        devices = jax.devices(PLATFORMS.get(platform, platform))
        return devices[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
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
