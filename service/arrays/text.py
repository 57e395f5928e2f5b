"""Arrays in JSON: numbers, nested lists, or ``{"dtype", "shape", "data"}``. For trying things by hand."""

import json
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from service.arrays.limits import (
    MAX_RANK,
    Allowance,
    ArrayLimits,
    check_finite,
    check_name,
    read_dtype,
    read_shape,
    refusal,
)
from service.edge.bounded_json import as_text, has_many_values, loads, loads_slowly
from service.errors import InvalidRequest

# Python's encoder and decoder keep every other thread waiting until they are done: a millisecond at a time is enough.
_AT_ONCE = 1024
_VALUES = 4096


def decode(body: bytes, limits: ArrayLimits, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Arrays by name out of ``{"inputs": {name: array}}``.

    Args:
        dtypes: by name, for arrays that come without one: JSON has one kind of number for 1 and 1.0.

    Raises:
        InvalidRequest: it is not JSON, or holds something else than arrays of finite numbers.
        TooLarge: it holds more than is allowed.
    """
    found = _parse(body)
    inputs = found.get("inputs") if isinstance(found, dict) else None
    if not isinstance(inputs, dict):
        raise InvalidRequest('wanted {"inputs": {name: array, ...}}', ("body", "inputs"))
    allowance = Allowance(limits)
    return {check_name(name): _read(name, value, allowance, dtypes.get(name)) for name, value in inputs.items()}


def encode(outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> list[bytes]:
    """``{"outputs": {name: {"dtype", "shape", "data": nested lists}}, "timings_ms": {stage: number}}`` in pieces.

    Raises:
        ValueError: a number is NaN or infinite, which JSON does not have.
    """
    pieces: list[str] = ['{"outputs":{']
    for position, (name, array) in enumerate(outputs.items()):
        head = json.dumps({"dtype": array.dtype.name, "shape": list(array.shape)}, separators=(",", ":"))
        pieces += ["," if position else "", json.dumps(name), ":", head[:-1], ',"data":']
        _write(array, pieces)
        pieces.append("}")
    pieces.append('},"timings_ms":' + json.dumps(dict(timings), allow_nan=False) + "}")
    return ["".join(pieces).encode()]


def _write(array: np.ndarray, pieces: list[str]) -> None:
    if array.size <= _AT_ONCE:
        pieces.append(json.dumps(array.tolist(), allow_nan=False, separators=(",", ":")))
        return
    pieces.append("[")
    parts = np.array_split(array, math.ceil(len(array) / _AT_ONCE)) if array.ndim == 1 else array
    for position, part in enumerate(parts):
        if position:
            pieces.append(",")
        if array.ndim == 1:
            pieces.append(json.dumps(part.tolist(), allow_nan=False, separators=(",", ":"))[1:-1])
        else:
            _write(part, pieces)
    pieces.append("]")


def _refuse(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is no JSON")


def _parse(body: bytes) -> Any:
    try:
        text = as_text(body)
        if has_many_values(text, _VALUES):
            return loads_slowly(text, parse_constant=_refuse)
        return loads(text, _VALUES, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("JSON decode error; wanted JSON, whose numbers are finite", ("body",)) from error


def _read(name: str, value: object, allowance: Allowance, usual: str | None) -> np.ndarray:
    shape = None
    said = usual
    if isinstance(value, dict):
        said = value.get("dtype", usual)
        shape = read_shape(name, value["shape"]) if "shape" in value else None
        value = value.get("data")
    dtype = None if said is None else read_dtype(name, said)
    array = _numbers(name, value)
    if shape is not None:
        allowance.take(name, shape, array.dtype)
        if math.prod(shape) != array.size:
            raise refusal(name, f"has shape {list(shape)}, but {array.size} numbers")
        array = array.reshape(shape)
    else:
        allowance.take(name, array.shape, array.dtype)
    return check_finite(name, array if dtype is None else _cast(name, array, dtype))


def _numbers(name: str, value: object) -> np.ndarray:
    try:
        array = _array(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise refusal(name, "is no array; wanted a number, or nested lists of numbers of equal length") from error
    if array.dtype.kind not in "biuf":
        raise refusal(name, "is no array of numbers; wanted a number, or nested lists of numbers of equal length")
    return array


def _array(value: object, rank: int = MAX_RANK) -> np.ndarray:
    """``np.array``, of a thousand numbers at a time where there are more."""
    if not isinstance(value, list) or not value or not rank:
        return np.array(value)
    each, part = 1, value[0]
    for _ in range(rank):
        if not isinstance(part, list) or not part:
            break
        each, part = each * len(part), part[0]
    if each * len(value) <= _AT_ONCE:
        return np.array(value)
    if each > _AT_ONCE:
        return np.stack([_array(part, rank - 1) for part in value])
    step, parts = max(_AT_ONCE // each, 1), iter(value)
    return np.concatenate([np.array(few) for few in iter(lambda: list(islice(parts, step)), [])])


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    is_whole = dtype.kind in "iu"
    if is_whole and array.dtype.kind == "f":
        raise refusal(name, f"holds fractions; wanted {dtype.name}")
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if is_whole and not np.array_equal(cast, array):
        raise refusal(name, f"holds numbers that {dtype.name} has not")
    return cast
