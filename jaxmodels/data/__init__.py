"""Reading and writing of LeRobotDatasets, and training batches out of them.

Names are looked up when first used, so that importing this package imports neither pyarrow nor PyAV.
"""

from typing import TYPE_CHECKING, Any

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.data.dataset import Dataset, open_dataset  # noqa: F401
    from jaxmodels.data.dataset_writer import DatasetWriter  # noqa: F401
    from jaxmodels.data.frames import resize_frames  # noqa: F401
    from jaxmodels.data.loader import Batch, Loader  # noqa: F401
    from jaxmodels.data.pictures import decode_picture  # noqa: F401

_NAMES = {
    "jaxmodels.data.dataset": "Dataset open_dataset",
    "jaxmodels.data.dataset_writer": "DatasetWriter",
    "jaxmodels.data.frames": "resize_frames",
    "jaxmodels.data.loader": "Batch Loader",
    "jaxmodels.data.pictures": "decode_picture",
}
_find, __dir__ = lazy_names(__name__, _NAMES)
__all__ = [name for names in _NAMES.values() for name in names.split()]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if error.name not in ("av", "pyarrow"):
            raise
        text = f"datasets need the package {error.name}: pip install -e '.[training]'"
        raise ModuleNotFoundError(text, name=error.name) from error
