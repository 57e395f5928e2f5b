"""``robojax robot`` from the command line: what it says, and with which exit code."""

import json
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from robojax.cli.robot import robot

SIMULATED = ("--robot.type=simulated", "--server=http://127.0.0.1:9")
CAMERA = "--robot.cameras={front: {type: simulated, width: 64, height: 48, fps: 20}}"


def robojax(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(robot)
    return CliRunner().invoke(app, arguments)


@pytest.mark.usefixtures("even_cameras")
def test_a_check_shows_every_line_although_flags_are_missing() -> None:
    done = robojax("--check", "--json", "--robot.type=so101_follower", "--server=http://127.0.0.1:9", CAMERA)
    assert done.exit_code == 1, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)}
    levels = {name: each["level"] for name, each in found.items()}
    assert levels == dict.fromkeys(("port", "id", "server", "units"), "fail") | {"camera front": "ok"} | dict.fromkeys(
        ("policy", "joints", "rate"), "warn"
    )
    assert all(each["fix"] for name, each in found.items() if levels[name] != "ok")


def test_a_simulated_arm_without_its_simulator_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mujoco", "robojax.sim.servos", "robojax.sim.arm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    done = robojax(*SIMULATED, "--policy.path=x")
    assert done.exit_code == 2, done.stderr
    assert "mujoco is not installed" in done.stderr
    assert "pip install -e '.[sim]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--policy.path=x",), 2, ["--robot.type is None", "unit of the joints is not known", "stats.json"]),
        (SIMULATED, 2, ["neither --policy.path nor --session is given"]),
        ((*SIMULATED, CAMERA, "--session=arm"), 4, ["no robojax server answers", "robojax serve"]),
    ],
    ids=["no robot", "no session", "no server"],
)
def test_what_cannot_be_is_said_with_what_to_do(arguments: tuple[str, ...], code: int, said: list[str]) -> None:
    done = robojax(*arguments)
    assert done.exit_code == code, done.stderr
    assert all(text in done.stderr for text in said), done.stderr
    assert "Traceback" not in done.stderr
