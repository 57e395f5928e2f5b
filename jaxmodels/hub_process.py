"""Processes for the jobs of `jaxmodels.hub`, forked from a process that has imported the Hub's client.

The import takes 0.25 s of processor time, a fork a few milliseconds. The process that forks never reads an answer of a
Hub. It starts with the first job, and ends with this process or after `IDLE` seconds without a job.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from jaxmodels.errors import HubError

# Seconds without a job after which the process that forks ends.
IDLE = 600.0
# Seconds for a fork, with the start of the process.
START = 60.0
_PROGRAM = """
import sys
sys.path[:] = sys.argv[1].split(chr(0x1f))
from jaxmodels.hub_download import main
from jaxmodels.hub_process import serve
serve(sys.argv[2], main)
"""
# The client reads these when it is imported. Transfers of Xet cannot be limited.
_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
}
# Variables that the client reads when it is imported. If one changes, the next job needs another process.
_READ_AT_START = re.compile("(HF_|HUGGING|SSL_|XDG_|HOME$).*|.*_PROXY", re.IGNORECASE)


class _ForkServer:
    """Process that forks a process for each job, for a ``key`` of this process and the environment."""

    def __init__(self, key: object):
        self.key = key
        self._lock = threading.Lock()
        self._control, theirs = Pipe()
        paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, "\x1f".join(paths), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # An interrupt from the keyboard ends only the parent.
            )
        self._end = weakref.finalize(self, _end, self._process, self._control)

    def fork(self, connection: Connection) -> int:
        """Start a process that reads its job from a connection, and return its id. Raises OSError."""
        with self._lock:
            self._control.send_bytes(b"")
            send_handle(self._control, connection.fileno(), self._process.pid)
            return int(self._receive())

    def kill(self, pid: int) -> None:
        """Kill the process of a job, and wait for its end. If the process that forks has ended, do nothing."""
        with self._lock, suppress(OSError):
            self._control.send_bytes(b"%d" % pid)
            self._receive()

    def _receive(self) -> bytes:
        try:
            if self._control.poll(START):
                return self._control.recv_bytes()
        except EOFError as error:
            raise BrokenPipeError("the process that forks has ended") from error
        self._end()
        raise BrokenPipeError("the process that forks does not answer")


def _end(process: "subprocess.Popen[bytes]", control: Connection) -> None:
    control.close()
    process.kill()
    process.wait()


_server: _ForkServer | None = None


@contextmanager
def start_process() -> Iterator[Connection]:
    """Start a process in this context, and yield the connection from which it reads its job; then kill it."""
    ours, theirs = Pipe()
    with ours:
        try:
            with theirs:
                server, pid = _fork(theirs)
        except OSError as error:
            raise HubError(f"no process for the Hub can be started ({error}); try again", "transfer") from error
        try:
            yield ours
        finally:
            server.kill(pid)


def _fork(connection: Connection) -> tuple[_ForkServer, int]:
    global _server
    # A forked copy of this process must not use its connection.
    key = os.getpid(), {name: value for name, value in os.environ.items() if _READ_AT_START.fullmatch(name)}
    if (server := _server) is not None and server.key == key:
        with suppress(OSError):  # It was idle for too long, or was killed.
            return server, server.fork(connection)
    server = _server = _ForkServer(key)
    return server, server.fork(connection)


def serve(number: str, run_job: Callable[[Connection], None]) -> None:
    """Fork and kill processes as the parent asks over a connection, and end with the parent."""
    control, running = Connection(int(number)), 0
    with suppress(EOFError, OSError):
        while running or control.poll(IDLE):
            if message := control.recv_bytes():
                os.kill(int(message), signal.SIGKILL)
                os.waitpid(int(message), 0)
                running -= 1
                control.send_bytes(b"ended")
                continue
            handle = recv_handle(control)
            if (pid := os.fork()) == 0:
                try:
                    control.close()
                    run_job(Connection(handle))
                finally:
                    os._exit(1)
            os.close(handle)
            running += 1
            control.send_bytes(b"%d" % pid)
