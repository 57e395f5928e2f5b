"""Child processes end with their parent, and the end of their error output is kept."""

import subprocess
import sys
from pathlib import Path

import pytest

from service import processes
from service.processes import ChildDied, child
from tests.testing.waiting import lives, wait_until

SLEEPER = "import time\nprint('up')\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose modules child processes can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def test_output_lines_arrive_until_the_child_ends(modules: Path):
    (modules / "counter.py").write_text("import sys\nfor number in sys.argv[1:]: print('line', number)\n")
    async with child("a counter", "counter", "1", "2") as running:
        assert [await running.next_line() for _ in range(3)] == ["line 1", "line 2", None]
        assert not running.is_alive


async def test_failed_child_is_reported_with_code_and_last_output(modules: Path):
    (modules / "dying.py").write_text("import sys\nsys.exit('the port is taken')\n")
    async with child("the server", "dying") as running:
        assert await running.next_line() is None
        with pytest.raises(ChildDied, match=r"the server ended with code 1\nthe port is taken"):
            running.check()


async def test_child_ends_with_its_context(modules: Path):
    (modules / "sleeper.py").write_text(SLEEPER)
    started = []

    async def fail() -> None:
        async with child("a sleeper", "sleeper") as running:
            started.append(running)
            assert await running.next_line() == "up"
            running.check()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not started[0].is_alive


async def test_child_that_ignores_sigterm_is_killed(modules: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "TERMINATE_TIMEOUT", 0.3)
    (modules / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)\n"
    )
    async with child("a mule", "stubborn") as running:
        await running.next_line()
        await running.end()
        with pytest.raises(ChildDied, match="a mule ended with code -9"):
            running.check()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child when its parent was killed")
def test_child_does_not_outlive_a_killed_parent(modules: Path):
    (modules / "sleeper.py").write_text("import os, time\nprint(os.getpid())\ntime.sleep(60)\n")
    (modules / "parent.py").write_text(
        "import asyncio\n"
        "from service.processes import child\n"
        "async def main():\n"
        "    async with child('a sleeper', 'sleeper') as running:\n"
        "        print(await running.next_line(), flush=True)\n"
        "        await running.next_line()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-m", "parent"], stdout=subprocess.PIPE, text=True) as parent:
        orphan = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not lives(orphan))
