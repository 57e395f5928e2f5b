"""A recording made into a dataset, in a process of its own that only works when nobody else wants the processor."""

import os
import signal
import sys
from pathlib import Path

from service.recording.dataset_writer import write_dataset
from service.recording.sources import open_source
from service.recording.steps import RecordingError


def step_back() -> None:
    """Let everybody else go first."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)


def main(file: str, folder: str) -> int:
    """What ``python -m service.recording.export FILE FOLDER`` does; 0 when the dataset is there."""
    # The folder that is not finished is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    step_back()
    try:
        source = open_source(Path(file))
        write_dataset(Path(folder), source.facts, source.steps())
    except (RecordingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if source.damage is not None:
        sys.stderr.write(f"{source.damage}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
