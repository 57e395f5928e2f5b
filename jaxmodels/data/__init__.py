"""Reading and writing of LeRobotDatasets, and training batches out of them.

Names are looked up when first used, so that importing this package imports neither pyarrow nor PyAV.
"""

from typing import TYPE_CHECKING, Any

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.data.dataset import Dataset, open_dataset
    from jaxmodels.data.dataset_writer import DatasetWriter
    from jaxmodels.data.frames import resize_frames
    from jaxmodels.data.loader import Batch, Loader
    from jaxmodels.data.pictures import decode_picture

__all__ = ["Batch", "Dataset", "DatasetWriter", "Loader", "decode_picture", "open_dataset", "resize_frames"]

_NAMES = {
    "jaxmodels.data.dataset": "Dataset open_dataset",
    "jaxmodels.data.dataset_writer": "DatasetWriter",
    "jaxmodels.data.frames": "resize_frames",
    "jaxmodels.data.loader": "Batch Loader",
    "jaxmodels.data.pictures": "decode_picture",
}
_find, __dir__ = lazy_names(__name__, _NAMES)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if error.name not in ("av", "pyarrow"):
            raise
        text = f"datasets need the package {error.name}: pip install -e '.[training]'"
        raise ModuleNotFoundError(text, name=error.name) from error
