"""Effects of watchdogs on a running session: hold, degraded, resume, and stop until a reset."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from service.errors import MoveRefused
from service.sessions.request import NewSession
from service.sessions.session import SessionEvent
from service.stage import Stage
from service.transport.link import BadInput, RobotLeft
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.rig import POSE
from tests.testing.waiting import until
from tests.unit.control.conftest import LENIENT

pytestmark = pytest.mark.timed


async def test_a_blind_robot_holds_degrades_and_resumes(rigged) -> None:
    async with rigged(**LENIENT) as rig:
        session = await rig.running()
        rig.is_dark = True
        await until(lambda: session.stage is Stage.DEGRADED and rig.stats["hold_code"] == "camera_stale")
        sent = rig.link.sent
        await until(lambda: [one.values for one in sent[-4:]] == 4 * [POSE | {"Jaw": sent[-5].values["Jaw"]}])
        held = len(rig.link.sent)
        assert rig.stats["watch"]["is_blind"]
        assert "camera 'front': no new frame" in session.status().error_message
        await asyncio.sleep(0.1)
        assert len(rig.link.sent) == held, "only the hold was sent"
        rig.is_dark = False
        await until(lambda: session.stage is Stage.RUNNING and len(rig.link.sent) > held + 5)
        assert session.status().error_message is None
        assert [event for event, _ in rig.events] == ["session.created", "session.started"]


async def test_a_robot_that_is_blind_for_long_is_stopped_until_a_reset(rig) -> None:
    session = await rig.running()
    rig.is_dark = True
    await until(lambda: session.stage is Stage.STOPPED)
    rig.is_dark = False
    assert rig.stats["stop_code"] == "camera_stale"
    assert rig.stats["emergency_stop"].startswith("camera_stale: camera 'front': no new frame")
    await until(lambda: session.robot_io.controller.is_idle)
    held = len(rig.link.sent)
    await asyncio.sleep(0.1)
    assert len(rig.link.sent) == held
    with pytest.raises(MoveRefused, match="camera_stale"):
        await rig.sessions.start("s")
    await rig.sessions.reset("s")
    await asyncio.sleep(0.1)
    assert (session.stage, len(rig.link.sent)) == (Stage.STOPPED, held), "a reset moves nothing"
    await rig.sessions.start("s")
    await until(lambda: len(rig.link.sent) > held + 5)
    assert rig.stats["stop_code"] is None


async def test_a_lost_link_stops_a_session_without_cameras(rig) -> None:
    rig.policies["policy"] = ScriptedPolicy(replace(SO100_REQUIREMENTS, cameras={}))
    session = await rig.running(camera_names=())
    rig.link.go_down()
    assert session.stage is Stage.RECONNECTING
    await until(lambda: session.stage is Stage.STOPPED)
    assert rig.stats["stop_code"] == "link_lost"


async def test_motion_after_a_lost_link_needs_a_new_frame_and_a_new_pose(rigged) -> None:
    async with rigged(**LENIENT) as rig:
        session = await rig.running()
        await until(lambda: session.robot_io.controller.queue.left > 0)
        rig.is_dark = rig.is_dumb = True
        before = time.monotonic()
        rig.link.reconnect()
        sent = len(rig.link.sent)
        assert session.robot_io.controller.queue.left
        await until(lambda: session.robot_io.controller.hold is not None)
        assert session.robot_io.controller.queue.left == 0, "the old plan is cleared"
        rig.link.deliver_frame("front", np.ones((48, 64, 3), np.uint8), before)
        assert "no frame since a link was lost" in session.robot_io.buffer.not_ready(time.monotonic()).text
        rig.is_dark = False
        await asyncio.sleep(0.1)
        targets = [one.values["Rotation"] for one in rig.link.sent[sent:]]
        assert set(targets) <= {1.0}, "only the measured pose was sent"
        rig.is_dumb = False
        await until(lambda: rig.link.sent[-1].values["Rotation"] > 1.0)


async def test_a_robot_without_reports_holds_until_all_joints_arrive(rigged) -> None:
    async with rigged(**LENIENT) as rig:
        session = await rig.running()
        rig.is_dumb = True
        await asyncio.sleep(0.02)
        rig.link._inbox.on_event(RobotLeft(rig.link.rooms.joint_input))
        await until(lambda: rig.stats["hold_code"] == "joints_missing")
        await until(lambda: session.stage is Stage.DEGRADED)
        assert rig.link.sent[-1].values == POSE, "the next robot holds no object, so its jaw must not close"
        rig.is_dumb = False
        await until(lambda: session.stage is Stage.RUNNING and rig.stats["hold_code"] is None)


async def test_joints_far_outside_their_range_cause_a_warning(rig) -> None:
    await rig.sessions.create(NewSession("s", "policy", "memory://"))
    rig.link.deliver_joints({"Rotation": 2048.0, "Pitch": 101.0, "shoulder_lift": 101.0, "Jaw": -12.0})
    warning = rig.stats["warnings"]["joints_odd"]
    assert warning.endswith("another unit: Rotation 2048 (range -100..100), Jaw -12 (range 0..100)")
    rig.link.deliver_joints({"Rotation": 3.0, "Jaw": 1.0})
    assert rig.stats["warnings"] == {}


async def test_joints_outside_their_range_reach_policy_and_hold_as_measured(rig) -> None:
    class Noting(ScriptedPolicy):
        def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
            states.append(observation["observation.state"][0].tolist())
            return super().act(observation)

    states: list[list[float]] = []
    rig.policy = Noting()
    rig.pose = POSE | {"Rotation": -109.0, "Jaw": 104.0}
    await rig.running()
    await until(lambda: rig.link.sent[-1].values["Rotation"] == -100)
    assert states[0] == list(rig.pose.values())
    assert rig.link.sent[-1].values["Jaw"] == 100, "commands of the policy stay in range"
    assert rig.stats["joints_clamped"] == sum(rig.stats["safety"]["clamped_joints"].values()) > 0
    await rig.sessions.stop("s")
    assert rig.link.sent[-1].values == rig.pose, "a hold moves nothing"


async def test_frozen_joints_hold_at_the_last_command(rigged) -> None:
    async with rigged(frozen="hold", frame_age_limit=5.0) as rig:
        rig.policy = ScriptedPolicy(step=2.0)
        session = await rig.running()
        await until(lambda: rig.stats["hold_code"] == "joints_frozen")
        held = [one.values for one in rig.link.sent]
        await asyncio.sleep(0.15)
        assert [one.values for one in rig.link.sent] == held, "the measured pose is not the actual pose"
        assert held[-1]["Rotation"] > POSE["Rotation"] + 1
        await rig.sessions.stop("s")
        assert [one.values for one in rig.link.sent] == held
        await rig.sessions.start("s")
        await until(lambda: len(rig.link.sent) > len(held))
        await until(lambda: rig.stats["hold_code"] == "joints_frozen")
        count = len(rig.link.sent)
        rig.pose = POSE | {"Elbow": 20.0}
        await until(lambda: len(rig.link.sent) > count + 5)
        assert session.stage is Stage.RUNNING


@pytest.mark.parametrize("is_replaced", [False, True], ids=["the same robot", "any robot"])
async def test_a_new_connection_ends_a_hold_of_frozen_joints(rigged, is_replaced: bool) -> None:
    async with rigged(frozen="hold", frame_age_limit=5.0) as rig:
        rig.policy = ScriptedPolicy(step=2.0)
        await rig.running()
        await until(lambda: rig.stats["hold_code"] == "joints_frozen")
        count = len(rig.link.sent)
        rig.link._inbox.on_event(RobotLeft(rig.link.rooms.joint_input, is_replaced))
        await until(lambda: len(rig.link.sent) > count + 3)
        # The joints do not follow the commands here either, so the robot is held again.
        await until(lambda: rig.stats["hold_code"] == "joints_frozen")


async def test_joints_are_not_frozen_in_a_dry_run(rigged) -> None:
    async with rigged(frozen="hold", frame_age_limit=5.0) as rig:
        rig.policy = ScriptedPolicy(step=2.0)
        await rig.running(dry_run=True)
        await asyncio.sleep(1.0)
        assert "joints_frozen" not in rig.stats["holds"]
        assert "joints_frozen" not in rig.stats["warnings"]


STATISTICS = {"min": (-40.0,) * 6, "max": (40.0,) * 6}
# Joints whose range is unknown.
LEARNED_NAMES = tuple(f"joint_{number}" for number in range(6))
LEARNED = replace(SO100_REQUIREMENTS, joint_names=LEARNED_NAMES, state_statistics=STATISTICS)


async def test_a_robot_in_servo_ticks_gets_no_command(rigged) -> None:
    async with rigged(**LENIENT) as rig:
        rig.policy = ScriptedPolicy(LEARNED)
        rig.pose = dict.fromkeys(LEARNED_NAMES, 2048.0)
        session = await rig.sessions.create(rig.new)
        rig.robot()
        await until(lambda: "joints_units" in rig.stats["warnings"])
        await rig.sessions.start("s")
        await until(lambda: rig.stats["hold_code"] == "joints_units")
        await asyncio.sleep(0.2)
        assert rig.link.sent == []
        text = rig.stats["hold"]
        assert "joint 'joint_0' is at 2048, the checkpoint's statistics are min -40, max 40" in text
        assert rig.stats["watch"]["units"] == "checked"
        rig.pose = dict.fromkeys(LEARNED_NAMES, 10.0)
        await until(lambda: len(rig.link.sent) > 5)
        rig.pose = dict.fromkeys(LEARNED_NAMES, 2048.0)
        await until(lambda: rig.stats["hold_code"] == "joints_units")
        await rig.sessions.emergency_stop("smoke", "s")
        values = [value for one in rig.link.sent for value in one.values.values()]
        assert max(values) < 100, "a pose in another unit produces no command"
        assert session.stage is Stage.STOPPED


@pytest.mark.parametrize("is_patched", [False, True])
async def test_a_session_that_accepts_its_units_moves(rigged, is_patched: bool) -> None:
    async with rigged(**LENIENT) as rig:
        rig.policy = ScriptedPolicy(LEARNED)
        rig.pose = dict.fromkeys(LEARNED_NAMES, 2048.0)
        session = await rig.sessions.create(replace(rig.new, accept_units=not is_patched))
        rig.robot()
        await rig.sessions.start("s")
        if is_patched:
            await until(lambda: rig.stats["hold_code"] == "joints_units")
            await rig.sessions.adjust("s", {"accept_units": True})
        await until(lambda: len(rig.link.sent) > 5)
        assert session.new.accept_units
        assert rig.stats["hold_code"] is None
        assert rig.stats["watch"]["units"].startswith("accepted")


async def test_another_policy_brings_its_own_statistics(rigged) -> None:
    async with rigged(**LENIENT) as rig:
        rig.policy = ScriptedPolicy(replace(LEARNED, state_statistics=None))
        rig.pose = dict.fromkeys(LEARNED_NAMES, 2048.0)
        session = await rig.running()
        assert rig.stats["watch"]["units"].startswith("not checked: the checkpoint has no statistics")
        rig.policies["policy"] = ScriptedPolicy(LEARNED, commit="next")
        await session.policies.stage("next", "policy", lambda stage: None)
        await session.policies.swap(0, 5.0)
        await until(lambda: rig.stats["hold_code"] == "joints_units")
        assert rig.stats["watch"]["units"] == "checked"


@pytest.mark.parametrize(
    "values", [{"Rotation": float("nan")}, {"shoulder_pan": 3.0, "Rotation": 4.0}, {"Tail": 1.0}, None]
)
async def test_twenty_bad_joint_values_in_a_second_stop_the_robot(rig, values) -> None:
    session = await rig.running()
    measured = session.robot_io.buffer.measured_joints()

    def deliver() -> None:
        if values is None:  # The message cannot be parsed.
            session.robot_io.on_event(BadInput({"malformed": 1}))
        else:
            rig.link.deliver_joints(values)

    for _ in range(19):
        deliver()
    assert session.stage is Stage.RUNNING
    assert session.robot_io.buffer.measured_joints() == measured
    deliver()
    assert session.stage is Stage.STOPPED
    assert rig.stats["stop_code"] == "bad_input"
    assert sum(rig.stats["inputs_dropped"].values()) == 20
    assert rig.link.sent[-1].values == measured, "the hold is at the last measured pose"


async def test_bad_input_stops_only_a_robot_that_moves(rig) -> None:
    session = await rig.running()
    await rig.sessions.stop("s")
    for _ in range(50):
        rig.link.deliver_joints({"Tail": 1.0})
    assert not session.is_latched
    assert rig.stats["watch"]["bad_inputs"] > 0


async def test_a_stop_from_a_room_is_kept_with_any_text(rig) -> None:
    session = await rig.running()
    rig.link.deliver_emergency_stop("\ud800no\n" + 9999 * "!", "\udfff")
    assert session.stage is Stage.STOPPED
    session.latch.encode()
    assert session.latch.startswith("no !!!")
    assert len(session.latch) < 300


@pytest.mark.parametrize("where", ["room", "all"])
async def test_a_stop_during_deletion_latches_the_next_session(rig, where: str) -> None:
    await rig.running()
    rig.transport.leaving = asyncio.Event()
    deleting = asyncio.create_task(rig.sessions.delete("s"))
    await until(lambda: rig.link.is_closed)
    if where == "room":
        rig.link.deliver_emergency_stop("smoke")
    else:
        assert await rig.sessions.emergency_stop("smoke") == []
    rig.transport.leaving.set()
    await deleting
    session = await rig.sessions.create(NewSession("s", "policy", "memory://"))
    assert session.stage is Stage.STOPPED
    assert "smoke" in session.latch


async def test_a_stop_is_sent_as_soon_as_the_link_takes_it(rig) -> None:
    await rig.running()
    rig.link.is_choked = True
    await rig.sessions.stop("s")
    await asyncio.sleep(0.3)
    sent = len(rig.link.sent)
    rig.link.is_choked = False
    await until(lambda: rig.session.robot_io.controller.is_idle)
    assert [each.values for each in rig.link.sent[sent:]] == 4 * [POSE]
    rig.link.is_choked = True
    await rig.sessions.stop("s")
    await until(lambda: rig.session.robot_io.controller.is_idle)


async def test_a_failing_event_listener_does_not_delay_a_stop(rigged) -> None:
    async with rigged() as rig:
        session = await rig.running()
        held: list[bool] = []

        def fail(event: SessionEvent) -> None:
            if event.name != "session.deleted":
                held.append(session.robot_io.controller.is_running)
                raise RuntimeError("out of order")

        rig.sessions._listeners = (*rig.sessions._listeners, fail)
        other = await rig.sessions.create(NewSession("other", "policy", "memory://", rate=50))
        assert await rig.sessions.emergency_stop("both") == ["s", "other"]
        assert {session.is_latched, other.is_latched} == {True}
        assert held == [True, False, False], "the second session is created, then both are stopped"
        assert rig.transport.links[0].sent[-1].values == POSE


async def test_text_of_a_person_is_not_parsed_as_a_stop_code(rig) -> None:
    await rig.running()
    await rig.sessions.emergency_stop("careful: smoke", "s")
    assert (rig.stats["stop_code"], rig.stats["emergency_stop"]) == ("asked", "careful: smoke")


async def test_two_observations_of_a_policy_are_one_policy_step_apart(rigged) -> None:
    class Looking(ScriptedPolicy):
        """Policy that records the number of frames (one every 10 ms) between its two observations."""

        def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
            before, now = observation["observation.images.front"][0, :, 0, 0, 0].astype(int)
            apart.append((now - before) % 251)
            return super().act(observation)

    apart: list[int] = []
    async with rigged() as rig:
        rig.policies["policy"] = Looking(replace(SO100_REQUIREMENTS, rate=10.0, observation_steps=2, action_steps=2))
        session = await rig.running(rate=50)
        await until(lambda: len(apart) > 5)
        assert apart[0] <= 2, "at the start, the first observation is used twice"
        assert 5 <= max(apart[-2:]) <= 30, apart
        await rig.sessions.stop("s")
        await rig.sessions.start("s")
        count = len(apart)
        await until(lambda: len(apart) > count)
        assert apart[count] <= 2, "after a restart, the first observation is used twice"
        assert session.stage is Stage.RUNNING
