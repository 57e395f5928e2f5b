"""Keys as they are pressed, where there is a terminal."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def keys() -> AsyncIterator["asyncio.Queue[str]"]:
    """A queue of keys; Ctrl-C stays what it is, and the terminal is put back at the end."""
    pressed: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield pressed
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def read() -> None:
        found = b""
        with contextlib.suppress(OSError):
            found = os.read(terminal, 64)
        if not found:
            loop.remove_reader(terminal)  # it hung up, and would be readable for ever
        for key in found.decode(errors="replace"):
            pressed.put_nowait(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
