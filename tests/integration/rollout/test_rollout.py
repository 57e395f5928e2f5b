"""Another policy for a running robot: swapped in at a chunk boundary, refused, or rolled back."""

import asyncio
import gc
import json
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.errors import PolicyFailed
from service.inference.batching import LatencyModel
from service.inference.device_worker import DeviceGone
from service.rollout.gates import GateLimits, GateVerdict, ProbationSettings
from service.rollout.rollout import LATENCY_RUNS, Rollout, RolloutSettings
from service.sessions.store import NewSession, Session
from service.stage import Stage
from tests.faults.meter import Meter
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.pauses import Pauses
from tests.testing.rig import POSE, SessionRig
from tests.testing.waiting import until

SHA, NEXT = "a" * 40, "b" * 40
NEW = NewSession("s", "owner/name", "memory://", rate=100, auto_update="swap")
# On a busy machine, latency is no reason for a refusal.
UNHURRIED = GateLimits(slow=10.0)


class Rig(SessionRig):
    def __init__(self, settings: RolloutSettings, stuck_after: float) -> None:
        super().__init__(NEW, stuck_after=stuck_after)
        self.policy = ScriptedPolicy(commit=SHA)
        self.rollout = Rollout(self.sessions, settings)
        self.progress: list[str] = []

    async def swapped(self, policy: ScriptedPolicy | None = None) -> Session:
        session = await self.running()
        await self.swap_in(policy)
        return session

    async def swap_in(self, policy: ScriptedPolicy | None = None, sha: str = NEXT) -> None:
        verdict = await self.prepare(policy or ScriptedPolicy(), sha)
        assert verdict.reason is None, verdict.text
        assert (await self.rollout.swap("s", sha)).reason is None

    @property
    def sha(self) -> str | None:
        return self.rollout.list_following()[0].sha

    async def prepare(self, policy: ScriptedPolicy, sha: str = NEXT):
        self.policies[f"/files/{sha}"] = policy
        return await self.rollout.prepare("s", "owner/name", sha, Path(f"/files/{sha}"), self.progress.append)


class LostTicks:
    """Count ticks lost to the machine: waits for a core by the kernel's counters, and pauses of all cores."""

    def __init__(self, pauses: Pauses) -> None:
        self._meter = Meter(lambda: [os.getpid()])
        self._meter.look()
        self._pauses, self._began = pauses, time.monotonic()

    @property
    def ticks(self) -> int:
        self._meter.look()
        taken = self._meter.waited[-1][1] + self._pauses.lost(self._began)
        # A pause begins before the timer is due and ends within a tick.
        return int(taken * (NEW.rate or 0)) + 2 * sum(end > self._began for _, end in self._pauses._stood)


def rigged(
    *,
    patience: float = 20.0,
    seconds: float = 0.3,
    fade: float = 0.2,
    step: float = 0.15,
    missed: float = 1e3,  # Ticks missed by a busy machine cause no rollback.
    standing: float = 1e3,  # Long waits cause no rollback either.
    limits: GateLimits | None = None,
    stuck_after: float = 5.0,
) -> Rig:
    probation = ProbationSettings(
        seconds=seconds, still_timeout=patience, step=step, missed=missed, max_still=standing, starvations=1_000
    )
    return Rig(RolloutSettings(limits or UNHURRIED, swap_timeout=patience, fade=fade, probation=probation), stuck_after)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as made:
        yield made


@pytest.fixture
async def watched() -> AsyncIterator[Rig]:
    async with rigged(seconds=30.0) as made:
        yield made


async def test_better_policy_takes_over_at_a_chunk_boundary(rig: Rig) -> None:
    session = await rig.running()
    (following,) = rig.rollout.list_following()
    assert (following.repo, following.ref, following.sha, following.mode) == ("owner/name", None, SHA, "swap")
    better = ScriptedPolicy(step=0.2)
    verdict = await rig.prepare(better)
    assert verdict.reason is None, verdict.text
    assert verdict.figures["compared"] > 0  # type: ignore[operator]
    assert rig.progress == ["loading", "reading", "compiling", "checking"] or "checking" in rig.progress
    assert session.policies.staged is not None
    assert "device" not in {name for name in better.threads}, "the trial does not run on the thread of the robots"
    verdict = await rig.rollout.swap("s", NEXT)
    assert verdict.reason is None, verdict.text
    assert "device" in better.threads
    verdict = await rig.rollout.probation("s", NEXT)
    assert verdict.reason is None, verdict.text
    stats = session.status().stats
    assert (stats["policy_commit"], stats["policy_before"], stats["policy_changes"]) == (NEXT, SHA, 1)
    assert rig.sha == NEXT


