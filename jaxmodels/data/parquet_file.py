"""Parquet files of strangers as arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxmodels.errors import DatasetError

# Beyond any dataset there is; a few bytes of a file can claim as many rows as they like.
MOST_ROWS = 100_000_000


def open_table(path: Path, where: str) -> parquet.ParquetFile:
    """The file, of which nothing but the end was read.

    Raises:
        DatasetError: it is missing, no parquet file, or claims too many rows.
    """
    try:
        file = parquet.ParquetFile(path)
    except FileNotFoundError as error:
        raise DatasetError(f"{where} is missing; fetch or copy the dataset anew") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DatasetError(f"{where} cannot be read ({type(error).__name__}); fetch or copy it anew") from error
    if file.metadata.num_rows > MOST_ROWS:
        file.close()
        raise DatasetError(f"{where}: {file.metadata.num_rows} rows; allowed are {MOST_ROWS}")
    return file


def read_table(path: Path, columns: Sequence[str] | None, where: str) -> pa.Table:
    """These columns, or all but the statistics.

    Raises:
        DatasetError: the file or one of them is missing or cannot be read.
    """
    with open_table(path, where) as file:
        there = file.schema_arrow.names
        wanted = list(columns) if columns is not None else [name for name in there if not name.startswith("stats/")]
        if missing := sorted(set(wanted) - set(there)):
            raise DatasetError(f"{where} has no column {', '.join(missing)}")
        try:
            return file.read(columns=wanted)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DatasetError(f"{where} cannot be read ({type(error).__name__}); fetch or copy it anew") from error


def vectors(column: Any, width: int, dtype: Any, where: str) -> np.ndarray:
    """(n, width) of a column of lists, or of single numbers.

    Raises:
        DatasetError: it holds something else, or nothing in places.
    """
    parts = []
    for chunk in column.chunks:
        values = chunk.flatten() if _is_list(chunk.type) else chunk
        if chunk.null_count or values.null_count or len(values) != len(chunk) * width:
            raise DatasetError(f"{where}: rows of other sizes than {width}, or empty ones")
        try:
            parts.append(values.to_numpy(zero_copy_only=False).astype(dtype, casting="unsafe").reshape(-1, width))
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise DatasetError(f"{where}: {chunk.type} is no number") from error
    return np.concatenate(parts) if parts else np.empty((0, width), dtype)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
