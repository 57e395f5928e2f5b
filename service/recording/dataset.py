"""Reads and writes recorded steps as a LeRobotDataset."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jaxmodels.data import Dataset, DatasetWriter, open_dataset
from jaxmodels.errors import DatasetError
from service.control.joints import SO100
from service.recording.steps import NO_STEPS, LazyImage, RecordingError, SourceInfo, Step

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
_SO100 = {f"{joint.alias}.pos": joint for joint in SO100}


def _read_frame(dataset: Dataset, name: str, row: int) -> np.ndarray:
    """Return the frame of a camera in a row: uint8 (h, w, 3), RGB."""
    try:
        return dataset.frames(name, np.array([row]))[0]
    except DatasetError as error:
        raise RecordingError(str(error)) from error


class DatasetSource:
    """Steps of a dataset: state and action as vectors, cameras as video or pictures."""

    damage: str | None = None

    def __init__(self, folder: Path):
        """Open the dataset; raises RecordingError if it cannot be read, or its state and actions differ in width."""
        try:
            dataset = self._dataset = open_dataset(folder)
            width = dataset.feature(ACTION).shape[0]
            states = dataset.feature(STATE).shape[0]
        except DatasetError as error:
            raise RecordingError(str(error)) from error
        if states != width:
            raise RecordingError(f"{folder.name}: its state has {states} values and its action {width}; wanted as many")
        names = dataset.joint_names or tuple(f"joint_{number + 1}" for number in range(width))
        joints = [_SO100.get(name) for name in names]
        self.info = SourceInfo(
            rate=dataset.fps,
            joints=names,
            features=names,
            low=np.array([joint.low if joint else -np.inf for joint in joints], np.float32),
            high=np.array([joint.high if joint else np.inf for joint in joints], np.float32),
            cameras=tuple(one.name.removeprefix(IMAGES) for one in dataset.cameras if one.name.startswith(IMAGES)),
            robot_type=dataset.robot_type,
            task=dataset.tasks[dataset.task_index[0]],
            length=len(dataset),
        )

    def steps(self) -> Iterator[Step]:
        """Yield all steps, episode after episode; raises RecordingError if a file cannot be read."""
        dataset = self._dataset
        try:
            states, actions = dataset.vectors(STATE), dataset.vectors(ACTION)
        except DatasetError as error:
            raise RecordingError(str(error)) from error
        for number, (start, end) in enumerate(zip(dataset.starts, dataset.ends, strict=True)):
            task = dataset.tasks[dataset.task_index[start]]
            for row in range(start, end):
                pictures = {
                    name: LazyImage(partial(_read_frame, dataset, f"{IMAGES}{name}", row)) for name in self.info.cameras
                }
                yield Step(number, row - start, states[row], actions[row], pictures, task)


UNNAMED_TASK = "unnamed"  # Task of episodes without an instruction.


def write_dataset(
    folder: Path, info: SourceInfo, steps: Iterable[Step], on_step: Callable[[], object] = lambda: None
) -> DatasetWriter:
    """Write steps as a new dataset folder; return the writer, which has the counts. ``on_step`` follows every step.

    Raises:
        RecordingError: the dataset cannot be created; no file is left.
        OSError: the dataset cannot be written.
    """
    before: Step | None = None
    try:
        with DatasetWriter(
            folder, fps=info.rate, joint_names=info.features, cameras=info.cameras, robot_type=info.robot_type
        ) as writer:
            for step in steps:
                if before is not None and before.episode != step.episode:
                    writer.end_episode(before.task.strip() or UNNAMED_TASK)
                pixels = {f"{IMAGES}{camera}": step.pictures[camera].pixels for camera in info.cameras}
                writer.add({STATE: step.state, ACTION: step.action, **pixels})
                before = step
                on_step()
            if before is None:
                raise RecordingError(f"there is no step for a dataset: {NO_STEPS}")
            writer.end_episode(before.task.strip() or UNNAMED_TASK)
    except DatasetError as error:
        raise RecordingError(str(error)) from error
    return writer
