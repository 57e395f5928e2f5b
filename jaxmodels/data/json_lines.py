"""Files of one JSON object per line, as version 2.1 describes its episodes with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmodels.errors import DatasetError

LONGEST = 1 << 22  # bytes of a line; statistics of thirty features have a hundred thousand


def read_lines(path: Path, where: str) -> Iterator[dict[str, Any]]:
    """The objects, one at a time.

    Raises:
        DatasetError: the file is missing, or a line is too long or no object.
    """
    try:
        if not path.is_file():
            raise DatasetError(f"{where} is missing, or no regular file; fetch or copy the dataset anew")
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LONGEST + 1):
                number += 1
                if len(line) > LONGEST:
                    raise DatasetError(f"{where}: line {number} is longer than {LONGEST} bytes")
                if line.strip():
                    yield _object(line, f"{where}: line {number}")
    except OSError as error:
        raise DatasetError(f"{where} cannot be read ({error.strerror}); fetch or copy the dataset anew") from error


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where} is malformed JSON") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{where} holds a {type(value).__name__}; wanted an object")
    return value
