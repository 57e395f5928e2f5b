"""A dataset's rows, tasks and features in the form that LeRobot's files have."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxmodels.data import layout
from jaxmodels.data.video_writer import CODEC, CameraFiles


def vectors_table(columns: Mapping[str, np.ndarray]) -> pa.Table:
    """Vectors as lists of a fixed size, single values plain."""
    found = {}
    for name, values in columns.items():
        flat = pa.array(values.ravel())
        is_single = name in layout.INDICES
        found[name] = flat if is_single else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.table(found)


def column(values: pa.ChunkedArray) -> np.ndarray:
    """(n, d) of a column of such a table."""
    whole = values.combine_chunks()
    if isinstance(whole, pa.FixedSizeListArray):
        return whole.flatten().to_numpy().reshape(len(whole), -1)
    return whole.to_numpy()[:, None]


def tasks_table(tasks: Sequence[str]) -> pa.Table:
    """Tasks with their number. LeRobot reads them with pandas, which wants the text as the index of its frame."""
    index = "__index_level_0__"
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})

    def described(field: str, kind: str, numpy: str, name: str | None) -> dict[str, object]:
        return {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy, "metadata": None}

    labels = {**described("", "unicode", "object", None), "field_name": None, "metadata": {"encoding": "UTF-8"}}
    pandas = {
        "index_columns": [index],
        "column_indexes": [labels],
        "columns": [
            described("task_index", "int64", "int64", "task_index"),
            described(index, "unicode", "object", None),
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def features_of(
    names: Mapping[str, Sequence[str]], cameras: Mapping[str, CameraFiles], rate: int | float
) -> dict[str, dict[str, Any]]:
    """What ``info.json`` says of each column."""
    features: dict[str, dict[str, Any]] = {
        name: {"dtype": "float32", "shape": [len(numbers)], "names": list(numbers)} for name, numbers in names.items()
    }
    for key, files in cameras.items():
        height, width = files.size
        features[key] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": height,
                "video.width": width,
                "video.codec": CODEC,
                "video.pix_fmt": files.format,
                "video.is_depth_map": False,
                "video.fps": rate,
                "video.channels": 3,
                "has_audio": False,
            },
        }
    indices = {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in layout.INDICES.items()}
    return features | indices
