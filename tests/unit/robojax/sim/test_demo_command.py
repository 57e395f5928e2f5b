"""``robojax demo`` as a person runs it: the real server and the real arm as processes."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from robojax.cli.sim import app
from tests.testing.pauses import Pauses

pytestmark = pytest.mark.usefixtures("can_draw")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "robojax.cli", "demo", "--headless", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_an_episode_goes_through_the_whole_stack_and_is_counted(pauses: Pauses) -> None:
    began = time.monotonic()
    ended = demo("--episodes", "1", "--require", "0")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"cube +1 \(seed 5000\): (lifted|missed)", ended.stdout), ended.stdout
    assert "of 1 cubes lifted" in ended.stdout
    url = re.search(r"server: (http://127.0.0.1:\d+)", ended.stdout)
    assert url is not None
    assert f"curl -X POST {url[1]}/sessions " in ended.stdout
    commands = re.search(r"commands: (\d+) sent", ended.stdout)
    assert commands is not None
    assert int(commands[1]) >= 100, "110 ticks were driven by the policy"
    shown = re.search(r"camera fps: front ([\d.]+)", ended.stdout)
    assert shown is not None
    # 20 to 30, of the newest 32 pictures; for each of them the machine may have stood still.
    assert 32 / (32 / 20 + pauses.lost(began)) <= float(shown[1]) < 30


@pytest.mark.parametrize(
    ("arguments", "lifted", "wanted"),
    [
        (("--episodes", "1", "--require", "2"), 1, 2),
        (("--episodes", "1", "--require", "1"), 1, None),
        ((), 15, 16),
        ((), 16, None),
    ],
)
def test_too_few_cubes_are_a_failure(
    arguments: tuple[str, ...], lifted: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watched(*_: object) -> int:
        return lifted

    monkeypatch.setattr("robojax.cli.sim._run_demo", watched)
    ended = CliRunner().invoke(app, ["--headless", *arguments])
    assert ended.exit_code == (0 if wanted is None else 1)
    assert ended.stderr == ("" if wanted is None else f"fewer than the {wanted} cubes wanted\n")


def test_a_policy_that_cannot_be_loaded_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    ended = demo("--episodes", "1", "--policy", str(tmp_path))
    assert ended.returncode == 4
    assert "the server refused the policy with 422" in ended.stderr
    assert "wanted a folder as LeRobot's save_pretrained writes it" in ended.stderr
    assert "Traceback" not in ended.stderr
