"""Watchdogs with given times: what they find, and when it ends."""

import numpy as np
import pytest

from service.control.config import SafetySettings
from service.control.watchdog import InputTimes, Watchdog

PERIOD = 0.02


def watchdog(executed: float = 0.4, covered: float = 0.4, frame_age: float = 0.3, **settings: object) -> Watchdog:
    safety = SafetySettings.model_validate(settings)
    made = Watchdog(safety, frame_age=frame_age, executed=executed, covered=covered)
    made.begin(0.0)
    return made


def walk(dog: Watchdog, until: float, at: float = 0.0, **times: object):
    """Look at every tick from ``at`` to ``until``; the findings of the last look."""
    seen = {"observed_at": {}, **times}
    found = None
    for index in range(round((until - at) / PERIOD) + 1):
        found = dog.check(at + index * PERIOD, InputTimes(**seen))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("times", "code", "word"),
    [
        ({"observed_at": {"front": 0.0, "wrist": None}}, "camera_missing", "'wrist'"),
        ({"observed_at": {"front": 0.0}}, "camera_stale", "'front'"),
        ({"lost_rooms": ("s-front",), "observed_at": {"front": 0.0}}, "link_lost", "'s-front'"),
        ({"is_pose_current": False}, "joints_missing", "joints"),
    ],
)
def test_a_robot_that_is_not_seen_is_degraded_after_3_s_and_stopped_after_30(times, code, word) -> None:
    dog = watchdog()
    assert walk(dog, 2.98, **times).blind is None
    found = walk(dog, 3.04, 3.0, **times)
    assert found.blind is not None
    assert found.blind.startswith(f"{code}: ")
    assert word in found.blind
    assert found.stop is None
    assert walk(dog, 30.0, 3.06, **times).stop is None
    stop = walk(dog, 30.06, 30.02, **times).stop
    assert stop is not None
    assert stop.code == code
    assert str(stop).startswith(f"{code}: ")
    assert "limit 30 s" in stop.text


def test_what_comes_back_is_no_blindness_any_more_and_counts_from_anew() -> None:
    dog = watchdog()
    assert walk(dog, 20.0, lost_rooms=("r",)).blind is not None
    assert walk(dog, 20.02, 20.02).blind is None
    assert walk(dog, 22.0, 20.04, lost_rooms=("r",)).blind is None
    assert walk(dog, 50.0, 22.02, lost_rooms=("r",)).stop is None
    dog.begin(100.0)
    found = walk(dog, 102.9, 100.0, observed_at={"front": 1.0}, is_pose_current=False)
    assert (found.blind, found.stop, found.holds) == (None, None, {})


def test_cameras_that_may_be_slow_are_given_more_time() -> None:
    slow, quick = watchdog(frame_age=10.0), watchdog(degraded_after=1, stop_after=2)
    assert (slow.degraded_after, slow.stop_after) == (20.0, 200.0)
    assert (quick.degraded_after, quick.stop_after) == (1, 2)
    with pytest.raises(ValueError, match="degraded_after < stop_after"):
        watchdog(degraded_after=40)


def test_a_process_that_paused_holds_for_one_tick() -> None:
    dog = watchdog()
    walk(dog, 1.0)
    assert "2.00 s" in dog.check(3.0, InputTimes({})).holds["paused"]
    assert dog.check(3.02, InputTimes({})).holds == {}


@pytest.mark.parametrize("frame_age", [0.3, 10.0])
def test_a_blocked_event_loop_holds_after_250_ms_however_old_frames_may_be(frame_age: float) -> None:
    dog = watchdog(frame_age=frame_age)
    walk(dog, 1.0)
    assert dog.check(1.24, InputTimes({})).holds == {}
    assert dog.check(1.5, InputTimes({})).holds.keys() == {"paused"}


def test_a_robot_of_two_ticks_a_second_does_not_pause_between_them() -> None:
    dog = Watchdog(SafetySettings(), frame_age=0.3, executed=2.0, covered=4.0, period=0.5)
    dog.begin(0.0)
    for now in (0.5, 1.0, 1.5):
        assert dog.check(now, InputTimes({})).holds == {}
    assert dog.check(2.3, InputTimes({})).holds.keys() == {"paused"}


def test_a_slow_inference_holds_from_twice_its_budget_on_but_never_while_its_chunk_is_of_use() -> None:
    dog = watchdog(executed=0.4, covered=0.4)
    assert walk(dog, 0.78, requested_at=0.0).holds == {}
    assert list(walk(dog, 0.84, 0.8, requested_at=0.0).holds) == ["inference_slow"]
    assert walk(dog, 0.86, 0.86, requested_at=None).holds == {}
    assert watchdog(executed=0.02, covered=2.0).slow_after == 2.0
    assert watchdog(executed=0.4, covered=0.5, slow_inference=3.0).slow_after == pytest.approx(1.2)


