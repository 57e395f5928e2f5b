"""``python -m tests.hostile.timed_server serve ...``: the scripted server, which notes how long its loop was kept.

``HOSTILE_TIMES`` names a file of two doubles: the most seconds from one turn of the loop to the next, by the clock and
of the loop's own processor time. Whoever writes zeros there begins anew.
"""

import asyncio
import mmap
import os
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import service.app
from robojax.cli.app import main
from tests.faults.script import load, read

TIMES = struct.Struct("dd")
TURN = 0.001


async def watch(times: mmap.mmap) -> None:
    """Note the longest pauses, for as long as the loop runs."""
    while True:
        began, worked = time.monotonic(), time.thread_time()
        await asyncio.sleep(TURN)
        found = time.monotonic() - began - TURN, time.thread_time() - worked
        worst = TIMES.unpack_from(times)
        if found[0] > worst[0] or found[1] > worst[1]:
            TIMES.pack_into(times, 0, max(found[0], worst[0]), max(found[1], worst[1]))


def watched(create_app: Any, file: Path) -> Any:
    """The same, but its app notes its pauses."""

    def create(*arguments: Any, **named: Any) -> Any:
        app = create_app(*arguments, **named)
        with file.open("r+b") as opened:
            times = mmap.mmap(opened.fileno(), TIMES.size)
        app.add_task(watch(times))
        return app

    return create


if __name__ == "__main__":
    scripted = partial(service.app.create_app, load=load, read_requirements=read)
    service.app.create_app = watched(scripted, Path(os.environ["HOSTILE_TIMES"]))
    main()
