"""The checker finds what it is there to find: each claim broken in a history that else is right."""

import pytest

from tests.faults.history import Call, History, Look
from tests.faults.meter import Meter
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
        seen_at = 100.5 + number // 10 * 10 * PERIOD
        action(history, seen_at, number % 10, seen_at + number % 10 * PERIOD)
    history.calls.append(Call("POST", "/sessions/arm/stop", 101.45, 101.46, 200, {}))
    history.heard(history.pose.at(101.4), 101.455)
    return history


def action(history: History, seen_at: float, index: int, at: float) -> None:
    pose = history.pose.at(seen_at)
    history.heard({joint: pose[joint] + (index + 1) * STEP for joint in JOINTS}, at)


def test_what_is_right_has_no_violations() -> None:
    assert good().violations({"arm"}) == []


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
    action(history, 100.9, 0, 101.3)


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


def test_an_action_that_the_machine_kept_back_is_no_violation_and_one_later_than_that_is():
    for kept_back, found in ((0.35, []), (0.25, ["3"])):
        history = good()
        history.late = lambda since, until, ways, late=kept_back: late if since == 100.9 and ways == 2 else 0.0
        does_what_expired(history)
        assert [violation[0] for violation in history.violations({"arm"})] == found


def test_what_processes_waited_for_a_core_counts_in_its_own_time_and_a_second_of_it_at_most(monkeypatch):
    monkeypatch.setattr("tests.faults.meter.stolen_seconds", lambda: 0.0)
    meter, waits = Meter(), {100.1: 0.3, 101.0: 0.4, 101.5: 0.1}
    total = 0.0
    for at in (round(99 + number / 20, 2) for number in range(60)):
        total += waits.get(at, 0.0)
        meter.waited.append((at, total))
    assert meter.worst(100.0, 100.1) == pytest.approx(0.3)
    assert meter.worst(100.1, 100.9) == 0.0
    assert meter.worst(100.1, 101.0) == pytest.approx(0.4)
    assert meter.worst(99.0) == pytest.approx(0.7)


def test_all_pauses_are_lost_time_and_the_long_ones_are_counted(monkeypatch):
    stolen = [0.0]
    monkeypatch.setattr("tests.faults.meter.stolen_seconds", lambda: stolen[0])
    meter = Meter()
    meter._late.extend([(100.0, 0.25), (101.0, 0.004), (102.0, 0.5)])
    meter.waited.append((100.5, 1.0))
    meter.waited.append((101.5, 1.1))
    assert meter.lost(100.5) == pytest.approx(0.5 + 0.1)
    assert meter.lost(0.0) == pytest.approx(0.75 + 1.1)
    assert (meter.pauses(0.0), meter.pauses(101.2)) == (3, 1)
    stolen[0] = 0.3  # since the look before, which was a moment ago
    assert meter.pauses(101.2) == 2
    assert meter.lost(101.5) == pytest.approx(0.5 + 0.3)


def test_a_status_asked_for_before_a_break_and_heard_after_it_says_nothing_about_what_follows() -> None:
    history = good()
    history.breaks.append(102.0)
    history.statuses += [Look(101.95, 102.05, "stopped"), Look(102.1, 102.11, "interrupted")]
    assert history.violations({"arm"}) == []
    history.breaks.clear()
    assert len(history.violations({"arm"})) == 1
