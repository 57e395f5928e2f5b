"""Steps of a recording into a LeRobotDataset v3.0 folder."""

from collections.abc import Callable, Iterable
from pathlib import Path

from jaxmodels.data import DatasetWriter
from jaxmodels.errors import DatasetError
from service.recording.dataset_reader import ACTION, IMAGES, STATE
from service.recording.steps import Facts, RecordingError, Step

# The task of episodes in which nobody said what was to be done.
UNNAMED = "unnamed"


def write_dataset(
    folder: Path, facts: Facts, steps: Iterable[Step], on_step: Callable[[], object] = lambda: None
) -> DatasetWriter:
    """A new dataset folder of all these steps; what it holds, counted.

    Args:
        on_step: told of every step that was written.

    Raises:
        RecordingError: it cannot be made; nothing is left behind.
        OSError: the disk does not take it.
    """
    before: Step | None = None
    try:
        with DatasetWriter(
            folder, fps=facts.rate, joint_names=facts.features, cameras=facts.cameras, robot_type=facts.robot_type
        ) as writer:
            for step in steps:
                if before is not None and before.episode != step.episode:
                    writer.end_episode(before.task.strip() or UNNAMED)
                pixels = {f"{IMAGES}{camera}": step.pictures[camera].pixels for camera in facts.cameras}
                writer.add({STATE: step.state, ACTION: step.action, **pixels})
                before = step
                on_step()
            if before is None:
                raise RecordingError(
                    "there is nothing to make a dataset of: the robot was never sent anywhere with all cameras in sight"
                )
            writer.end_episode(before.task.strip() or UNNAMED)
    except DatasetError as error:
        raise RecordingError(str(error)) from error
    return writer
