"""Fixtures: servers that are closed after the test, requests to them, and scripts as separate processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from hooks.server import lifecycle, serving
from hooks.server.server import WebhooksServer

SWITCHES = (
    *(lifecycle.SECRET, lifecycle.DATABASE, serving.HOST, serving.PORT, lifecycle.AUTOSTART),
    *("SPACE_ID", "SPACE_HOST", "PYTHONPATH"),
)


def ask(url: str, payload: object = None, **headers: str) -> httpx2.Response:
    """Send a GET, or the payload as a POST of JSON."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    method = "GET" if payload is None else "POST"
    return httpx2.request(method, url, json=payload, headers=named, timeout=60, trust_env=False)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make() -> Iterator[Callable[..., WebhooksServer]]:
    """Make a server on a free port, which is closed after the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(
            closing(WebhooksServer(*arguments, **{"port": 0, **options}))
        )


Script = Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in SWITCHES and not name.startswith("PYTEST")
    }
    return inherited | {serving.PORT: "0", "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def script(tmp_path: Path, environment: dict[str, str]) -> Script:
    """Start a script as a process; the context gives the process and its URL."""

    @contextmanager
    def start(text: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        (tmp_path / "app.py").write_text(text)
        process = subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=tmp_path,
            env=environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            output = []
            for line in process.stdout:
                output.append(line)
                if line.startswith("Go to "):
                    break
            else:
                raise AssertionError(f"the script did not serve: {output} {process.communicate(timeout=60)[1]}")
            yield process, next(line.split()[-1] for line in output if line.startswith("Running on local URL"))
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    return start


def end(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[int, str]:
    """Send the signal; return the exit code and the text of standard error."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors
