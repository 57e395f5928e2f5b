"""Sessions on a real event loop, with scripted policies and a robot on a transport in memory."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jaxmodels import Requirements
from jaxmodels.errors import ConfigError
from service.control.config import ControlSettings
from service.errors import (
    InvalidRequest,
    MoveRefused,
    PolicyError,
    ServiceError,
    SessionExists,
    TooManySessions,
    TransportError,
    UnknownSession,
)
from service.http.config import LimitSettings
from service.sessions.compatibility import configure_control
from service.sessions.request import DIRECT
from service.sessions.store import NewSession, SessionSettings
from service.stage import Stage
from tests.testing.doubles import SO100_REQUIREMENTS, MemoryLink, ScriptedPolicy
from tests.testing.pauses import Pauses
from tests.testing.rig import POSE, SessionRig
from tests.testing.waiting import until

pytestmark = pytest.mark.timed

NEW = NewSession("s", "policy", "memory://", rate=100)
# A plan of 4 s and old frames are allowed, so that a pause of the test machine causes no hold.
LONG = replace(SO100_REQUIREMENTS, chunk=400)
PATIENT = SessionSettings(control=ControlSettings(frame_age_limit=30.0))


class Rig(SessionRig):
    async def running(self, new: NewSession = NEW) -> MemoryLink:  # type: ignore[override]
        """Start a session that moves its robot, and return its link."""
        await super().running(new)
        return self.link


def rigged(settings: SessionSettings | None = None, **more: Any) -> Rig:
    return Rig(NEW, settings, **more)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as made:
        yield made


def held(link: MemoryLink, since: int) -> list[dict[str, float]]:
    return [sent.values for sent in link.sent[since:]]


async def test_the_status_is_json_with_finite_real_figures(rig: Rig) -> None:
    link = await rig.running()
    session = rig.sessions.get_live("s")
    control = session.robot_io.controller
    # Wait until no request is in flight, because the two counts include it at different times.
    await until(
        lambda: len(link.sent) > 60 and control.chunks > 1 and not control.scheduler.in_flight and control.hold is None
    )
    status = json.loads(json.dumps(vars(session.status()), allow_nan=False))
    stats, inference = status["stats"], status["inference_stats"]
    assert status["status"] == "running"
    assert stats["commands_sent"] == len(link.sent)
    assert stats["images_received"]["front"] > 10
    assert stats["joints_received"] > 10
    assert stats["camera_fps"]["front"] > 20
    assert stats["chunks"] + stats["chunks_discarded"] == inference["inference_count"] == rig.policy.acted > 1
    assert (stats["errors"], stats["hold"], stats["measured_joints"]) == (0, None, POSE)
    assert set(stats["last_command"]) == set(POSE)
    assert stats["tick_lateness_ms"]["p99"] >= stats["tick_lateness_ms"]["p50"] >= 0
    assert (inference["is_loaded"], inference["device"]) == (True, "scripted:0")
    assert inference["average_fps"] > 0
    assert inference["stages_ms"]["total"]["p99"] > 0
    queue = json.loads(json.dumps(session.queue(), allow_nan=False))
    assert queue["queue_length"] == len(queue["due_in_ms"])
    assert queue["data"]["is_complete_and_fresh"] is True
    assert queue["link"]["commands_sent"] >= stats["commands_sent"]


async def test_the_rate_comes_from_the_request_the_policy_or_the_default(rig: Rig) -> None:
    rig.policies |= dict.fromkeys("abcde", rig.policy)

    async def rate_of(name: str, rate: float | None) -> float:
        session = await rig.sessions.create(replace(NEW, session_id=name, policy_path=name, rate=rate))
        return session.status().stats["rate"]  # type: ignore[return-value]

    assert await rate_of("a", 50.0) == 50
    assert await rate_of("b", None) == 20
    rig.policy.requirements = replace(SO100_REQUIREMENTS, rate=25.0)
    assert await rate_of("c", None) == 25
    assert await rate_of("d", 50.0) == 50
    assert rig.sessions.get("d").status().stats["action_rate"] == 25
    rig.policy.requirements = replace(SO100_REQUIREMENTS, rate=1000.0)
    assert await rate_of("e", None) == 200, "the rate is limited by the server"


async def test_a_deleted_session_holds_leaves_its_rooms_and_frees_its_id(rig: Rig) -> None:
    link = await rig.running()
    sent = len(link.sent)
    await rig.sessions.delete("s")
    assert held(link, -4) == [POSE] * 4
    assert len(link.sent) <= sent + 5
    assert link.is_closed
    assert rig.transport.existing == set()
    assert (rig.sessions.list(), rig.sessions.engine.get_stats()["policies_loaded"]) == ([], 0)
    assert (await rig.sessions.create(NEW)).stage is Stage.READY


async def test_sessions_share_one_policy_and_run_independently(rig: Rig) -> None:
    links = [await rig.running(replace(NEW, session_id=name)) for name in "abc"]
    assert rig.loader.loads == ["policy"]
    await rig.sessions.stop("b")
    sent = [len(link.sent) for link in links]
    await until(lambda: len(links[0].sent) > sent[0] + 10 and len(links[2].sent) > sent[2] + 10)
    assert len(links[1].sent) <= sent[1] + 4


@pytest.mark.parametrize(
    ("change", "loc"),
    [
        ({"session_id": "a/b"}, ("body", "session_id")),
        ({"session_id": ""}, ("body", "session_id")),
        ({"session_id": ".."}, ("body", "session_id")),
        ({"session_id": "x" * 65}, ("body", "session_id")),
        ({"workspace_id": "w w"}, ("body", "workspace_id")),
        ({"policy_path": " "}, ("body", "policy_path")),
        ({"camera_names": ("front", "../top")}, ("body", "camera_names", 1)),
        ({"camera_names": ("front", "front")}, ("body", "camera_names")),
        ({"camera_names": tuple("abcdefghi")}, ("body", "camera_names")),
        ({"rate": 0.0}, ("body", "rate")),
        ({"rate": 201.0}, ("body", "rate")),
        ({"rate": float("nan")}, ("body", "rate")),
    ],
)
async def test_invalid_requests_are_refused_with_their_field(rig: Rig, change: dict, loc: tuple) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await rig.sessions.create(replace(NEW, **change))
    assert caught.value.loc == loc
    assert rig.sessions.list() == []


@pytest.mark.parametrize(
    ("requirements", "text"),
    [
        (
            replace(SO100_REQUIREMENTS, policy_type="pi0"),
            "it is of type 'pi0', the request says 'act'; send policy_type",
        ),
        (replace(SO100_REQUIREMENTS, cameras={"top": (4, 4), "front": (4, 4)}), r"lacks \['top'\]; send camera_names"),
        (replace(SO100_REQUIREMENTS, cameras={"top": (4, 4)}), r"lacks \['top'\] and .* has \['front'\], which it"),
        (replace(SO100_REQUIREMENTS, state=7), "state has 7 values and its actions 6"),
        (replace(SO100_REQUIREMENTS, environment_state=3), "reads observation.environment_state"),
        (Requirements("act", {"top": (4, 4)}, state=3, action=2), "lacks .*; .* state has 3 values"),
    ],
)
async def test_a_policy_that_does_not_fit_is_refused_before_rooms_exist(rig, requirements, text) -> None:
    rig.policy.requirements = requirements
    with pytest.raises(PolicyError, match=text):
        await rig.sessions.create(NEW)
    assert rig.transport.links == []
    session = rig.sessions.get("s")
    assert session.stage is Stage.ERROR
    assert session.status().error_message is not None
    assert rig.sessions.engine.get_stats()["policies_loaded"] == 0


async def test_a_failed_creation_of_rooms_fails_the_session(rig: Rig) -> None:
    rig.transport.refuse = TransportError("no server answers at memory://")
    with pytest.raises(TransportError, match="no server answers"):
        await rig.sessions.create(NEW)
    assert rig.sessions.get("s").status().error_message == "no server answers at memory://"
    assert rig.sessions.engine.get_stats()["policies_loaded"] == 0


@pytest.mark.parametrize("step", ["loading", "joining"])
async def test_a_deletion_during_initialization_ends_the_session(rig: Rig, step: str) -> None:
    if step == "loading":
        rig.loader.gate = threading.Event()
    else:
        rig.transport.gate = asyncio.Event()
    creating = asyncio.create_task(rig.sessions.create(NEW))
    await until(lambda: bool(rig.sessions.list()) and bool(rig.loader.loads))
    await asyncio.sleep(0.02)
    await rig.sessions.delete("s")
    with pytest.raises(UnknownSession, match="was deleted while it was initializing"):
        await creating
    assert rig.sessions.list() == []
    assert rig.transport.existing == set()
    if rig.loader.gate is not None:
        rig.loader.gate.set()
    await until(lambda: rig.sessions.engine.get_stats()["policies_loading"] == 0)


async def test_the_number_of_sessions_without_failed_ones_is_limited() -> None:
    async with rigged(SessionSettings(LimitSettings(max_sessions=2), max_failed=3)) as rig:
        rig.loader.failure = ConfigError("bad")
        for number in range(6):
            with pytest.raises(PolicyError):
                await rig.sessions.create(replace(NEW, session_id=f"bad{number}"))
        assert [session.id for session in rig.sessions.list()] == ["bad3", "bad4", "bad5"]
        rig.loader.failure = None
        await rig.sessions.create(replace(NEW, session_id="a"))
        await rig.sessions.create(replace(NEW, session_id="b"))
        with pytest.raises(TooManySessions, match="2 sessions"):
            await rig.sessions.create(replace(NEW, session_id="c"))


@pytest.mark.parametrize("has_client_left", [False, True])
async def test_an_id_is_free_after_its_deletion_even_if_the_client_left(rig: Rig, has_client_left: bool) -> None:
    await rig.running()
    deleting = asyncio.create_task(rig.sessions.delete("s"))
    await asyncio.sleep(0)
    if has_client_left:
        deleting.cancel()
    with pytest.raises(UnknownSession):
        rig.sessions.get("s")
    with pytest.raises(SessionExists, match="being deleted"):
        await rig.sessions.create(NEW)
    with pytest.raises(UnknownSession):
        await rig.sessions.delete("s")
    await until(lambda: rig.transport.existing == set() and rig.sessions.find("s") is None)
    assert (await rig.sessions.create(NEW)).stage is Stage.READY


async def test_policies_with_other_joints_use_their_own_names(rig: Rig) -> None:
    rig.policy.requirements = Requirements("act", {"top": (4, 4)}, state=14, action=14, chunk=10, action_steps=10)
    names = tuple(f"{side}_{number}" for side in ("left", "right") for number in range(7))
    await rig.sessions.create(replace(NEW, camera_names=("top",), joint_names=names))
    link = rig.transport.link
    link.deliver_joints({name: 1000.0 + number for number, name in enumerate(names)})
    link.deliver_frame("top", np.zeros((4, 4, 3), np.uint8))
    await rig.sessions.start("s")
    await until(lambda: bool(link.sent))
    assert tuple(link.sent[0].values) == names
    assert link.sent[0].values["right_6"] > 1000


UNNAMED = replace(SO100_REQUIREMENTS, joint_names=None)


@pytest.mark.parametrize(
    ("requirements", "url"),
    [
        (UNNAMED, NEW.transport_server_url),
        (UNNAMED, DIRECT),
        (replace(UNNAMED, state=None), DIRECT),
        (replace(UNNAMED, is_positional=True), NEW.transport_server_url),
    ],
    ids=["rooms", "direct", "direct without a state", "positional in rooms"],
)
async def test_a_session_of_a_policy_without_names_needs_them(rig: Rig, requirements: Requirements, url: str) -> None:
    rig.policy.requirements = requirements
    with pytest.raises(InvalidRequest, match="send 6 names in the order of the policy's actions") as error:
        await rig.sessions.create(replace(NEW, transport_server_url=url))
    assert error.value.loc == ("body", "joint_names")
    await rig.sessions.create(replace(NEW, session_id="t", joint_names=SO100_REQUIREMENTS.joint_names))
    assert next(iter(rig.sessions.get("t").status().stats["safety"]["limits"])) == "Rotation"


def test_direct_sessions_without_joints_take_actions_by_position() -> None:
    new, settings = replace(NEW, transport_server_url=DIRECT), SessionSettings()
    for requirements in (replace(UNNAMED, is_positional=True), replace(UNNAMED, state=None, controls_joints=False)):
        table, _ = configure_control(requirements, new, settings)
        assert table.names == tuple(f"action_{number}" for number in range(1, 7))
        assert not np.isfinite(table.ranges).any()


async def test_a_policy_without_state_gets_none(rig: Rig) -> None:
    rig.policy.requirements = replace(SO100_REQUIREMENTS, state=None)
    assert await rig.running()
    assert rig.sessions.get("s").status().stats["errors"] == 0


@pytest.mark.parametrize("room", [None, "s-joint-input", "s-joint-output", "s-front"])
async def test_a_lost_link_holds_reconnects_and_resumes_after_fresh_input(rig: Rig, room: str | None) -> None:
    link = await rig.running()
    session = rig.sessions.get("s")
    rig.robots.pop().cancel()
    link.go_down(room, "socket closed")
    assert session.stage is Stage.RECONNECTING
    assert "is lost: socket closed" in str(session.status().error_message)
    await until(lambda: session.status().stats["hold_code"] == "link_lost")
    link.come_up(room)
    assert session.stage is Stage.RUNNING
    assert session.status().error_message is None
    sent = len(link.sent)
    rig.robot()
    await until(lambda: len(link.sent) > sent + 5)


async def test_frames_of_another_size_hold_during_the_compilation(rig: Rig) -> None:
    link = await rig.running()
    session = rig.sessions.get("s")
    rig.robots.pop().cancel()
    gate, compile = threading.Event(), rig.policy.compile

    def gated(batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, **plan: bool) -> None:
        assert gate.wait(30)
        compile(batch, cameras, **plan)

    rig.policy.compile = gated  # type: ignore[method-assign]
    rig.robot(size=(96, 128))
    await until(lambda: session.status().stats["hold_code"] == "compiling")
    assert session.status().stats["hold"] == "compiling for 96x128 frames"
    assert held(link, -1) == [POSE | {"Jaw": link.sent[-2].values["Jaw"]}], "a hold keeps the grip"
    gate.set()
    await until(lambda: session.status().stats["hold_code"] is None)
    sent = len(link.sent)
    await until(lambda: len(link.sent) > sent + 5)
    assert {"front": (96, 128)} in rig.policy.compiled


async def test_the_size_of_the_first_frames_is_compiled_before_the_start(rig: Rig) -> None:
    await rig.sessions.create(NEW)
    rig.robot(size=(96, 128))
    await until(lambda: {"front": (96, 128)} in rig.policy.compiled)
    await rig.sessions.start("s")
    await until(lambda: bool(rig.transport.link.sent))
    assert "compiling" not in rig.sessions.get("s").status().stats["holds"]  # type: ignore[operator]


@dataclass
class GatedPolicy(ScriptedPolicy):
    """Policy whose compilation of larger batches lasts until the gate opens."""

    gate: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)

    def compile(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, **plan: bool) -> None:
        if batch > 1:
            self.started.set()
            self.gate.wait(60)
        super().compile(batch, cameras, **plan)


@asynccontextmanager
async def started_during_a_compile() -> AsyncIterator[tuple[Rig, GatedPolicy]]:
    """Start a session with a sending robot during the compilation of a larger batch."""
    policy = GatedPolicy(LONG)
    try:
        async with rigged(PATIENT, batch_sizes=(1, 2, 4)) as rig:
            rig.policy = policy
            await rig.sessions.create(NEW)
            await asyncio.to_thread(policy.started.wait, 30)
            rig.robot()
            await rig.sessions.start("s")
            await until(lambda: rig.sessions.get("s").status().stats["hold_code"] == "compiling")
            yield rig, policy
            policy.gate.set()
    finally:
        policy.gate.set()


def has_moved(rig: Rig) -> bool:
    return any(values != POSE for values in held(rig.transport.link, 0))


async def test_a_compilation_during_a_start_ends_and_no_other_begins() -> None:
    async with started_during_a_compile() as (rig, policy):
        session = rig.sessions.get("s")
        assert "waiting for a compilation" in str(session.status().stats["hold"])
        await asyncio.sleep(0.1)
        assert not has_moved(rig), "the robot is held at its pose"
        policy.gate.set()
        await until(lambda: has_moved(rig))
        assert [size for size, _ in policy.batches] == [2]
        await asyncio.sleep(0.6)  # This is longer than the interval of the check for running robots.
        assert [size for size, _ in policy.batches] == [2]
        assert session.status().stats["holds"] == {"compiling": 1}


async def test_a_compilation_that_takes_too_long_does_not_hold_the_robot(monkeypatch, caplog) -> None:
    monkeypatch.setattr("service.control.policy_runner.COMPILE_WAIT", 0.2)
    async with started_during_a_compile() as (rig, policy):
        await until(lambda: has_moved(rig))
        assert policy.batches == []
        assert "more than 0.2 s; the robot moves in parallel" in caplog.text
        before = len(rig.transport.link.sent)
        await until(lambda: len(rig.transport.link.sent) > before + 50)
        assert rig.sessions.get("s").status().stats["holds"] == {"compiling": 1}


async def test_a_compile_reported_late_holds_no_moving_robot(rig: Rig) -> None:
    """An engine in another process reports its compilation up to one poll after the robot's first answer."""
    link = await rig.running()
    await until(lambda: len(link.sent) > 10)
    rig.sessions.engine.batch_compiler.idle.clear()
    before = rig.sessions.get("s").status().inference_stats["inference_count"]
    await until(lambda: rig.sessions.get("s").status().inference_stats["inference_count"] > before + 2)
    assert "compiling" not in rig.sessions.get("s").status().stats["holds"]


