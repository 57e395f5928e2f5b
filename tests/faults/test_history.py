"""The checker finds what it is there to find: each claim broken in a history that else is right."""

import pytest

from tests.faults.history import Call, History, Look
from tests.faults.robot import JOINTS, PERIOD, STILL
from tests.faults.script import STEP

LATER = 20 * PERIOD


def good() -> History:
    """A session that was made, moved for a second, and was stopped."""
    history = History("arm")
    history.pose.began_at = 100.0
    history.calls.append(Call("POST", "/sessions", 100.0, 100.1, 200, {}))
    history.statuses += [
        Look(100.19, 100.2, "ready"),
        Look(100.39, 100.4, "running"),
        Look(101.49, 101.5, "stopped"),
    ]
    history.calls.append(Call("POST", "/sessions/arm/start", 100.3, 100.35, 200, {}))
    for number in range(50):
        observed_at = 100.5 + number // 10 * 10 * PERIOD
        action(history, observed_at, number % 10, observed_at + number % 10 * PERIOD)
    history.calls.append(Call("POST", "/sessions/arm/stop", 101.45, 101.46, 200, {}))
    history.heard(history.pose.at(101.4), 101.455)
    return history


def action(history: History, observed_at: float, index: int, at: float) -> None:
    pose = history.pose.at(observed_at)
    history.heard({joint: pose[joint] + (index + 1) * STEP for joint in JOINTS}, at)


def test_what_is_right_has_no_violations() -> None:
    assert good().violations({"arm"}) == []


def test_a_plan_after_a_rest_is_timed_from_its_first_action() -> None:
    history = good()
    history.calls.append(Call("POST", "/sessions/arm/start", 101.6, 101.65, 200, {}))
    for number in range(10):
        action(history, 101.7, number, 102.4 + number * PERIOD)
    assert history.violations({"arm"}) == []
    action(history, 101.7, 0, 102.4 + 10 * PERIOD)
    assert [found[0] for found in history.violations({"arm"})] == ["3"]


def moves_after_its_stop(history: History) -> None:
    action(history, 101.6, 0, 101.6)


def leaves_the_range(history: History) -> None:
    history.heard({"Jaw": -1.0}, 101.3)


def sends_what_is_no_number(history: History) -> None:
    history.heard({"Jaw": float("nan")}, 101.3)


def jumps(history: History) -> None:
    history.step = 1.0
    history.heard({**STILL, "Elbow": 45.0}, 101.3)


def does_what_expired(history: History) -> None:
    hold = history.commands.pop()
    action(history, 100.9, 0, 101.3)
    history.commands.append(hold)


def runs_by_itself(history: History) -> None:
    history.statuses += [Look(101.99, 102.0, "running")]


def is_lost(history: History) -> None:
    history.session_id = "another"


@pytest.mark.parametrize(
    ("breaks", "claim"),
    [
        (moves_after_its_stop, "1"),
        (leaves_the_range, "2"),
        (sends_what_is_no_number, "2"),
        (jumps, "2"),
        (does_what_expired, "3"),
        (runs_by_itself, "4"),
        (is_lost, "5"),
    ],
)
def test_what_is_wrong_is_found(breaks, claim: str) -> None:
    history = good()
    breaks(history)
    assert any(found.startswith(claim) for found in history.violations({"arm"})), history.violations({"arm"})
