"""Limits on arrays from outside: dtype, rank, size, finiteness."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from service.errors import InvalidRequest, TooLarge

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64"),
        )
    }
    | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
)
MAX_RANK = 8
MAX_NAME = 128
_PLAIN = re.compile(r"[A-Za-z0-9_.]{1,128}")


@dataclass(frozen=True)
class ArrayLimits:
    """Limits on the arrays of one body.

    Attributes:
        bytes: of all arrays together, whatever they were packed into.
        arrays: how many.
    """

    bytes: int = 64 << 20
    arrays: int = 16


class Allowance:
    """Rest of the limits while the arrays of one body are read."""

    def __init__(self, limits: ArrayLimits):
        self._limits = limits
        self._bytes = limits.bytes
        self._names: set[str] = set()

    def take(self, name: str, shape: Sequence[int], dtype: np.dtype) -> int:
        """Account for the next array before any of it is read; returns its size in bytes.

        Raises:
            InvalidRequest: its name was there already, or its shape is none.
            TooLarge: it is more than is allowed.
        """
        if name in self._names:
            raise array_error(name, "is there twice; wanted each array once")
        self._names.add(name)
        if len(self._names) > self._limits.arrays:
            raise TooLarge(f"more than {self._limits.arrays} arrays; send those that the model takes")
        if len(shape) > MAX_RANK or any(size < 1 for size in shape):
            raise array_error(
                name, f"has shape {list(shape)[:MAX_RANK]}; wanted up to {MAX_RANK} axes, none of them empty"
            )
        size = math.prod(shape) * dtype.itemsize
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge(
                f"the arrays are more than {self._limits.bytes} bytes (max_forward_bytes); send a smaller batch"
            )
        return size


def check_name(name: object) -> str:
    """Check that an array's name is text of a usable length.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequest(f"names of arrays are text of 1 to {MAX_NAME} characters", ("body", "inputs"))
    return name


def read_dtype(name: str, value: object) -> np.dtype:
    """Return the allowed dtype of this name.

    Raises:
        InvalidRequest: it is none of them.
    """
    if not isinstance(value, str) or value not in DTYPES:
        raise array_error(name, f"has a dtype that is not allowed; wanted one of {', '.join(DTYPES)}")
    return DTYPES[value]


def read_shape(name: str, value: object) -> tuple[int, ...]:
    """Return a shape as JSON and msgpack write it, a list of integers.

    Raises:
        InvalidRequest: it is no list of integers.
    """
    if not isinstance(value, list) or any(type(size) is not int for size in value):
        raise array_error(name, "has no shape; wanted a list of integers")
    return tuple(value)


def check_finite(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array after checking that no number is NaN or infinite; bytes of booleans become 0 or 1.

    Raises:
        InvalidRequest: it holds NaN or infinity.
    """
    if array.dtype == bool:
        return array.view(np.uint8) != 0
    if array.dtype.kind not in "biu" and not np.isfinite(array).all():
        raise array_error(name, "holds NaN or infinity; wanted finite numbers")
    return array


def array_error(name: str, what: str) -> InvalidRequest:
    """Create an error about one array; a name that was sent is repeated only when it is plain."""
    called = name if _PLAIN.fullmatch(name) else "an array"
    return InvalidRequest(f"{called} {what}", ("body", "inputs", called))
