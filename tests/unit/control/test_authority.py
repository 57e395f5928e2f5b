"""Right to command: one session per robot, no commands in a dry run, and none from a shadow policy."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from service.control.lease import Leases, find_robot
from service.control.observers import Tick
from service.errors import PolicyError, RobotTaken
from service.sessions.request import NewSession
from service.sessions.session import Session
from service.stage import Stage
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.waiting import until

pytestmark = pytest.mark.timed


class RecordingObserver:
    """Observer that records its calls or raises an error."""

    def __init__(self, failure: Exception | None = None):
        self.cameras: list[str] = []
        self.plans: list[tuple[int, ...]] = []
        self.ticks: list[Tick] = []
        self._failure = failure

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        self.cameras.append(camera)

    def on_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        assert observed_at <= at
        self.plans.append(chunk.shape)

    def on_tick(self, tick: Tick) -> None:
        self.ticks.append(tick)
        if self._failure is not None:
            raise self._failure


async def test_an_observer_sees_all_events_until_it_is_detached(rig) -> None:
    rig.transport.gate = gate = asyncio.Event()
    creating = asyncio.create_task(rig.sessions.create(NewSession("s", "policy", "memory://", rate=50)))
    await until(lambda: bool(rig.sessions.list()))
    observer = RecordingObserver()
    assert rig.session.robot_io is None
    detach = rig.session.attach(observer)
    gate.set()
    await creating
    rig.robot()
    await rig.sessions.start("s")
    await until(lambda: len(observer.plans) > 1)
    assert set(observer.cameras) == {"front"}
    assert observer.plans[0] == (20, 6)
    sent = [tick for tick in observer.ticks if tick.command is not None]
    assert all(tick.is_sent and tick.pose is not None for tick in sent)
    detach()
    detach()
    count = len(observer.ticks)
    sent_so_far = len(rig.link.sent)
    await until(lambda: len(rig.link.sent) > sent_so_far + 3)
    assert len(observer.ticks) == count


async def test_a_failing_observer_is_detached_and_the_robot_moves_on(rig, caplog) -> None:
    session = await rig.running()
    observer, broken = RecordingObserver(), RecordingObserver(ValueError("disk"))
    session.attach(broken)
    session.attach(observer)
    await until(lambda: len(observer.ticks) > 5)
    assert len(broken.ticks) == 1
    assert session.stage is Stage.RUNNING
    assert "observer RecordingObserver failed and is detached" in caplog.text


async def test_a_dry_run_does_everything_but_send(rig) -> None:
    session = await rig.running(dry_run=True)
    observer = RecordingObserver()
    session.attach(observer)
    await until(lambda: len(observer.ticks) > 5)
    await rig.sessions.emergency_stop("a test", "s")
    await until(lambda: session.robot_io.controller.is_idle)
    assert rig.link.sent == [], "holds are not sent either"
    assert not any(tick.is_sent for tick in observer.ticks)
    stats = rig.stats
    assert stats["dry_run"] is True
    assert (stats["commands_sent"], stats["commands_refused"], stats["last_command"]) == (0, 0, {})
    assert stats["commands_withheld"] == session.robot_io.commands_withheld > 5
    assert stats["inference_count"] > 0


async def shadowed(rig, steps: int = 1, shadow_steps: int = 1) -> dict:
    """Return the statistics of a shadow policy; both policies read this number of observations."""
    rig.policies["policy"] = ScriptedPolicy(replace(SO100_REQUIREMENTS, observation_steps=steps))
    rig.policies["shadow"] = ScriptedPolicy(
        replace(SO100_REQUIREMENTS, observation_steps=shadow_steps), step=0.3, commit="c0ffee"
    )
    await rig.running(shadow_policy_path="shadow")
    await until(lambda: rig.stats["shadow"]["compared"] >= 2)
    return rig.stats["shadow"]


async def test_a_shadow_gets_the_same_input_and_sends_no_command(rig) -> None:
    shadow = await shadowed(rig)
    assert (shadow["policy_path"], shadow["commit"]) == ("shadow", "c0ffee")
    assert shadow["difference"]["Jaw"]["max"] == pytest.approx(4.0, abs=0.01), (
        "the policies differ by 0.2 per action over 20 actions"
    )
    assert shadow["inference_ms"]["p50"] >= 0
    assert "device" not in rig.policies["shadow"].threads
    assert rig.policies["policy"].threads == {"device"}
    assert max(one.values["Rotation"] for one in rig.link.sent) < 1 + 20 * 0.15, "only the first policy moved the robot"
    assert rig.session.status().policy_path == "policy"


@pytest.mark.parametrize(("steps", "shadow_steps"), [(1, 1), (3, 1), (3, 2)])
async def test_a_shadow_with_fewer_observations_gets_the_newest(rig, steps: int, shadow_steps: int) -> None:
    shadow = await shadowed(rig, steps, shadow_steps)
    assert (shadow["errors"], shadow["last_error"]) == (0, None)
    # The policies differ by 0.2 per action, which shows that both began at the newest pose.
    assert shadow["difference"]["Jaw"]["mean"] == pytest.approx(2.1, abs=0.01)


async def test_renamed_cameras_have_the_names_that_the_robot_uses(rig) -> None:
    own = replace(SO100_REQUIREMENTS, cameras={"camera1": SO100_REQUIREMENTS.cameras["front"]})
    rig.policies |= {"policy": ScriptedPolicy(requirements=own), "shadow": ScriptedPolicy(requirements=own)}
    await rig.running(shadow_policy_path="shadow", rename={"camera1": "front"})
    await until(lambda: rig.stats["shadow"]["compared"] >= 2)
    assert rig.stats["shadow"]["errors"] == rig.stats["errors"] == 0
    assert set(rig.stats["camera_fps"]) == {"front"}
    for rename, text in (
        ({"camera2": "front"}, "camera2=front names no camera of the policy, which has camera1"),
        (None, r"lacks \['camera1'\] .* or rename {\"camera1\": \.\.\.}"),
    ):
        with pytest.raises(PolicyError, match=text):
            await rig.sessions.create(NewSession("other", "policy", "memory://", rename=rename))


async def test_a_shadow_that_hangs_or_fails_does_not_affect_the_robot(rig) -> None:
    hang = threading.Event()
    nonsense = [ValueError("x"), np.zeros(3), np.full((1, 20, 6), np.nan, np.float32)]
    rig.policies["shadow"] = ScriptedPolicy(failures=[*nonsense, hang])
    session = await rig.running(shadow_policy_path="shadow")
    try:
        await until(lambda: rig.stats["shadow"]["skipped"] >= 2 and rig.stats["hold"] is None)
        shadow = rig.stats["shadow"]
        assert (shadow["errors"], shadow["compared"], shadow["difference"]) == (3, 0, {})
        assert "not finite" in shadow["last_error"]
        assert session.stage is Stage.RUNNING
        await rig.sessions.delete("s")
    finally:
        hang.set()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"action": 5, "state": 5}, "actions have 5"),
        ({"cameras": {"wrist": (4, 4)}}, "'wrist'"),
        ({"rate": 7.0}, "7"),
        ({"observation_steps": 2}, "at 2 obs"),
        ({"joint_names": ("gripper", *tuple(SO100_REQUIREMENTS.joint_names or ())[:5])}, "its joints are ['gripper'"),
    ],
)
async def test_a_shadow_that_does_not_fit_is_reported_and_not_called(rig, changes: dict, word: str) -> None:
    rig.policies["shadow"] = ScriptedPolicy(replace(SO100_REQUIREMENTS, **changes))
    await rig.running(shadow_policy_path="shadow")
    await until(lambda: rig.stats["inference_count"] > 1)
    shadow = rig.stats["shadow"]
    assert (shadow["compared"], shadow["errors"], rig.policies["shadow"].acted) == (0, 0, 0)
    assert word in shadow["last_error"]


def _session(rig, leases: Leases, name: str) -> Session:
    return Session(
        NewSession(name, "policy", "memory://", workspace_id="w"),
        transport=rig.transport,
        engine=rig.sessions.engine,
        load=rig.load,
        settings=rig.sessions.settings,
        leases=leases,
    )


async def test_a_robot_has_one_session_and_is_released_at_its_end(rig) -> None:
    leases = Leases()
    robot = find_robot("memory://", "w", "one-joint-output")
    blocker = _session(rig, leases, "two")
    await blocker.ready()
    leases.take(robot, blocker)
    refused = _session(rig, leases, "one")
    with pytest.raises(RobotTaken, match="session 'two' commands"):
        await refused.ready()
    leases.release(robot, blocker)
    ended = _session(rig, leases, "one")
    await ended.ready()
    assert leases.holder(robot) is ended
    for session in (ended, blocker):
        session.begin_close()
        assert await session.wait_closed()
    assert leases.holder(robot) is None
    rig.policies.clear()
    failed = _session(rig, leases, "one")
    with pytest.raises(Exception, match="nothing at policy"):
        await failed.ready()
    assert failed.is_closed
    assert leases.holder(robot) is None
