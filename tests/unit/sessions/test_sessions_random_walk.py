"""Random walks over all requests to sessions and all events, compared with a simple model."""

import asyncio
import gc
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hooks.database import Database
from hooks.errors import StoreError
from jaxmodels.errors import ConfigError
from service.control.config import ControlSettings
from service.control.controller import ControlEvent
from service.errors import MoveRefused, PolicyError, SessionExists, UnknownSession
from service.inference.engine import Engine
from service.sessions.records import SCHEMA, SessionRecords
from service.sessions.store import NewSession, Sessions, SessionSettings
from service.stage import Move
from tests.testing.doubles import MemoryLink, MemoryTransport, ScriptedLoader, ScriptedPolicy
from tests.testing.rig import POSE
from tests.testing.waiting import until

pytestmark = pytest.mark.timed

SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else None  # A real disk only makes the test slower.
IDS = st.sampled_from(["a", "b"])
MOVING = ("running", "reconnecting", "degraded")
NOT_LOADED = ("failed", "interrupted")
# Number of walks with 25 steps each. ROBOJAX_WALKS=500 takes minutes.
WALKS = int(os.environ.get("ROBOJAX_WALKS", "25"))


class Walk(RuleBasedStateMachine):
    """Two ids: each is absent, failed, interrupted, or a live session with a known stage and latch.

    A server that starts after a kill finds only the state on the disk.
    """

    settings_ = SessionSettings(control=ControlSettings(rate=200, frame_age_limit=30), close_within=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.transport = MemoryTransport()
        self.loader = ScriptedLoader(ScriptedPolicy)
        self.disk = Path(tempfile.mkdtemp(dir=SHARED))
        self.sessions = self.runner.run(self.make())
        self.stages: dict[str, str] = {}
        self.latched: set[str] = set()
        self.down: set[str] = set()
        self.links: dict[str, MemoryLink] = {}
        self.in_rooms: set[str] = set()  # Ids whose rooms exist.

    async def make(self) -> Sessions:
        return Sessions(
            transport=self.transport,
            load=self.loader,
            engine=Engine(),
            settings=self.settings_,
            records=SessionRecords(Database(self.disk / "sessions.sqlite3", SCHEMA), StoreError),
        )

    def teardown(self) -> None:
        for id in [id for id, stage in self.stages.items() if stage == "interrupted"]:
            self.delete(id)
        self.runner.run(self.sessions.close())
        assert self.transport.existing == set()
        assert self.runner.run(count_tasks()) == 1
        self.runner.close()
        shutil.rmtree(self.disk)

    @rule(in_order=st.booleans())
    def replace_server(self, in_order: bool) -> None:
        ended, self.disk = self.disk, Path(tempfile.mkdtemp(dir=SHARED))
        rooms = set(self.transport.existing)
        if not in_order:
            self.copy(ended)
        self.runner.run(self.sessions.close())
        if in_order:
            self.copy(ended)
        else:
            self.transport.existing = rooms  # The killed server has not removed its rooms.
        shutil.rmtree(ended)
        self.stages = {id: "interrupted" for id, stage in self.stages.items() if stage != "failed"}
        if in_order:
            self.in_rooms -= set(self.links)
        self.links, self.down = {}, set()
        self.sessions = self.runner.run(self.make())

    def copy(self, ended: Path) -> None:
        for file in ended.glob("sessions.sqlite3*"):
            shutil.copy(file, self.disk)

    def refused(self, call, error: type[Exception] = MoveRefused) -> None:
        try:
            self.runner.run(call)
        except error:
            return
        raise AssertionError(f"the request was not refused with {error.__name__}")

    @rule(id=IDS, fails=st.booleans())
    def create(self, id: str, fails: bool) -> None:
        call = self.sessions.create(NewSession(id, "p", "memory://"))
        if self.stages.get(id, "failed") not in NOT_LOADED:
            self.refused(call, SessionExists)
            return
        if fails and not self.links:
            # Only the first session loads the policy, and the others share it.
            self.loader.failure = ConfigError("bad")
            self.refused(call, PolicyError)
            self.loader.failure = None
            self.stages.setdefault(id, "failed")  # An interrupted session stays interrupted.
            return
        self.runner.run(call)
        self.note_joined(id)

    def note_joined(self, id: str) -> None:
        self.stages[id] = "stopped" if id in self.latched else "ready"
        self.links[id] = self.transport.link
        self.in_rooms.add(id)
        self.links[id].deliver_joints(POSE)
        self.links[id].deliver_frame("front", np.zeros((48, 64, 3), np.uint8))

    def moving_stage(self, id: str) -> str:
        return "reconnecting" if id in self.down else "running"

    def ask(self, id: str, call, is_allowed: bool) -> bool:
        """Run a call that is allowed, or check that it is refused; return whether it is allowed."""
        if id in self.stages and is_allowed:
            self.runner.run(call)
            return True
        self.refused(call, MoveRefused if id in self.stages else UnknownSession)
        return False

    @rule(id=IDS)
    def start(self, id: str) -> None:
        is_allowed = self.stages.get(id) in ("ready", "stopped") and id not in self.latched
        if self.ask(id, self.sessions.start(id), is_allowed):
            self.stages[id] = self.moving_stage(id)

    @rule(id=IDS)
    def restart(self, id: str) -> None:
        stage = self.stages.get(id)
        if self.ask(id, self.sessions.restart(id), stage != "failed" and id not in self.latched):
            if stage == "interrupted":
                self.note_joined(id)
            else:
                self.stages[id] = self.moving_stage(id)

    @rule(id=IDS)
    def stop(self, id: str) -> None:
        if self.ask(id, self.sessions.stop(id), self.stages.get(id) not in (*NOT_LOADED, "error")):
            self.stages[id] = "stopped"

    @rule(id=IDS)
    def delete(self, id: str) -> None:
        if self.ask(id, self.sessions.delete(id), True):
            del self.stages[id]
            self.in_rooms.discard(id)
            self.down.discard(id)
            self.links.pop(id, None)

    @rule(id=st.none() | IDS, from_room=st.booleans())
    def emergency_stop(self, id: str | None, from_room: bool) -> None:
        if id is not None and from_room and id in self.links:
            self.links[id].deliver_emergency_stop()
        elif id is not None and id not in self.stages:
            self.refused(self.sessions.emergency_stop("x", id), UnknownSession)
            return
        else:
            self.runner.run(self.sessions.emergency_stop("x", id))
        for stopped in list(self.stages) if id is None else [id]:
            self.latched.add(stopped)
            if self.stages[stopped] not in (*NOT_LOADED, "error"):
                self.stages[stopped] = "stopped"

    @rule(id=IDS)
    def reset(self, id: str) -> None:
        if self.ask(id, self.sessions.reset(id), self.stages.get(id) not in MOVING):
            self.latched.discard(id)

    @precondition(lambda self: self.links)
    @rule(id=IDS, up=st.booleans())
    def link(self, id: str, up: bool) -> None:
        if id not in self.links:
            return
        if up:
            self.links[id].come_up()
            self.down.discard(id)
            self.links[id].deliver_joints(POSE)
        else:
            self.links[id].go_down()
            self.down.add(id)
        # A blind session stays degraded if its link was up all the time.
        if self.stages[id] in MOVING and (self.stages[id] != "degraded" or not up):
            self.stages[id] = self.moving_stage(id)

    @rule(id=IDS, is_blind=st.booleans())
    def set_blind(self, id: str, is_blind: bool) -> None:
        if id not in self.links:
            return
        session = self.sessions.get_live(id)
        move, reason = (Move.BLINDED, "it sees nothing") if is_blind else (Move.RECOVERED, None)
        session._apply_event(ControlEvent(move, reason))
        stages = {("running", True): "degraded", ("degraded", False): "running"}
        self.stages[id] = stages.get((self.stages[id], is_blind), self.stages[id])

    @precondition(lambda self: any(stage == "running" for stage in self.stages.values()))
    @rule()
    def fail_policy(self) -> None:
        running = [id for id, stage in self.stages.items() if stage == "running"]
        robot_io = self.sessions.get(running[0]).robot_io
        policy = robot_io.runner.loaded.policy
        assert isinstance(policy, ScriptedPolicy)
        policy.failures = [ValueError("x")] * 1000
        self.runner.run(until(lambda: all(str(self.sessions.get(id).stage) == "error" for id in running)))
        policy.failures = []
        for id in running:
            self.stages[id] = "error"

    @rule(seconds=st.floats(0, 0.03))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @invariant()
    def stages_are_as_expected(self) -> None:
        expected = {id: "error" if stage == "failed" else stage for id, stage in self.stages.items()}
        assert {session.id: str(session.stage) for session in self.sessions.list()} == expected
        assert {session.id for session in self.sessions.list() if session.is_latched} == self.latched & set(expected)

    @invariant()
    def rooms_exist_for_live_and_restorable_sessions(self) -> None:
        # Rooms of sessions that are deleted or replaced after a kill are removed in the background.
        self.runner.run(until(lambda: len(self.transport.existing) == 3 * len(self.in_rooms)))

    @invariant()
    def only_valid_commands_were_sent(self) -> None:
        for link in self.links.values():
            for sent in link.sent[-5:]:
                assert all(-100 <= value <= 100 for value in sent.values.values())

    @invariant()
    def idle_sessions_send_no_commands(self) -> None:
        for id, link in self.links.items():
            robot_io = self.sessions.get_live(id).robot_io
            assert robot_io is not None
            if self.stages[id] not in MOVING and robot_io.controller.is_idle:
                sent = len(link.sent)
                self.runner.run(asyncio.sleep(0))
                assert len(link.sent) == sent


async def count_tasks() -> int:
    return len(asyncio.all_tasks())


Walk.TestCase.settings = settings(
    max_examples=WALKS, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestWalk = Walk.TestCase


def teardown_module() -> None:
    gc.unfreeze()
