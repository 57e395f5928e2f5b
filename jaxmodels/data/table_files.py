"""Readers of Parquet and JSON-lines files, with limits of size."""

import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxmodels.errors import DatasetError

# More rows than any dataset has, because a few bytes of a file can claim any number of rows.
MAX_ROWS = 100_000_000
# Rows beyond the bytes of a file, bytes of small files, and bytes in memory per byte of a file (up to 30 in datasets).
ROWS_BASE, VALUES_BASE, EXPANSION = 10_000, 64 << 20, 256


def open_table(path: Path, where: str) -> parquet.ParquetFile:
    """Open a Parquet file and read its footer; raises DatasetError if it is malformed or claims too many rows."""
    try:
        check_regular(path)
        file = parquet.ParquetFile(path)
    except FileNotFoundError as error:
        raise DatasetError(f"{where} is missing; fetch or copy the dataset again") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DatasetError(f"{where} cannot be read ({type(error).__name__}); fetch or copy it again") from error
    rows = file.metadata.num_rows
    # Each row has its own index, which takes more than a byte of the file.
    most = min(MAX_ROWS, ROWS_BASE + path.stat().st_size)
    if rows > most:
        file.close()
        raise DatasetError(f"{where}: {rows} rows; a file of this size has at most {most}")
    return file


def check_regular(path: Path) -> None:
    """Raise OSError unless a file is regular: a pipe would block, a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is not a regular file")


def _check_size(file: parquet.ParquetFile, columns: Sequence[str], where: str) -> None:
    """Refuse columns that would take far more memory than the file has bytes."""
    metadata, values = file.metadata, 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            if column.path_in_schema.split(".list.")[0] in columns:
                values += max(column.num_values, column.total_uncompressed_size // 8)
    size = metadata.serialized_size + sum(
        metadata.row_group(group).column(number).total_compressed_size
        for group in range(metadata.num_row_groups)
        for number in range(metadata.row_group(group).num_columns)
    )
    if values * 8 > VALUES_BASE + EXPANSION * size:
        raise DatasetError(
            f"{where}: {', '.join(columns)[:200]} would take {values * 8} bytes of memory; allowed are "
            f"{VALUES_BASE + EXPANSION * size}, {EXPANSION} times the file"
        )


def read_table(path: Path, columns: Sequence[str] | None, where: str, *, optional: Sequence[str] = ()) -> pa.Table:
    """Read these columns of a Parquet file (None: all but the statistics), and existing `optional` columns.

    Raises:
        DatasetError: the file or a column is missing or unreadable.
    """
    with open_table(path, where) as file:
        available = file.schema_arrow.names
        selected = (
            list(columns) if columns is not None else [name for name in available if not name.startswith("stats/")]
        )
        if missing := sorted(set(selected) - set(available)):
            raise DatasetError(f"{where} has no column {', '.join(missing)}")
        selected += [name for name in optional if name in available]
        _check_size(file, selected, where)
        try:
            return file.read(columns=selected)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DatasetError(f"{where} cannot be read ({type(error).__name__}); fetch or copy it again") from error


def read_vectors(column: Any, width: int, dtype: Any, where: str) -> np.ndarray:
    """Return a column of lists or numbers as an array (n, width); raises DatasetError for other values or gaps."""
    parts = []
    for chunk in column.chunks:
        is_list = isinstance(chunk.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        values = chunk.flatten() if is_list else chunk
        if chunk.null_count or values.null_count or len(values) != len(chunk) * width:
            raise DatasetError(f"{where}: rows are empty or do not have {width} numbers")
        try:
            parts.append(values.to_numpy(zero_copy_only=False).astype(dtype, casting="unsafe").reshape(-1, width))
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise DatasetError(f"{where}: {chunk.type} is not a number") from error
    return np.concatenate(parts) if parts else np.empty((0, width), dtype)


LONGEST = 1 << 22  # Bytes of a line; statistics of thirty features have a hundred thousand.


def read_lines(path: Path, where: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; raises DatasetError if it is missing or has a long or malformed line."""
    try:
        if not path.is_file():
            raise DatasetError(f"{where} is missing or not a regular file; fetch or copy the dataset again")
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LONGEST + 1):
                number += 1
                if len(line) > LONGEST:
                    raise DatasetError(f"{where}: line {number} is longer than {LONGEST} bytes")
                if line.strip():
                    yield _object(line, f"{where}: line {number}")
    except OSError as error:
        raise DatasetError(f"{where} cannot be read ({error.strerror}); fetch or copy the dataset again") from error


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where} is malformed JSON") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{where} holds a {type(value).__name__}; wanted an object")
    return value
