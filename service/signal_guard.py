"""Guard process that kills a server whose event loop does not react to SIGTERM, SIGINT or SIGHUP.

While C code keeps the interpreter's lock, no code of the server can run. ``faulthandler`` needs no lock: at a signal
it writes the stack of the main thread into a pipe, which this process reads. It imports only the standard library.
"""

import contextlib
import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

# Seconds from the first signal until the event loop must react, and until the server must have ended.
REACTION_TIMEOUT = 2.0
END_TIMEOUT = 8.0
# The same for a second signal without a reaction to the first. A closing terminal sends SIGHUP twice at once.
ACKNOWLEDGE_TIMEOUT = 0.3
CLOSE_TIMEOUT = 0.5  # seconds that an orderly end waits for the guard
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# First line that faulthandler writes at a signal, and the byte that the event loop writes when it handles one.
_CAUGHT = b"Stack (most recent call first)"
_ACKNOWLEDGED = b"\0"
_PIPE_BYTES = 4096  # bytes that a pipe takes whole, or not at all
_STACK_LINES = 12  # lines of the stack, innermost first

logger = logging.getLogger(__name__)


class SignalGuard:
    """The server's side: starts the guard process and reports signals to it over a pipe."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: Sequence[signal.Signals] = ()

    def start(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        """Start the guard for these signals; the event loop's own handlers have to be installed already."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try:
            self._process = subprocess.Popen(
                # Without installed packages the guard starts in 15 ms.
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is not for it
            )
        except OSError as error:
            os.close(writing)
            logger.warning("a blocked event loop would not end at SIGTERM: its guard cannot be started (%s)", error)
            return
        finally:
            os.close(reading)
        self._pipe, self._signals = writing, signals
        for number in signals:
            faulthandler.register(number, writing, all_threads=False, chain=True)

    def acknowledge(self) -> None:
        """Report that the event loop handles a signal; the guard ignores further signals."""
        if self._pipe is None:
            return
        for number in self._signals:
            faulthandler.unregister(number)
        with contextlib.suppress(OSError):  # the guard is gone
            os.write(self._pipe, _ACKNOWLEDGED)

    def close(self) -> None:
        """Tell the guard that the server has ended in order."""
        if self._pipe is not None:
            self.acknowledge()
            os.close(self._pipe)
            self._pipe = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT)


def watch_server(server: int) -> None:
    """Run the guard: wait for the server to end, and kill it when it is late."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a service manager signals all processes of the service
    poll = select.poll()
    poll.register(0, select.POLLIN)
    process = None  # a file descriptor, which is safe against reuse of the process number
    with contextlib.suppress(AttributeError, OSError):
        process = os.pidfd_open(server)
        poll.register(process, select.POLLIN)
    written, caught_at, limit, is_asked_again = b"", 0.0, None, False
    while True:
        deadline = None if limit is None else caught_at + (ACKNOWLEDGE_TIMEOUT if is_asked_again else limit)
        ready = dict(poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3))
        if (process is not None and process in ready) or os.getppid() != server:
            return
        if ready:
            part = os.read(0, _PIPE_BYTES)
            if not part:
                return
            written = (written + part)[-4 * _PIPE_BYTES :]
        if limit is None and _CAUGHT in written:
            caught_at, limit = time.monotonic(), REACTION_TIMEOUT
        if limit == REACTION_TIMEOUT and _ACKNOWLEDGED in written:
            limit = END_TIMEOUT
        is_asked_again = limit == REACTION_TIMEOUT and written.count(_CAUGHT) > 1
        if limit is not None and time.monotonic() >= caught_at + (ACKNOWLEDGE_TIMEOUT if is_asked_again else limit):
            why = "its event loop is blocked" if limit == REACTION_TIMEOUT else "its end takes too long"
            if is_asked_again:
                why += ", and it was signalled again"
            _kill_server(server, process, why, time.monotonic() - caught_at, written)
            return


def _kill_server(server: int, process: int | None, why: str, after: float, written: bytes) -> None:
    lines = written[written.find(_CAUGHT) :].replace(_ACKNOWLEDGED, b"").decode("utf-8", "replace").splitlines()
    said = (
        f"robojax: {why}, so process {server} is killed {after:.1f} s after the signal to end; its connections "
        "break, and robots hold by themselves. Its main thread at the signal:\n"
        + "".join(f"{line}\n" for line in lines[1 : _STACK_LINES + 1])
    )
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):  # the terminal is closed
        if poll.poll(0):  # a terminal that is paused must not keep the server alive
            os.write(2, said.encode()[:_PIPE_BYTES])
    with contextlib.suppress(ProcessLookupError):  # the server has ended
        if process is not None:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        elif os.getppid() == server:
            os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    watch_server(int(sys.argv[1]))