async def test_a_session_that_waits_for_a_compile_can_be_stopped() -> None:
    async with started_during_a_compile() as (rig, policy):
        await rig.sessions.stop("s")
        policy.gate.set()
        await asyncio.sleep(0.2)
        assert not has_moved(rig)
        await rig.sessions.start("s")
        await until(lambda: has_moved(rig))


async def test_a_compile_that_fails_is_an_error(rig: Rig) -> None:
    await rig.running()
    rig.robots.pop().cancel()
    rig.policy.compile_failure = RuntimeError("RESOURCE_EXHAUSTED")
    rig.robot(size=(96, 128))
    await until(lambda: rig.sessions.get("s").stage is Stage.ERROR)
    assert "cannot be compiled for 96x128 frames" in str(rig.sessions.get("s").status().error_message)


async def test_a_session_without_input_times_out_and_can_be_restarted() -> None:
    async with rigged(SessionSettings(control=ControlSettings(input_timeout=1.0))) as rig:
        link = await rig.running()
        session = rig.sessions.get("s")
        await asyncio.sleep(1.2)
        assert session.stage is Stage.RUNNING
        rig.robots.pop().cancel()
        await until(lambda: session.stage is Stage.TIMEOUT)
        assert session.status().error_message == "no frame or joints for 1 s; restart it when they are back"
        with pytest.raises(MoveRefused, match="allowed now: stop, restart"):
            await rig.sessions.start("s")
        sent = len(link.sent)
        rig.robot()
        await rig.sessions.restart("s")
        await until(lambda: len(link.sent) > sent + 5)


