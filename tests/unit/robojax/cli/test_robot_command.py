"""``robojax robot`` on the command line: its messages and exit codes."""

import json
import sys

import pytest

from tests.unit.robojax.cli.conftest import Run

SIMULATED = ("--robot.type=simulated", "--server=http://127.0.0.1:9")
CAMERA = "--robot.cameras={front: {type: simulated, width: 64, height: 48, fps: 20}}"


@pytest.mark.usefixtures("even_cameras")
def test_check_shows_each_line_despite_missing_flags(call: Run) -> None:
    done = call("robot", "--check", "--json", "--robot.type=so101_follower", "--server=http://127.0.0.1:9", CAMERA)
    assert done.returncode == 1, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)}
    levels = {name: each["level"] for name, each in found.items()}
    lines = {"fail": ("port", "id", "server", "units"), "ok": ("camera front",), "warn": ("policy", "joints", "rate")}
    assert levels == {name: level for level, names in lines.items() for name in names}
    assert all(each["fix"] for name, each in found.items() if levels[name] != "ok")


def test_missing_simulator_names_the_packages_to_install(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mujoco", "robojax.sim.servos", "robojax.sim.arm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    done = call("robot", *SIMULATED, "--policy.path=x")
    assert done.returncode == 2, done.stderr
    assert "mujoco is not installed" in done.stderr
    assert "pip install -e '.[sim]'" in done.stderr


def test_missing_lerobot_names_the_package_to_install(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    done = call("robot", "--lerobot", "--robot.type=koch_follower", "--robot.more=1", "--policy.path=x")
    assert done.returncode == 2, done.stderr
    assert "lerobot" in done.stderr
    assert "pip install 'lerobot" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "messages"),
    [
        (("--policy.path=x",), 2, ["--robot.type is None", "unit of the joints is not known", "stats.json"]),
        (SIMULATED, 2, ["neither --policy.path nor --session is given"]),
        ((*SIMULATED, "--robot.more=1", "--session=arm"), 2, ["--robot.more=1", "needs --lerobot"]),
        ((*SIMULATED, "--sesion=arm"), 2, ["--sesion=arm"]),
        (("--lerobot", "--robot.type=x", "--limit=elbow", "--session=arm"), 2, ["--limit is 'elbow'", "LOW:HIGH"]),
        ((*SIMULATED, CAMERA, "--session=arm"), 4, ["no robojax server answers", "robojax serve"]),
    ],
    ids=["no robot", "no session", "LeRobot's flag", "misspelt", "no limit", "no server"],
)
def test_missing_flags_are_named_with_advice(
    call: Run, arguments: tuple[str, ...], code: int, messages: list[str]
) -> None:
    done = call("robot", *arguments)
    assert done.returncode == code, done.stderr
    assert all(text in done.stderr for text in messages), done.stderr