def test_actions_whose_frame_is_too_old_are_not_done_where_a_limit_is_set() -> None:
    assert walk(watchdog(), 60.0, plan_observed_at=0.0).holds == {}
    dog = watchdog(action_age_limit=0.5)
    assert walk(dog, 0.48, plan_observed_at=0.0).holds == {}
    assert list(walk(dog, 0.54, 0.5, plan_observed_at=0.0).holds) == ["action_stale"]


def test_twenty_bad_values_in_a_second_stop_and_slower_ones_never_do() -> None:
    dog = watchdog()
    assert all(dog.note_bad_input({"not_finite": 1}, second / 10) is None for second in range(1000))
    assert dog.count_bad_inputs(99.9) <= 11
    dog.begin(200.0)
    assert all(dog.note_bad_input({"not_finite": 1}, 200 + tick / 50) is None for tick in range(19))
    stop = dog.note_bad_input({"unknown_joint": 1}, 200.4)
    assert stop is not None
    assert stop.code == "bad_input"
    assert "20 joint values" in stop.text
    assert "unknown_joint 1" in stop.text
    assert dog.note_bad_input({"unknown_joint": 1}, 200.41) is None, "it counts from anew"
    assert watchdog(bad_inputs=0).note_bad_input({"malformed": 10_000}, 0.0) is None


def test_the_same_picture_for_two_seconds_is_frozen_until_another_one_comes() -> None:
    dog = watchdog()
    picture = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    for index in range(61):
        dog.note_frame("front", picture.copy(), index / 30)
        assert ("front" in dog.frozen) == (index >= 60)
    assert dog.check(2.0, InputTimes({})).stop is None
    other = picture.copy()
    other[0, 0, 0] ^= 1
    dog.note_frame("front", other, 2.1)
    assert not dog.frozen


def test_a_change_of_one_point_is_found_before_a_camera_is_called_frozen() -> None:
    dog = watchdog()
    picture = np.zeros((480, 640, 3), np.uint8)
    for index in range(300):
        image = picture.copy()
        image[1, 1, 0] = index % 256  # none of the points that are times at first
        dog.note_frame("front", image, index / 30)
        assert not dog.frozen


def test_a_frozen_camera_stops_where_that_is_wanted() -> None:
    dog = watchdog(frozen_stops=True)
    for second in (0.0, 1.0, 2.0):
        dog.note_frame("front", np.zeros((4, 4, 3), np.uint8), second)
    stop = dog.check(2.0, InputTimes({"front": 2.0})).stop
    assert stop is not None
    assert str(stop).startswith("camera_frozen: camera 'front'")


def test_a_pause_is_one_hold_whatever_waited_meanwhile() -> None:
    dog = watchdog()
    walk(dog, 1.0, observed_at={"front": 1.0}, requested_at=0.9)
    # What the camera showed meanwhile comes bit by bit.
    for now, observed_at in ((3.0, 1.0), (3.02, 2.69), (3.04, 2.9)):
        assert dog.check(now, InputTimes({"front": observed_at}, requested_at=0.9)).holds.keys() == {"paused"}
    walk(dog, 3.1, 3.06, observed_at={"front": 3.01}, requested_at=0.9)
    assert dog.check(5.0, InputTimes({"front": 4.99}, requested_at=0.9)).holds.keys() == {"paused"}
    assert dog.check(5.02, InputTimes({"front": 5.0}, requested_at=0.9)).holds == {}


def test_a_camera_that_shows_nothing_after_a_pause_is_stale_by_itself() -> None:
    dog = watchdog()
    walk(dog, 1.0, observed_at={"front": 1.0})
    assert dog.check(3.0, InputTimes({"front": 1.0})).holds.keys() == {"paused"}
    walk(dog, 3.4, 3.02, observed_at={"front": 1.0})
    found = dog.check(3.5, InputTimes({"front": 1.0}))
    assert found.holds == {}
    dog.begin(3.6)
    assert dog.check(3.6, InputTimes({"front": 1.0})).holds == {}


def test_a_frozen_camera_is_a_warning_with_its_code() -> None:
    dog = watchdog()
    for second in (0.0, 1.0, 2.0):
        dog.note_frame("front", np.zeros((4, 4, 3), np.uint8), second)
    assert dog.get_warnings(2.5) == {"camera_frozen": "camera 'front' for 2.5 s: the same picture"}
    dog.note_frame("front", np.ones((4, 4, 3), np.uint8), 2.6)
    assert dog.get_warnings(2.7) == {}