async def test_a_session_without_any_input_times_out_unless_stopped() -> None:
    async with rigged(SessionSettings(control=ControlSettings(input_timeout=0.1))) as rig:
        await rig.sessions.create(replace(NEW, session_id="a"))
        await rig.sessions.create(replace(NEW, session_id="b"))
        await rig.sessions.stop("b")
        await until(lambda: rig.sessions.get("a").stage is Stage.TIMEOUT)
        await asyncio.sleep(0.1)
        assert rig.sessions.get("b").stage is Stage.STOPPED


async def test_an_error_of_a_link_fails_only_its_session(rig: Rig) -> None:
    link = await rig.running()
    other = await rig.running(replace(NEW, session_id="other"))

    def broken(joints: object) -> bool:
        raise OSError("/root/secret")

    link.send = broken  # type: ignore[method-assign]
    await until(lambda: rig.sessions.get("s").is_closed)
    status = rig.sessions.get("s").status()
    assert status.status == "error"
    assert "secret" not in str(status.error_message)
    assert not {room for room in rig.transport.existing if "/s-" in room}
    sent = len(other.sent)
    await until(lambda: len(other.sent) > sent + 5)


async def test_an_emergency_stop_latches_until_reset_and_start(rig: Rig) -> None:
    link = await rig.running()
    session = rig.sessions.get("s")
    sent = len(link.sent)
    assert await rig.sessions.emergency_stop("button") == ["s"]
    assert session.stage is Stage.STOPPED
    assert held(link, sent) == [POSE], "the hold is sent before the first await"
    await until(lambda: session.robot_io.controller.is_idle)  # type: ignore[union-attr]
    assert held(link, sent) == [POSE] * 4
    assert session.status().error_message == "button"
    for move in (rig.sessions.start, rig.sessions.restart):
        with pytest.raises(MoveRefused, match=r"\(button\).*POST /debug/sessions/s/reset"):
            await move("s")
    await rig.sessions.reset("s")
    await asyncio.sleep(0.05)
    assert held(link, sent) == [POSE] * 4
    assert session.status().error_message is None
    await rig.sessions.start("s")
    await until(lambda: len(link.sent) > sent + 10)


