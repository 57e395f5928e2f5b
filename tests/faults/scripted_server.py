"""``python -m tests.faults.scripted_server serve ...``: the command ``robojax``, whose policies follow a script.

``FAULTS_CLOCK`` names a file with the seconds by which its wall clock is wrong.
"""

import os
import time
from functools import partial
from pathlib import Path

import service.app
from service.cli.commands import main
from tests.faults.script import load, read


def set_wrong(file: Path) -> None:
    """From now on the wall clock of this process is as wrong as the file says."""
    right, right_ns = time.time, time.time_ns

    def wrong() -> float:
        return float(file.read_text() or 0)

    time.time = lambda: right() + wrong()
    time.time_ns = lambda: right_ns() + int(wrong() * 1e9)


if __name__ == "__main__":
    if os.environ.get("FAULTS_CLOCK"):
        set_wrong(Path(os.environ["FAULTS_CLOCK"]))
    service.app.create_app = partial(service.app.create_app, load=load, read_requirements=read)
    main()
