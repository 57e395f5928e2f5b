"""JSON files of strangers, read strictly: bounded, no NaN, no infinity, no name twice."""

import json
from pathlib import Path
from typing import Any, NoReturn

from jaxmodels.checkpoints.folder import JSON_BYTES as LIMIT
from jaxmodels.checkpoints.folder import Source, opened
from jaxmodels.errors import CheckpointError


def read_json(path: Source) -> dict[str, Any]:
    """Reads an object; of a pipe or a device, nothing.

    Raises:
        CheckpointError: the file is missing, too long, or no JSON object of finite numbers and unique names.
    """
    name = path.name
    try:
        with opened(path) as file:
            raw = file.read(0, LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error.strerror}); wanted it in the folder") from error
    if len(raw) > LIMIT:
        raise CheckpointError(f"{name}: longer than {LIMIT} bytes; wanted a checkpoint's description")
    try:
        value = json.loads(
            raw, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique_object
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{name}: malformed JSON ({reason})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: holds a {type(value).__name__}; wanted a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any], indent: int, *, end: str = "") -> None:
    path.write_text(json.dumps(value, indent=indent, allow_nan=False) + end)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return value