async def test_an_emergency_stop_of_all_reaches_every_session(rig: Rig) -> None:
    await rig.running(replace(NEW, session_id="running"))
    await rig.sessions.create(replace(NEW, session_id="ready"))
    rig.loader.gate, rig.policies["other"] = threading.Event(), rig.policy
    creating = asyncio.create_task(rig.sessions.create(replace(NEW, session_id="loading", policy_path="other")))
    await until(lambda: "other" in rig.loader.loads)
    assert sorted(await rig.sessions.emergency_stop("all")) == ["loading", "ready", "running"]
    rig.loader.gate.set()
    await creating
    for session in rig.sessions.list():
        assert session.stage is Stage.STOPPED
        with pytest.raises(MoveRefused, match="emergency stop is latched"):
            session.start()


async def test_an_emergency_stop_clears_the_plan_during_an_inference(rig: Rig) -> None:
    link = await rig.running()
    rig.policy.latency = 0.1
    acted = rig.policy.acted
    await until(lambda: rig.policy.acted > acted)
    sent = len(link.sent)
    link.deliver_emergency_stop()
    control = rig.sessions.get_live("s").robot_io.controller  # type: ignore[union-attr]
    await until(lambda: control.is_idle and not control.scheduler.in_flight)
    assert held(link, sent) == [POSE] * 4
    assert rig.sessions.get("s").queue()["queue_length"] == 0


