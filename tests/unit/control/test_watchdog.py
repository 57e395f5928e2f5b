"""Watchdog with explicit times: conditions that it reports and the end of each condition."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from service.control.config import SafetySettings
from service.control.joints import SO100, Joint, JointTable
from service.control.units import StateUnits
from service.control.watchdog import InputTimes, JointMotion, Watchdog, WatchdogReport

PERIOD = 0.02


def watchdog(executed: float = 0.4, covered: float = 0.4, frame_age: float = 0.3, **settings: object) -> Watchdog:
    safety = SafetySettings.model_validate(settings)
    made = Watchdog(safety, frame_age=frame_age, executed=executed, covered=covered)
    made.begin(0.0)
    return made


def walk(dog: Watchdog, until: float, at: float = 0.0, **times: object):
    """Check every tick from ``at`` to ``until`` and return the last report."""
    seen = {"observed_at": {}, **times}
    found = None
    for index in range(round((until - at) / PERIOD) + 1):
        found = dog.check(at + index * PERIOD, InputTimes(**seen))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("times", "code", "name"),
    [
        ({"observed_at": {"front": 0.0, "wrist": None}}, "camera_missing", "'wrist'"),
        ({"observed_at": {"front": 0.0}}, "camera_stale", "'front'"),
        ({"lost_rooms": ("s-front",), "observed_at": {"front": 0.0}}, "link_lost", "'s-front'"),
        ({"is_pose_current": False}, "joints_missing", "joints"),
    ],
)
def test_an_unseen_robot_is_degraded_after_3_s_and_stopped_after_30(times, code, name) -> None:
    dog = watchdog()
    assert walk(dog, 2.98, **times).blind is None
    found = walk(dog, 3.04, 3.0, **times)
    assert found.blind.startswith(f"{code}: ")
    assert name in found.blind
    assert found.stop is None
    assert walk(dog, 30.0, 3.06, **times).stop is None
    stop = walk(dog, 30.06, 30.02, **times).stop
    assert (stop.code, "limit 30 s" in stop.text) == (code, True)
    assert str(stop).startswith(f"{code}: ")


def test_a_recovered_input_ends_blindness_and_restarts_its_time() -> None:
    dog = watchdog()
    assert walk(dog, 20.0, lost_rooms=("r",)).blind is not None
    assert walk(dog, 20.02, 20.02).blind is None
    assert walk(dog, 22.0, 20.04, lost_rooms=("r",)).blind is None
    assert walk(dog, 50.0, 22.02, lost_rooms=("r",)).stop is None
    dog.begin(100.0)
    found = walk(dog, 102.9, 100.0, observed_at={"front": 1.0}, is_pose_current=False)
    assert (found.blind, found.stop, found.holds) == (None, None, {})


def test_slow_cameras_get_more_time() -> None:
    slow, quick = watchdog(frame_age=10.0), watchdog(degraded_after=1, stop_after=2)
    assert (slow.degraded_after, slow.stop_after) == (20.0, 200.0)
    assert (quick.degraded_after, quick.stop_after) == (1, 2)
    with pytest.raises(ValueError, match="degraded_after < stop_after"):
        watchdog(degraded_after=40)


@pytest.mark.parametrize("frame_age", [0.3, 10.0])
def test_a_process_that_paused_for_250_ms_holds_for_one_tick(frame_age: float) -> None:
    dog = watchdog(frame_age=frame_age)
    walk(dog, 1.0)
    assert dog.check(1.24, InputTimes({})).holds == {}
    assert dog.check(1.5, InputTimes({})).holds.keys() == {"paused"}
    assert "2.00 s" in dog.check(3.5, InputTimes({})).holds["paused"]
    assert dog.check(3.52, InputTimes({})).holds == {}


def test_a_robot_at_two_ticks_per_second_does_not_pause_between_ticks() -> None:
    dog = Watchdog(SafetySettings(), frame_age=0.3, executed=2.0, covered=4.0, period=0.5)
    dog.begin(0.0)
    holds = [list(dog.check(now, InputTimes({})).holds) for now in (0.5, 1.0, 1.5, 2.3)]
    assert holds == [[], [], [], ["paused"]]


def test_slow_inferences_and_old_actions_hold_beyond_their_limits() -> None:
    dog = watchdog(executed=0.4, covered=0.4)
    assert walk(dog, 0.78, requested_at=0.0).holds == {}
    assert list(walk(dog, 0.84, 0.8, requested_at=0.0).holds) == ["inference_slow"]
    assert walk(dog, 0.86, 0.86, requested_at=None).holds == {}
    assert watchdog(executed=0.02, covered=2.0).slow_after == 2.0
    assert watchdog(executed=0.4, covered=0.5, slow_inference=3.0).slow_after == pytest.approx(1.2)
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
    assert stop.code == "bad_input"
    assert "20 joint values" in stop.text
    assert "unknown_joint 1" in stop.text
    assert dog.note_bad_input({"unknown_joint": 1}, 200.41) is None, "the count restarts after a stop"
    assert watchdog(bad_inputs=0).note_bad_input({"malformed": 10_000}, 0.0) is None


def test_the_same_picture_for_two_seconds_is_a_frozen_camera() -> None:
    dog = watchdog()
    picture = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    for index in range(61):
        dog.note_frame("front", picture.copy(), index / 30)
        assert ("front" in dog.frozen) == (index >= 60)
    assert dog.check(2.0, InputTimes({})).stop is None
    text = dog.get_warnings(2.5)["camera_frozen"]
    assert text.startswith("camera 'front' for 2.5 s: the same picture. ")
    assert "--frozen warn" in text
    assert dog.get_warnings(4.1) == {}, "a camera that sends nothing is absent, not frozen"
    dog.note_frame("front", picture, 4.2)
    assert list(dog.get_warnings(4.3)) == ["camera_frozen"]
    picture[0, 0, 0] ^= 1
    dog.note_frame("front", picture, 4.4)
    assert not dog.frozen
    assert dog.get_warnings(4.5) == {}


def test_a_change_of_one_pixel_prevents_a_frozen_camera() -> None:
    dog = watchdog()
    picture = np.zeros((480, 640, 3), np.uint8)
    for index in range(300):
        image = picture.copy()
        image[1, 1, 0] = index % 256  # The quick first comparison does not read this pixel.
        dog.note_frame("front", image, index / 30)
        assert not dog.frozen


@pytest.mark.parametrize("frozen", ["warn", "hold", "stop"])
def test_a_frozen_camera_warns_holds_or_stops_as_set(frozen: str) -> None:
    dog = watchdog(frozen=frozen)
    for tick in range(101):
        report = dog.check(tick * PERIOD, InputTimes({"front": tick * PERIOD}))
        assert report == WatchdogReport()
        dog.note_frame("front", np.zeros((4, 4, 3), np.uint8), tick * PERIOD)
    report = dog.check(2.02, InputTimes({"front": 2.0}))
    assert list(report.holds) == (["camera_frozen"] if frozen == "hold" else [])
    assert str(report.stop).startswith("camera_frozen: camera 'front'" if frozen == "stop" else "None")
    assert list(dog.get_warnings(2.02)) == ["camera_frozen"]
    dog.note_frame("front", np.ones((4, 4, 3), np.uint8), 2.04)
    assert dog.check(2.06, InputTimes({"front": 2.04})) == WatchdogReport()


POSE = np.array([0, -40, 40, 10, 0, 30.0])
NAMES = tuple(joint.name for joint in SO100)
GRIPPERS = JointTable(SO100).grippers
SPANS = np.array([200.0] * 5 + [100])
PERCENT = {"min": (-33, -46, -76, 59, -26, 17), "max": (37, 37, 47, 100, 23, 63)}


@dataclass
class WatchedRobot:
    """Robot under a watchdog, with functions of time for its commands and its measured pose."""

    commanded: Callable[[float], np.ndarray]
    measured: Callable[[float], np.ndarray]
    spans: np.ndarray = field(default_factory=lambda: SPANS)
    frozen: str = "hold"
    statistics: Mapping[str, Sequence[float]] | None = None
    is_accepted: bool = False
    now: float = 0.0

    def __post_init__(self) -> None:
        ranges = [(0.0, span) if np.isfinite(span) else (-np.inf, np.inf) for span in self.spans]
        table = JointTable([Joint(name, index, *ranges[index]) for index, name in enumerate(NAMES)])
        joints = JointMotion(table, np.full(6, np.inf))
        safety = SafetySettings.model_validate({"frozen": self.frozen})
        self.dog = Watchdog(safety, frame_age=0.3, executed=0.4, covered=0.4, joints=joints)
        self.dog.begin(0.0)
        self.units = StateUnits(NAMES, self.statistics, is_accepted=self.is_accepted, grippers=GRIPPERS)

    def run(self, until: float, *, is_moving: bool = True) -> WatchdogReport:
        """Check every tick and return the first report with a hold or a stop, or else the last report."""
        report = WatchdogReport()
        while self.now < until:
            self.now = round(self.now + PERIOD, 3)
            command = self.commanded(self.now) if is_moving else None
            times = InputTimes({}, pose=self.measured(self.now), command=command, units=self.units)
            report = self.dog.check(self.now, times)
            if report.holds or report.stop:
                break
        return report


def still(now: float) -> np.ndarray:
    return POSE


def swing(now: float, by: float = 20.0, joint: int = 1) -> np.ndarray:
    return POSE + by * np.sin(now) * (np.arange(6) == joint)


def flicker(now: float) -> np.ndarray:
    return POSE + 0.05 * (round(now / PERIOD) % 2)


def late(now: float) -> np.ndarray:
    return POSE + 0.3 * (swing(max(now - 0.3, 0.0)) - POSE)


@pytest.mark.parametrize("measured", [still, flicker], ids=["constant pose", "noise without power"])
@pytest.mark.parametrize("spans", [SPANS, np.full(6, np.inf)], ids=["known ranges", "unknown ranges"])
def test_joints_that_do_not_change_while_commands_move_them_hold(measured, spans) -> None:
    robot = WatchedRobot(swing, measured, spans)
    report = robot.run(5.0)
    assert list(report.holds) == ["joints_frozen"]
    assert 2.0 < robot.now < 2.8
    text = report.holds["joints_frozen"]
    assert "the commands of 'Pitch' moved by" in text
    assert re.search(r"measured -(40|39\.95)\)", text)
    assert robot.dog.is_pose_doubted


@pytest.mark.parametrize(
    ("commanded", "measured"),
    [
        (swing, swing),
        (swing, late),
        (still, still),
        (lambda now: swing(5 * now, by=1.5), still),  # The policy dithers around its goal.
        (lambda now: POSE + 20, lambda now: POSE + min(now, 1.0)),  # A load keeps the arm off its goal.
        (lambda now: swing(now, by=50, joint=5), still),  # The jaw holds an object.
        (
            lambda now: swing(now) if now < 3 else swing(3.0),
            lambda now: swing(min(now, 3.0)),
        ),  # The arm arrives.
    ],
    ids=["follows", "follows late", "rests", "dithers", "loaded", "grips", "arrives"],
)
def test_joints_of_a_robot_at_its_goal_are_not_frozen(commanded, measured) -> None:
    robot = WatchedRobot(commanded, measured)
    assert robot.run(60.0) == WatchdogReport()
    assert robot.dog.get_warnings(60.0) == {}


def test_dithering_and_held_joints_are_not_frozen() -> None:
    table = JointTable([Joint(name, index) for index, name in enumerate(NAMES)])
    robot = WatchedRobot(lambda now: swing(5 * now, by=0.4), still)
    robot.dog.joints = JointMotion(table, np.array([120.0, 2, 120, 60, 60, 100]))
    assert robot.run(20.0) == WatchdogReport()
    robot = WatchedRobot(swing, still)
    robot.run(1.0)
    assert robot.run(10.0, is_moving=False) == WatchdogReport()


def test_a_hold_for_frozen_joints_ends_when_a_joint_changes() -> None:
    robot = WatchedRobot(swing, still)
    assert list(robot.run(5.0).holds) == ["joints_frozen"]
    held = robot.now
    assert list(robot.run(held + 60, is_moving=False).holds) == ["joints_frozen"]
    robot.measured = lambda now: POSE + 0.05
    robot.now += 0.2
    assert robot.run(robot.now + 1, is_moving=False).holds == {}
    assert not robot.dog.is_pose_doubted
    robot.dog.begin(robot.now)
    assert robot.dog.get_warnings(robot.now) == {}


def test_noise_does_not_end_the_hold_of_an_arm_without_power() -> None:
    robot = WatchedRobot(swing, flicker)
    assert list(robot.run(5.0).holds) == ["joints_frozen"]
    for _ in range(500):
        assert list(robot.run(robot.now + 1, is_moving=False).holds) == ["joints_frozen"]
    robot.measured = lambda now: POSE + 0.5
    robot.now += 0.2
    assert robot.run(robot.now + 1, is_moving=False).holds == {}


@pytest.mark.parametrize("frozen", ["warn", "stop"])
def test_frozen_joints_warn_or_stop_as_set(frozen: str) -> None:
    robot = WatchedRobot(swing, still, frozen=frozen)
    report = robot.run(5.0)
    assert report.holds == {}
    assert (report.stop and report.stop.code) == ("joints_frozen" if frozen == "stop" else None)
    assert list(robot.dog.get_warnings(5.0)) == ["joints_frozen"]
    assert robot.dog.is_pose_doubted is (frozen == "stop")


def radians(now: float) -> np.ndarray:
    return np.append(np.deg2rad(swing(now)[:5]), 30.0)


def small_waves(now: float) -> np.ndarray:
    return np.full(6, 0.01 * np.sin(now * 25 / 9))


def share_of_jaw(now: float) -> np.ndarray:
    return np.append(swing(now, by=20)[:5], (30 + 25 * np.sin(now)) / 100)


def both(now: float) -> np.ndarray:
    return swing(now) + swing(now, by=25, joint=5) - POSE


@pytest.mark.parametrize(
    ("commanded", "measured", "words"),
    [
        (swing, radians, r"joint '\w+' moved by .* as with radians"),
        (swing, small_waves, "as with radians"),
        (both, share_of_jaw, "joint 'Jaw' moved by .* as with a gripper in 0..1"),
    ],
)
def test_motion_too_small_for_the_commands_is_another_unit(commanded, measured, words: str) -> None:
    robot = WatchedRobot(commanded, measured, statistics=PERCENT, frozen="warn")
    report = robot.run(5.0)
    assert list(report.holds) == ["joints_units"], "the hold does not depend on --frozen"
    assert robot.now < 2.5
    assert re.search(words, report.holds["joints_units"])
    assert "the checkpoint's statistics are min" in report.holds["joints_units"]
    accepted = WatchedRobot(commanded, measured, statistics=PERCENT, is_accepted=True, frozen="warn")
    assert accepted.run(10.0).holds == {}
    robot.units = accepted.units
    robot.now += 0.2
    assert robot.run(robot.now + 0.2).holds == {}, "the session continues when it accepts the units"


@pytest.mark.parametrize(
    ("commanded", "measured", "joint", "right_joint"),
    [(both, share_of_jaw, 5, 1), (swing, radians, 1, 5)],
    ids=["gripper in 0..1", "arm in radians"],
)
def test_only_joints_in_another_unit_end_their_hold(commanded, measured, joint: int, right_joint: int) -> None:
    robot = WatchedRobot(commanded, measured, statistics=PERCENT)
    assert list(robot.run(5.0).holds) == ["joints_units"]
    rest = measured(robot.now)
    # The other joints still move to their last command when the hold begins.
    robot.measured = lambda now: rest + 10.0 * (np.arange(6) == right_joint)
    for _ in range(50):
        robot.now += 0.2
        assert list(robot.run(robot.now + 1, is_moving=False).holds) == ["joints_units"]
    robot.measured = lambda now: rest + 10.0 * (np.arange(6) == joint)
    robot.now += 0.2
    assert robot.run(robot.now + 0.2, is_moving=False).holds == {}


def test_a_robot_near_zero_in_its_own_unit_is_not_held() -> None:
    near = lambda now: swing(now) - POSE  # noqa: E731
    assert WatchedRobot(near, near, statistics=PERCENT).run(60.0) == WatchdogReport()
    assert WatchedRobot(swing, swing, statistics=PERCENT).run(60.0) == WatchdogReport()


def test_a_pause_is_one_hold_even_if_inputs_queue_up() -> None:
    dog = watchdog()
    walk(dog, 1.0, observed_at={"front": 1.0}, requested_at=0.9)
    # The frames of the pause arrive one after the other.
    for now, observed_at in ((3.0, 1.0), (3.02, 2.69), (3.04, 2.9)):
        assert dog.check(now, InputTimes({"front": observed_at}, requested_at=0.9)).holds.keys() == {"paused"}
    walk(dog, 3.1, 3.06, observed_at={"front": 3.01}, requested_at=0.9)
    assert dog.check(5.0, InputTimes({"front": 4.99}, requested_at=0.9)).holds.keys() == {"paused"}
    assert dog.check(5.02, InputTimes({"front": 5.0}, requested_at=0.9)).holds == {}


def test_a_pause_hold_ends_even_if_the_camera_stays_silent() -> None:
    dog = watchdog()
    walk(dog, 1.0, observed_at={"front": 1.0})
    assert dog.check(3.0, InputTimes({"front": 1.0})).holds.keys() == {"paused"}
    walk(dog, 3.4, 3.02, observed_at={"front": 1.0})
    found = dog.check(3.5, InputTimes({"front": 1.0}))
    assert found.holds == {}
    dog.begin(3.6)
    assert dog.check(3.6, InputTimes({"front": 1.0})).holds == {}
