"""A path of the command line as steps: a recording, or a dataset."""

from pathlib import Path

from service.recording.dataset_reader import DatasetSource
from service.recording.mcap_reader import McapSource
from service.recording.steps import RecordingError, Source


def open_source(path: Path) -> Source:
    """The steps of a recording (.mcap) or of a LeRobotDataset folder, v3.0 or v2.1.

    Raises:
        RecordingError: it is neither, or cannot be read.
    """
    if not path.exists():
        raise RecordingError(f"{path} is not there; `robojax recordings list` shows those of a server")
    return DatasetSource(path) if path.is_dir() else McapSource(path)