async def test_closing_holds_every_robot_at_once_and_leaves_all_rooms(pauses: Pauses) -> None:
    async with rigged() as rig:
        links = [await rig.running(replace(NEW, session_id=f"s{number}")) for number in range(4)]
        sent = [len(link.sent) for link in links]
        started = time.monotonic()
        closing = asyncio.create_task(rig.sessions.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for link, before in zip(links, sent, strict=True):
            # A tick may be due at the same time and come before the hold.
            assert POSE in held(link, before)[:2]
            assert held(link, before)[-1] == POSE
        assert pauses.running(started) < 0.1
        await closing
        assert pauses.running(started) < 2
        assert rig.transport.existing == set()
        with pytest.raises(MoveRefused, match="shutting down"):
            await rig.sessions.create(NEW)


async def test_closing_does_not_wait_for_a_hung_link_or_load(pauses: Pauses) -> None:
    settings = SessionSettings(close_within=0.3)
    async with rigged(settings) as rig:
        link = await rig.running()
        connect = rig.transport.connect

        @asynccontextmanager
        async def hanging(*args: object, **kwargs: object) -> AsyncIterator[MemoryLink]:
            async with connect(*args, **kwargs) as made:  # type: ignore[arg-type]
                yield made
                while True:
                    try:
                        await asyncio.sleep(3)
                        return
                    except asyncio.CancelledError:
                        continue

        rig.transport.connect = hanging  # type: ignore[method-assign]
        hung = await rig.running(replace(NEW, session_id="hanging"))
        rig.loader.gate = threading.Event()
        creating = asyncio.create_task(rig.sessions.create(replace(NEW, session_id="loading", policy_path="other")))
        await until(lambda: "other" in rig.loader.loads)
        started = time.monotonic()
        await rig.sessions.close()
        assert pauses.running(started) < 2.5
        assert held(link, -1) == held(hung, -1) == [POSE]
        assert link.is_closed
        with pytest.raises(ServiceError):
            await creating
        rig.loader.gate.set()
        await until(lambda: hung.is_closed)


async def test_many_sessions_leave_no_task_thread_or_room(rig: Rig) -> None:
    async def run_session(number: int) -> None:
        await rig.sessions.create(replace(NEW, session_id=f"s{number % 3}"))
        link = rig.transport.link
        link.deliver_joints(POSE)
        link.deliver_frame("front", np.zeros((48, 64, 3), np.uint8))
        await rig.sessions.start(f"s{number % 3}")
        await asyncio.sleep(0.012)
        await rig.sessions.delete(f"s{number % 3}")

    await run_session(0)
    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
    for number in range(30):
        await run_session(number)
    await until(lambda: threading.active_count() <= threads)
    assert len(asyncio.all_tasks()) <= tasks
    assert rig.sessions.list() == []
    assert rig.transport.existing == set()


def teardown_module() -> None:
    gc.unfreeze()
