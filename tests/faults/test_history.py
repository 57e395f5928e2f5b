"""The history checker finds each broken claim in an otherwise valid history."""

from collections.abc import Callable

import pytest

from tests.faults.history import Call, History, Look
from tests.faults.robot import JOINTS, PERIOD, STILL
from tests.faults.script import STEP


def good() -> History:
    """Return the history of a session that was created, moved for a second, and was stopped."""
    history = History("arm")
    history.pose.began_at = 100.0
    history.calls.append(Call("POST", "/sessions", 100.0, 100.1, 200, {}))
    history.statuses += [Look(100.19, 100.2, "ready"), Look(100.39, 100.4, "running"), Look(101.49, 101.5, "stopped")]
    history.calls.append(Call("POST", "/sessions/arm/start", 100.3, 100.35, 200, {}))
    for number in range(50):
        observed_at = 100.5 + number // 10 * 10 * PERIOD
        action(history, observed_at, number % 10, observed_at + number % 10 * PERIOD)
    history.calls.append(Call("POST", "/sessions/arm/stop", 101.45, 101.46, 200, {}))
    history.record_command(history.pose.at(101.4), 101.455)
    return history


def action(history: History, observed_at: float, index: int, at: float) -> None:
    pose = history.pose.at(observed_at)
    history.record_command({joint: pose[joint] + (index + 1) * STEP for joint in JOINTS}, at)


def test_chunk_after_a_rest_is_timed_from_its_first_action() -> None:
    history = good()
    assert history.violations({"arm"}) == []
    history.calls.append(Call("POST", "/sessions/arm/start", 101.6, 101.65, 200, {}))
    for number in range(10):
        action(history, 101.7, number, 102.4 + number * PERIOD)
    assert history.violations({"arm"}) == []
    action(history, 101.7, 0, 102.4 + 10 * PERIOD)
    assert [found[0] for found in history.violations({"arm"})] == ["3"]


def test_hold_after_a_jump_keeps_the_jaw_and_is_no_motion() -> None:
    history = good()
    hold = history.commands.pop()
    history.step = 2.0
    jumped = {joint: value + 2.0 for joint, value in history.targets()[-1][1].items()}
    history.record_command(jumped, 101.44)
    history.record_command({**hold.values, "Jaw": jumped["Jaw"]}, 101.455)
    assert history.violations({"arm"}) == []
    history.record_command({"Jaw": jumped["Jaw"] + 1.0}, 101.6)
    assert [found[0] for found in history.violations({"arm"})] == ["1"]


def do_an_expired_action(history: History) -> None:
    hold = history.commands.pop()
    action(history, 100.9, 0, 101.3)
    history.commands.append(hold)


def jump(history: History) -> None:
    history.step = 1.0
    history.record_command({**STILL, "Elbow": 45.0}, 101.3)


@pytest.mark.parametrize(
    ("break_rule", "claim"),
    [
        (lambda history: action(history, 101.6, 0, 101.6), "1"),
        (lambda history: history.record_command({"Jaw": -1.0}, 101.3), "2"),
        (lambda history: history.record_command({"Jaw": float("nan")}, 101.3), "2"),
        (jump, "2"),
        (do_an_expired_action, "3"),
        (lambda history: history.statuses.append(Look(101.99, 102.0, "running")), "4"),
        (lambda history: setattr(history, "session_id", "another"), "5"),
    ],
)
def test_each_violation_is_found(break_rule: Callable[[History], object], claim: str) -> None:
    history = good()
    break_rule(history)
    assert any(found.startswith(claim) for found in history.violations({"arm"})), history.violations({"arm"})