async def test_reserved_capacity_follows_the_policy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a policy that is twice as fast would leave no additional capacity."""
    learn = LatencyModel.record

    def learn_from_profiling(costs: LatencyModel, size: int, seconds: float) -> None:
        """Learn latencies from profiling alone, because requests of robots are slower on a busy machine."""
        if not threading.current_thread().name.startswith("device"):
            learn(costs, size, seconds)

    monkeypatch.setattr(LatencyModel, "record", learn_from_profiling)
    await rig.running()
    engine, per_second = rig.sessions.engine, rig.sessions.engine.get_stats()["promised_per_second"]
    assert (await rig.prepare(ScriptedPolicy(latency=0.01))).reason is None
    before = engine.get_stats()["promised_load"]
    assert (await rig.rollout.swap("s", NEXT)).reason is None
    after = engine.get_stats()["promised_load"]
    assert isinstance(per_second, float)
    assert after == pytest.approx(per_second * 0.01, rel=0.5)
    assert after != before
    await rig.rollout.rollback("s")
    assert engine.get_stats()["promised_load"] == before
    assert engine.get_stats()["promised_per_second"] == per_second


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        (
            {"cameras": {"front": (48, 64), "wrist": (48, 64)}, "chunk": 7},
            ["cameras", "chunk: the session has 20, the new policy needs 7"],
        ),
        ({"language": True}, ["language: the session has False, the new policy needs True"]),
    ],
)
async def test_other_requirements_are_refused(rig: Rig, changes: dict[str, Any], differences: list[str]) -> None:
    session = await rig.running(replace(NEW, language_instruction="lift"))
    other = ScriptedPolicy(replace(SO100_REQUIREMENTS, **changes))
    verdict = await rig.prepare(other)
    assert (verdict.reason, session.policies.staged, other.acted, rig.sha) == ("requirements", None, 0, SHA)
    assert all(text in verdict.text for text in differences)


NAMES = SO100_REQUIREMENTS.joint_names or ()
UNNAMED = replace(SO100_REQUIREMENTS, joint_names=None)


@pytest.mark.parametrize(
    ("running", "requested", "pushed", "text"),
    [
        (NAMES, NAMES, None, None),
        (None, NAMES, None, None),
        (None, NAMES, tuple(f"{name}.pos" for name in NAMES), None),
        (NAMES, None, tuple(POSE), None),
        (NAMES, None, None, "the new policy names no joints; write them into its robojax.json"),
        (NAMES, None, NAMES[::-1], "the new policy needs ('gripper', "),
        (None, NAMES, NAMES[::-1], "the new policy needs ('gripper', "),
    ],
    ids=["inherited", "both unnamed", "other spelling", "wire names", "unnamed", "other order", "not as requested"],
)
async def test_pushed_policy_has_the_joints_of_the_session(rig: Rig, running, requested, pushed, text) -> None:
    rig.policies["owner/name"] = ScriptedPolicy(replace(SO100_REQUIREMENTS, joint_names=running), commit=SHA)
    session = await rig.running(replace(NEW, joint_names=requested))
    verdict = await rig.prepare(ScriptedPolicy(replace(SO100_REQUIREMENTS, joint_names=pushed)))
    if text is not None:
        assert (verdict.reason, session.policies.staged) == ("requirements", None)
        assert text in verdict.text
        return
    assert verdict.reason is None, verdict.text
    assert (await rig.rollout.swap("s", NEXT)).reason is None
    await session.adjust({"action_steps": 5})
    assert list(session.status().stats["safety"]["limits"]) == list(POSE)  # type: ignore[index]


async def test_policy_that_cannot_read_the_instruction_is_refused(rig: Rig) -> None:
    reads = replace(SO100_REQUIREMENTS, language=True)
    rig.policies["owner/name"] = ScriptedPolicy(reads, commit=SHA)
    session = await rig.sessions.create(replace(NEW, language_instruction="lift"))  # Without an observation.
    verdict = await rig.prepare(ScriptedPolicy(reads, unreadable="lift"))
    assert (verdict.reason, session.policies.staged) == ("policy_failed", None)
    assert "no instruction" in verdict.text
    better = ScriptedPolicy(reads)
    assert (await rig.prepare(better)).reason is None
    assert set(better.told) == {("lift",)}


@pytest.mark.parametrize("policy", [ScriptedPolicy(compile_failure=DeviceGone("gone")), ScriptedPolicy(step=30.0)])
async def test_lost_device_is_not_blamed_on_the_policy(policy: ScriptedPolicy, rig: Rig) -> None:
    session = await rig.running()
    rig.sessions.engine.replica_manager.retire_device(policy.device, "the device is gone")
    verdict = await rig.prepare(policy)
    assert (verdict.reason, verdict.text) == ("busy", "no device works: the device is gone")
    assert session.policies.staged is None


async def test_lost_engines_are_not_blamed_on_the_policy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.running()
    engine = rig.sessions.engine
    monkeypatch.setattr(engine, "get_stats", lambda facts=engine.get_stats: {**facts(), "devices": []})
    verdict = await rig.prepare(ScriptedPolicy(compile_failure=DeviceGone("gone")))
    assert (verdict.reason, verdict.text) == ("busy", "no device works: none is there")


async def test_lost_device_on_probation_is_not_blamed_on_the_policy(rig: Rig) -> None:
    await rig.swapped(later := ScriptedPolicy())
    rig.sessions.engine.replica_manager.retire_device(later.device, "the device is gone")
    later.failures.extend(PolicyFailed("the device is gone") for _ in range(50))
    verdict = await rig.rollout.probation("s", NEXT)
    assert (verdict.reason, verdict.text) == ("busy", "no device works: the device is gone")


async def test_policy_counts_as_slow_after_two_slow_trials(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.running()
    engine, tried = rig.sessions.engine, list[float]()

    async def run_trial(loaded, observation, real=engine.run_trial):
        chunk, _ = await real(loaded, observation)
        tried.append(60.0 if len(tried) in slow else 0.001)
        return chunk, tried[-1]

    monkeypatch.setattr(engine, "run_trial", run_trial)
    slow = range(LATENCY_RUNS - 2, LATENCY_RUNS)  # As if the machine had paused.
    verdict = await rig.prepare(ScriptedPolicy())
    assert verdict.reason is None, verdict.text
    assert verdict.figures["inference_p90_ms"] == 1.0
    assert len(tried) == 2 * LATENCY_RUNS
    tried.clear()
    slow = range(1000)
    verdict = await rig.prepare(ScriptedPolicy(), sha="c" * 40)
    assert (verdict.reason, len(tried)) == ("slow", 2 * LATENCY_RUNS)


class Poisoned(ScriptedPolicy):
    def act(self, observation):
        return np.full_like(super().act(observation), np.nan)


class Short(ScriptedPolicy):
    def act(self, observation):
        return super().act(observation)[:, :3]


class Raising(ScriptedPolicy):
    def act(self, observation):
        raise ValueError("a secret of the file")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Poisoned(), "not_finite"),
        (Short(), "shape"),
        (Raising(), "policy_failed"),
        (ScriptedPolicy(step=3.0), "differs"),
        (ScriptedPolicy(step=30.0), "out_of_range"),
        (ScriptedPolicy(latency=0.15), "slow"),
        (ScriptedPolicy(compile_failure=ValueError("a secret of the file")), "load"),
    ],
)
async def test_bad_policy_is_refused_while_the_old_runs(policy: ScriptedPolicy, reason: str, pauses: Pauses) -> None:
    async with rigged(limits=GateLimits() if reason == "slow" else UNHURRIED) as rig:
        session = await rig.running()
        missed, verdict = [], GateVerdict("unknown", "")
        # A slow first inference would raise the reference for all later ones.
        usual = session.robot_io.runner.seconds["total"]
        await until(lambda: (usual.percentile(90) or 0.0) < 0.05)
        while not missed or (missed[-1] > 1 and len(missed) < 5):  # A busy machine may miss some ticks.
            before, kept_waiting = session.robot_io.controller.missed_ticks, LostTicks(pauses)
            verdict = await rig.prepare(policy)
            missed.append(session.robot_io.controller.missed_ticks - before - kept_waiting.ticks)
            assert verdict.reason == reason, verdict.text
        assert missed[-1] <= 1, missed
        assert "secret" not in verdict.text
        assert session.policies.staged is None
        assert (await rig.rollout.swap("s", NEXT)).reason == "not_staged"
        sent = len(rig.transport.link.sent)
        await until(lambda: len(rig.transport.link.sent) > sent + 5)
        assert session.robot_io.controller.hold is None


async def test_only_many_missed_ticks_cause_a_rollback() -> None:
    async with rigged(seconds=30.0, missed=0.02, limits=UNHURRIED) as rig:
        session = await rig.swapped()
        control = session.robot_io.controller
        allowed = int(0.02 * 30.0 / control.period)
        probation = asyncio.create_task(rig.rollout.probation("s", NEXT))
        control.missed_ticks += allowed // 2  # All at once, directly after the swap.
        looked = control.ticks + 20
        await until(lambda: control.ticks > looked)
        assert not probation.done()
        control.missed_ticks += allowed
        verdict = await probation
        assert verdict.reason == "missed_ticks"
        assert f"{allowed} may be" in verdict.text
        assert session.policies.running.commit == SHA


async def test_policy_whose_actions_are_always_late_fails_probation() -> None:
    async with rigged(seconds=30.0, patience=1.5, standing=0.5) as rig:
        session = await rig.swapped(late := ScriptedPolicy())
        # At each response, all actions of the chunk are over, so the queue runs dry only once.
        late.latency = 1.2 * session.robot_io.controller.config.chunk / session.robot_io.controller.config.action_rate
        verdict = await rig.rollout.probation("s", NEXT)
        assert verdict.reason == "starved", verdict
        assert "0.5 s are allowed" in verdict.text
        assert rig.sha == SHA
        sent = len(rig.transport.link.sent)
        await until(lambda: len(rig.transport.link.sent) > sent + 10)


async def test_response_after_an_unrelated_hold_may_be_late() -> None:
    async with rigged(seconds=1.5, standing=0.1) as rig:
        session = await rig.swapped(slow := ScriptedPolicy())
        control = session.robot_io.controller
        slow.latency = 0.5 * control.config.chunk / control.config.action_rate
        judging = asyncio.ensure_future(rig.rollout.probation("s", NEXT))
        for _ in range(3):
            control.obstruct("away", "the link is down")
            await until(lambda: control.hold is not None)
            control.clear("away")
            await until(lambda: control.hold is None and control.scheduler.in_flight)
            await asyncio.sleep(slow.latency)
        verdict = await judging
        assert verdict.reason is None, verdict
        assert session.policies.running.commit == NEXT


@pytest.mark.parametrize("by", ["emergency_stop", "taken_back"])
async def test_person_ends_a_probation(watched: Rig, by: str) -> None:
    rig = watched
    session = await rig.swapped()
    watching = asyncio.create_task(rig.rollout.probation("s", NEXT))
    await asyncio.sleep(0.05)
    if by == "emergency_stop":
        await rig.sessions.emergency_stop("a hand in the way")
    else:
        assert (await rig.rollout.rollback("s")).reason is None
    assert (await watching).reason == by
    assert (rig.sha, session.is_latched) == (SHA, by == "emergency_stop")


async def test_plain_stop_only_pauses_the_probation(rig: Rig) -> None:
    await rig.swapped()
    watching = asyncio.create_task(rig.rollout.probation("s", NEXT))
    await rig.sessions.stop("s")
    await asyncio.sleep(0.5)
    assert not watching.done()
    await rig.sessions.start("s")
    assert (await watching).reason is None
    assert rig.sha == NEXT


async def test_jump_on_probation_causes_a_rollback() -> None:
    async with rigged(step=0.01, seconds=30.0) as rig:
        await rig.swapped(jumpy := ScriptedPolicy(step=0.1))
        jumpy.step = 4.0
        rig.policies["owner/name"].latency = 0.15
        verdict = await rig.rollout.probation("s", NEXT)
        assert verdict.reason == "jump"
        assert "'" in verdict.text
        assert rig.sha == SHA
        # Until the old policy has answered, the rest of the jumping chunk is not executed.
        sent = len(rig.transport.link.sent)
        await asyncio.sleep(0.08)
        assert len(rig.transport.link.sent) == sent
        await until(lambda: len(rig.transport.link.sent) > sent + 5)


async def test_policy_of_a_manual_rollback_is_still_in_memory(rig: Rig, pauses: Pauses) -> None:
    await rig.running()
    assert (await rig.rollout.rollback("s")).reason == "no_previous"
    await rig.swap_in()
    began = time.monotonic()
    assert (await rig.rollout.rollback("s")).reason is None
    assert pauses.running(began) < 1.0
    assert rig.sha == SHA


async def test_stopped_and_new_robots_swap_at_once(rig: Rig) -> None:
    await rig.sessions.create(NEW)
    verdict = await rig.prepare(ScriptedPolicy())
    assert verdict.reason is None
    assert "not compared" in verdict.text
    assert (await rig.rollout.swap("s", NEXT)).reason is None
    assert rig.sha == NEXT


async def test_held_robot_allows_a_rollback_but_no_swap() -> None:
    async with rigged(patience=0.3) as rig:
        session = await rig.swapped()
        third = "c" * 40
        assert (await rig.prepare(ScriptedPolicy(), third)).reason is None
        rig.robots[0].cancel()
        await until(lambda: session.status().stats["hold_code"] == "camera_stale")
        verdict = await rig.rollout.swap("s", third)
        assert (verdict.reason, "camera 'front'" in verdict.text, rig.sha) == ("busy", True, NEXT)
        assert (await rig.rollout.rollback("s")).reason is None
        assert rig.sha == SHA


async def test_session_deleted_during_a_load_leaves_nothing(rig: Rig) -> None:
    await rig.running()
    gate = threading.Event()
    load = rig.load

    def slow(path: str, revision: str | None = None, /, *, like: object = None, on_progress: object = None):
        assert gate.wait(30)
        return load(path, revision)

    rig.sessions.get("s").policies._load = slow
    preparing = asyncio.create_task(rig.prepare(ScriptedPolicy()))
    await asyncio.sleep(0.05)
    await rig.sessions.delete("s")
    gate.set()
    assert (await preparing).reason == "busy"
    assert rig.sessions.engine.get_stats()["policies_loaded"] == 0


async def test_each_move_of_a_session_sends_an_event(rig: Rig) -> None:
    await rig.running()
    await rig.sessions.stop("s")
    await rig.sessions.emergency_stop("test")
    await rig.sessions.delete("s")
    moves = ("created", "started", "stopped", "stopped", "deleted")
    assert [event for event, _ in rig.events] == [f"session.{move}" for move in moves]
    assert rig.events[3][1]["emergency_stop"] is True
    assert rig.events[3][1]["reason"] == "test"


@pytest.mark.parametrize("trouble", ["emergency stop", "error"])
async def test_trouble_before_a_swap_is_not_blamed_on_the_new_policy(rig: Rig, trouble: str) -> None:
    session = await rig.running()
    if trouble == "error":
        rig.policies["owner/name"].failures.extend(RuntimeError("x") for _ in range(50))
        await until(lambda: session.stage is Stage.ERROR)
    else:
        await rig.sessions.emergency_stop("yesterday")
    await rig.swap_in()
    watching = asyncio.create_task(rig.rollout.probation("s", NEXT))
    await asyncio.sleep(0.1)
    if trouble == "error":
        await rig.sessions.restart("s")
    else:
        await rig.sessions.reset("s")
        await rig.sessions.start("s")
    assert (await watching).reason is None
    assert rig.sha == NEXT


async def test_rollback_ends_a_swap_that_waits(rig: Rig, pauses: Pauses) -> None:
    session = await rig.swapped()
    third = "c" * 40
    assert (await rig.prepare(ScriptedPolicy(), third)).reason is None
    rig.robots[0].cancel()
    await until(lambda: session.status().stats["hold_code"] == "camera_stale")
    swapping = asyncio.create_task(rig.rollout.swap("s", third))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    assert (await rig.rollout.rollback("s")).reason is None
    assert pauses.running(began) < 0.5
    assert (await swapping).reason == "busy"
    assert rig.sha == SHA
    assert (await rig.rollout.swap("s", third)).reason == "not_staged"


async def test_late_failure_of_the_old_policy_is_not_blamed_on_the_new(rig: Rig) -> None:
    session = await rig.running()
    gate = threading.Event()

    class Late(ScriptedPolicy):
        def act(self, observation):
            gate.wait(30)
            raise RuntimeError("x")

    old = session.policies.running
    assert (await rig.prepare(ScriptedPolicy())).reason is None
    old.loaded.policy = Late()
    asked = session.robot_io.controller
    await until(lambda: asked.scheduler.in_flight)
    await asyncio.sleep(0.1)
    await rig.sessions.stop("s")
    assert (await rig.rollout.swap("s", NEXT)).reason is None
    gate.set()
    await until(lambda: not asked.scheduler.in_flight)
    await rig.sessions.start("s")
    assert (await rig.rollout.probation("s", NEXT)).reason is None


async def test_new_frame_sizes_do_not_prevent_swap_or_rollback(rig: Rig) -> None:
    session = await rig.running()
    assert (await rig.prepare(ScriptedPolicy())).reason is None
    rig.size = (24, 32)
    await until(lambda: session.robot_io is not None and session.robot_io.buffer.sizes == {"front": (24, 32)})
    assert (await rig.rollout.swap("s", NEXT)).reason is None
    rig.size = (96, 128)
    await until(lambda: session.robot_io is not None and session.robot_io.buffer.sizes == {"front": (96, 128)})
    assert (await rig.rollout.rollback("s")).reason is None
    assert rig.sha == SHA


LONG = replace(SO100_REQUIREMENTS, chunk=300, action_steps=300)


async def test_rollback_drops_the_chunk_of_the_removed_policy(pauses: Pauses) -> None:
    async with rigged() as rig:
        rig.policies["owner/name"] = ScriptedPolicy(LONG, step=0.01, commit=SHA)
        session = await rig.running()
        await rig.sessions.stop("s")
        await rig.swap_in(ScriptedPolicy(LONG, step=0.01))
        await rig.sessions.start("s")
        await until(lambda: session.robot_io is not None and session.robot_io.controller.queue.left > 200)
        began = time.monotonic()
        assert (await rig.rollout.rollback("s")).reason is None
        assert pauses.running(began) < 0.5
        assert rig.sha == SHA


class LaterWild(ScriptedPolicy):
    def act(self, observation):
        chunk = super().act(observation)
        chunk[:, 5:] += 150
        return chunk


ENSEMBLE = replace(SO100_REQUIREMENTS, chunk=300, action_steps=1, temporal_ensemble_coeff=0.01)


async def test_ensembling_judges_each_action_of_a_chunk() -> None:
    async with rigged() as rig:
        rig.policies["owner/name"] = ScriptedPolicy(ENSEMBLE, step=0.01, commit=SHA)
        await rig.running()
        assert (await rig.prepare(ScriptedPolicy(ENSEMBLE, step=0.01))).reason is None
        assert (await rig.prepare(LaterWild(ENSEMBLE, step=0.01), "c" * 40)).reason == "out_of_range"


async def test_ensembling_drops_predictions_of_a_removed_policy(pauses: Pauses) -> None:
    async with rigged(fade=0.0) as rig:
        rig.policies["owner/name"] = ScriptedPolicy(ENSEMBLE, step=0.01, commit=SHA)
        await rig.swapped(later := ScriptedPolicy(ENSEMBLE, step=0.01))
        later.step = 0.45  # 300 steps stay within the believable range.
        await until(lambda: max(rig.transport.link.sent[-1].values.values()) > 30)
        assert (await rig.rollout.rollback("s")).reason is None
        began = time.monotonic()
        assert rig.sha == SHA
        # Otherwise, the average would include predictions of the removed policy for 3 s.
        await until(lambda: max(rig.transport.link.sent[-1].values.values()) < 10)
        assert pauses.running(began) < 1.0


async def test_jump_of_a_joint_without_a_range_causes_a_rollback() -> None:
    async with rigged(seconds=30.0) as rig:
        needs = replace(SO100_REQUIREMENTS, joint_names=(*tuple(POSE)[:5], "lift"))
        rig.policies["owner/name"] = ScriptedPolicy(needs, commit=SHA)
        rig.pose = {**POSE, "lift": 6.0}
        del rig.pose["Jaw"]
        await rig.running()
        later = ScriptedPolicy(needs)
        verdict = await rig.prepare(later)
        assert verdict.reason is None, verdict.text
        assert (await rig.rollout.swap("s", NEXT)).reason is None
        later.step = 40.0
        assert (await rig.rollout.probation("s", NEXT)).reason == "jump"


async def test_new_session_with_the_same_id_gets_no_older_update(rig: Rig) -> None:
    await rig.running()
    await rig.sessions.delete("s")
    rig.policies["other/name"] = ScriptedPolicy(commit="d" * 40)
    session = await rig.running(replace(NEW, policy_path="other/name"))
    assert (await rig.prepare(ScriptedPolicy())).reason == "gone"
    assert session.policies.staged is None


async def test_robot_moved_by_hand_while_stopped_makes_no_jump(rig: Rig) -> None:
    await rig.running()
    assert (await rig.prepare(ScriptedPolicy())).reason is None
    await rig.sessions.stop("s")
    assert (await rig.rollout.swap("s", NEXT)).reason is None
    watching = asyncio.create_task(rig.rollout.probation("s", NEXT))
    await asyncio.sleep(0.1)
    rig.pose = {**POSE, "Rotation": 80.0}
    await asyncio.sleep(0.1)
    await rig.sessions.start("s")
    verdict = await watching
    assert verdict.reason is None, verdict.text
    assert rig.sha == NEXT


async def test_verified_files_are_used_and_not_loaded_again(rig: Rig) -> None:
    session = await rig.running()
    unverified = ScriptedPolicy(commit=NEXT)
    rig.policies["owner/name"] = unverified
    await rig.sessions.create(replace(NEW, session_id="pinned", revision=NEXT, auto_update="off"))
    verified = ScriptedPolicy()
    assert (await rig.prepare(verified)).reason is None
    assert session.policies.staged is not None
    assert session.policies.staged.loaded.policy is verified


async def test_policy_is_freed_after_the_second_replacement(rig: Rig) -> None:
    session = await rig.running()
    seen: list[weakref.ref[ScriptedPolicy]] = []
    for number in range(4):
        seen.append(weakref.ref(session.policies.running.loaded.policy))  # type: ignore[arg-type]
        sha = str(number) * 40
        await rig.swap_in(ScriptedPolicy(), sha)
    rig.policies.clear()
    await asyncio.sleep(0.05)
    gc.collect()
    assert [policy() is None for policy in seen] == [True, True, True, False]


class CompilesInTheMiddle(ScriptedPolicy):
    """Policy that, like a real one, compiles a new frame size at the first request with it."""

    def act(self, observation):
        sizes = {name.rpartition(".")[2]: value.shape[1:3] for name, value in observation.items() if value.ndim == 4}
        if not self.is_compiled(1, sizes):
            time.sleep(30.0)
        return super().act(observation)


async def test_unused_frame_sizes_do_not_make_a_policy_slow(rig: Rig) -> None:
    rig.size = (30, 40)
    session = await rig.running()
    await until(lambda: session.robot_io is not None and len(session.robot_io.runner.recent) >= 2)
    rig.size = (24, 32)
    await until(lambda: session.robot_io is not None and session.robot_io.buffer.sizes == {"front": (24, 32)})
    assert (await rig.prepare(CompilesInTheMiddle())).reason is None


async def test_missing_camera_does_not_make_a_policy_slow(rig: Rig) -> None:
    needs = replace(SO100_REQUIREMENTS, cameras={"front": (48, 64), "wrist": (48, 64)})
    rig.policies["owner/name"] = ScriptedPolicy(needs, commit=SHA)
    await rig.sessions.create(replace(NEW, camera_names=("front", "wrist")))
    rig.transport.link.deliver_frame("front", np.zeros((24, 32, 3), np.uint8))
    assert (await rig.prepare(CompilesInTheMiddle(needs))).reason is None


async def test_invalid_chunks_of_the_running_policy_are_not_compared(rig: Rig) -> None:
    session = await rig.running()
    old = rig.policies["owner/name"]
    old.failures.append(np.full((1, 20, 6), np.nan, np.float32))
    await until(lambda: session.robot_io is not None and session.robot_io.controller.rejected == 1)
    verdict = await rig.prepare(ScriptedPolicy(step=3.0))
    assert verdict.reason == "differs", verdict.text
    json.dumps(dict(verdict.figures), allow_nan=False)
