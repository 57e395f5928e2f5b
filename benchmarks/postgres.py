"""A PostgreSQL server of one's own, from Debian's package, in a folder that is thrown away."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# Where Debian has the programs that start one; elsewhere they are on the PATH.
_DEBIAN = Path("/usr/lib/postgresql")
# PostgreSQL does not run as root; Debian's package makes this user.
_USER = "postgres"


def programs() -> Path | None:
    """The folder with `initdb` and `postgres`, or None: there is none on this machine."""
    found = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3])) if _DEBIAN.is_dir() else []
    on_path = shutil.which("initdb")
    return found[-1].parent if found else None if on_path is None else Path(on_path).parent


class PostgresServer:
    """One server on a socket in its folder.

    Attributes:
        url: of its only database.
    """

    def __init__(self, folder: Path, bin: Path):
        """Made, not started."""
        self._data, self._bin, self._folder = folder / "data", bin, folder
        self._user = _USER if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://robojax@/postgres?host={folder}"
        self._run("initdb", "--pgdata", str(self._data), "--username", "robojax", "--auth", "trust", "--no-sync")

    def start(self) -> None:
        """Return when it answers."""
        # fsync stays on, its default: a commit that is acknowledged is on the disk.
        flags = ("-D", str(self._data), "-k", str(self._folder), "-c", "listen_addresses=")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._bin / "postgres", *flags], user=self._user, stdout=log, stderr=log)
        until = time.monotonic() + 30
        while self._call("pg_isready", "--host", str(self._folder)).returncode:
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL does not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End the server, at once by default, which cuts off every connection."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, such as SIGSTOP: then it accepts connections and answers nothing."""
        assert self._process is not None, "The server runs."
        parent = psutil.Process(self._process.pid)
        for one in (parent, *parent.children(recursive=True)):
            one.send_signal(number)

    def sql(self, statement: str) -> list[list[str]]:
        """Rows of texts."""
        found = self._run(
            "psql", "--no-psqlrc", "--tuples-only", "--no-align", "--field-separator", "\t", "--command", statement,
            self.url,
        )  # fmt: skip
        return [line.split("\t") for line in found.splitlines() if line]

    def _call(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._bin / program, *arguments], user=self._user, capture_output=True, text=True, check=False, cwd="/"
        )

    def _run(self, program: str, *arguments: str) -> str:
        found = self._call(program, *arguments)
        if found.returncode:
            raise RuntimeError(f"{program}: {found.stderr.strip()}")
        return found.stdout


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """A running one.

    Raises:
        RuntimeError: it cannot be started.
    """
    bin = programs()
    if bin is None:
        raise RuntimeError("no PostgreSQL here; on Debian: apt-get install postgresql")
    # In /tmp, not in TMPDIR: a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="robojax-pg-", dir="/tmp"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, _USER, _USER)
        server = PostgresServer(folder, bin)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
