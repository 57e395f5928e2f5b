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
    """Of one body.

    Attributes:
        bytes: of all arrays together, whatever they were packed into.
        arrays: how many.
    """

    bytes: int = 64 << 20
    arrays: int = 16


class Allowance:
    """What one body may still bring."""

    def __init__(self, limits: ArrayLimits):
        self._limits = limits
        self._bytes = limits.bytes
        self._names: set[str] = set()

    def take(self, name: str, shape: Sequence[int], dtype: np.dtype) -> int:
        """Bytes of the next array, before any of them are read.

        Raises:
            InvalidRequest: its name was there already, or its shape is none.
            TooLarge: it is more than is allowed.
        """
        if name in self._names:
            raise refusal(name, "is there twice; wanted each array once")
        self._names.add(name)
        if len(self._names) > self._limits.arrays:
            raise TooLarge(f"more than {self._limits.arrays} arrays; send those that the model takes")
        if len(shape) > MAX_RANK or any(size < 1 for size in shape):
            raise refusal(name, f"has shape {list(shape)[:MAX_RANK]}; wanted up to {MAX_RANK} axes, none of them empty")
        size = math.prod(shape) * dtype.itemsize
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge(
                f"the arrays are more than {self._limits.bytes} bytes (max_forward_bytes); send a smaller batch"
            )
        return size


def check_name(name: object) -> str:
    """A name that may be looked at.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequest(f"names of arrays are text of 1 to {MAX_NAME} characters", ("body", "inputs"))
    return name


def read_dtype(name: str, said: object) -> np.dtype:
    """One of the allowed dtypes by its name.

    Raises:
        InvalidRequest: it is none of them.
    """
    if not isinstance(said, str) or said not in DTYPES:
        raise refusal(name, f"has a dtype that is not allowed; wanted one of {', '.join(DTYPES)}")
    return DTYPES[said]


def read_shape(name: str, said: object) -> tuple[int, ...]:
    """A shape as JSON and msgpack have it.

    Raises:
        InvalidRequest: it is no list of integers.
    """
    if not isinstance(said, list) or any(type(size) is not int for size in said):
        raise refusal(name, "has no shape; wanted a list of integers")
    return tuple(said)


def check_finite(name: str, array: np.ndarray) -> np.ndarray:
    """The array, when all of its numbers are numbers; bytes of booleans become 0 or 1.

    Raises:
        InvalidRequest: it holds NaN or infinity.
    """
    if array.dtype == bool:
        return array.view(np.uint8) != 0
    if array.dtype.kind not in "biu" and not np.isfinite(array).all():
        raise refusal(name, "holds NaN or infinity; wanted finite numbers")
    return array


def refusal(name: str, what: str) -> InvalidRequest:
    """An error about one array; what was sent as its name is repeated only when it is plain."""
    called = name if _PLAIN.fullmatch(name) else "an array"
    return InvalidRequest(f"{called} {what}", ("body", "inputs", called))
