"""The console command, as a process or in the process of the tests; it never shows a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import huggingface_hub.constants  # noqa: F401 - it reads HF_HUB_OFFLINE at import
import pytest

from robojax.cli.app import main
from tests.testing.compiling import QUICK
from tests.testing.pauses import Pauses

Run = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROBOJAX_")}
    return kept | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def robojax(environment, tmp_path) -> Run:
    def run(*arguments: str, timeout: float = 110, **more: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "robojax.cli", *arguments],
            env=environment | QUICK | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture
def call(environment, tmp_path, monkeypatch, capsys) -> Run:
    """Run a command as ``robojax`` does, but faster, in this process."""
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["robojax", *arguments])
            for name, value in more.items():
                patched.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        result = capsys.readouterr()
        assert "Traceback" not in result.err
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(arguments, ended.value.code, result.out, result.err)

    return run


@pytest.fixture
def serve(environment, tmp_path) -> Started:
    """A server process and its URL, read from the line it prints."""

    @contextmanager
    def start(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "robojax.cli", "serve", "--port", "0", *arguments],
            env=environment | QUICK,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, (line, process.communicate(timeout=60))
            yield process, next(word for word in line.split() if word.startswith("http://"))
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    return start


def end(process: subprocess.Popen[str], pauses: Pauses) -> None:
    """End a server with SIGTERM: it exits with 0 within 5 s."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert pauses.running(began) < 5
