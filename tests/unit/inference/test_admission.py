import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.step_batching import WholeBatches, simulate
from service.errors import Overloaded
from service.inference.admission import Reservations, compute_admission
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy, Replica
from service.sessions.store import NewSession, Sessions
from service.stage import Stage
from tests.testing.doubles import SO100_REQUIREMENTS, MemoryTransport, ScriptedLoader, ScriptedPolicy
from tests.testing.waiting import until

NEEDS = replace(SO100_REQUIREMENTS, chunk=20, action_steps=5, rate=25.0)


def served(*, replicas: int = 1, **seconds: float) -> LoadedPolicy:
    """Return a policy on this number of devices, with seconds per batch size."""
    policy = ScriptedPolicy()
    copies = [Replica(policy, worker) for worker in range(replicas)]
    for copy in copies:
        for size, value in seconds.items():
            policy.latency = value
            copy.prepare(int(size[1:]), None)
    return LoadedPolicy(policy, copies)


def test_the_cost_of_batches_decides_how_many_robots_fit() -> None:
    policy = served(b1=0.010, b4=0.020)  # 100 or 200 inferences per second.
    nine = compute_admission(policy, 10, [10] * 8, 0, limit=0.9)
    assert (nine.fits, nine.load, nine.per_second) == (True, 0.05, 10)
    assert compute_admission(policy, 10, [10] * 17, 0, limit=0.9).fits
    too_many = compute_admission(policy, 10, [10] * 17 + [5], 0, limit=0.9)
    assert not too_many.fits
    assert too_many.per_second == pytest.approx(5)
    assert "5.0 ms here (in batches of 4), 18 other sessions" in too_many.text
    assert "asks for 10.0 inferences per second and there is time for 5.0" in too_many.text


PI05 = {1: 0.0229, 4: 0.0533, 16: 0.1697}


def admit_fleet(seconds: Mapping[int, float], period: float) -> int:
    """Return how many robots are admitted, one after the other, that ask once in a period and have sent no frame."""
    policy, claims = served(**{f"b{size}": value for size, value in seconds.items()}), Reservations(0.9)
    robots = 0
    while claims.check_admission(policy, 1 / period, read_sizes=lambda: None).fits:
        claims.reserve(robots, policy, 1 / period, lambda: None)
        robots += 1
    return robots


def count_late_answers(seconds: Mapping[int, float], period: float, robots: int) -> int:
    phases = np.random.default_rng(0).random((3, robots))
    return sum(simulate(WholeBatches(seconds), [period] * robots, each, 10.0).late for each in phases)


@pytest.mark.parametrize(
    ("seconds", "period", "robots"),
    [
        (PI05, 0.5, 42),
        (PI05, 0.2, 13),
        ({1: 0.0229, 2: 0.033, 4: 0.0533, 8: 0.092, 16: 0.1697}, 0.3, 23),
        # Larger batches are not measured yet, so they are not promised.
        ({1: 0.0229}, 0.5, 19),
        ({1: 0.00197, 4: 0.0041, 16: 0.0112}, 0.2, 257),
    ],
)
def test_an_admitted_fleet_is_in_time_and_a_larger_one_is_not(seconds, period, robots) -> None:
    assert admit_fleet(seconds, period) == robots
    assert count_late_answers(seconds, period, robots) == 0
    assert count_late_answers(seconds, period, math.ceil(1.2 * robots)) > 0


def test_a_robot_without_frames_is_expected_to_join_the_batches_of_others() -> None:
    policy, claims = served(b1=0.010, b4=0.020), Reservations(0.9)
    latency = policy.replicas[0].latencies[frozenset(LARGE.items())]
    for size, seconds in ((1, 0.010), (4, 0.020)):
        latency.record(size, seconds)
    policy.replicas[0].batch_sizes[frozenset(LARGE.items())] = (1, 4)
    for robot in range(8):
        claims.reserve(robot, policy, 10, lambda: LARGE)
    admission = claims.check_admission(policy, 10, read_sizes=lambda: None)
    assert (admission.load, "480x640 frames, in batches of 4" in admission.text) == (pytest.approx(0.05), True)


BOTH = {"b1": 0.010, "b4": 0.020}


@pytest.mark.parametrize(
    ("costs", "rate", "others", "busy", "limit", "expected"),
    [
        (BOTH, 80, [], 0, 0.9, {"fits": True}),
        (BOTH, 95, [], 0, 0.9, {"fits": False}),
        (BOTH, 110, [], 0, 9.0, {"fits": False, "per_second": pytest.approx(100)}),
        # A batch that is too slow for the fastest robot does not count.
        (BOTH, 1, [20] * 3, 0, 0.9, {"load": pytest.approx(0.005)}),
        (BOTH, 1, [40, 40, 1], 0, 0.9, {"load": pytest.approx(0.010)}),
        # Other policies and additional devices count.
        ({"b1": 0.010}, 50, [], 0.5, 0.9, {"fits": False}),
        ({"b1": 0.010, "replicas": 2}, 50, [80, 30], 0, 0.9, {"fits": True}),
        # The costs are unknown.
        ({}, 1000, [], 0, 0.9, {"fits": True}),
    ],
)
def test_admission_counts_batches_others_and_devices(costs, rate, others, busy, limit, expected) -> None:
    admission = compute_admission(served(**costs), rate, others, busy, limit=limit)
    assert {name: getattr(admission, name) for name in expected} == expected


LARGE = {"front": (480, 640)}


class SizedPolicy(ScriptedPolicy):
    """Policy that takes its latency, and four times its latency for frames of 480x640."""

    def profile(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, **plan: bool) -> float:
        return self.latency * (4 if cameras == LARGE else 1)


def policy_of_two_sizes() -> LoadedPolicy:
    """Return a policy that takes 10 ms, or 40 ms with large frames."""
    policy = served(b1=0.010)
    for replica in policy.replicas:
        replica.policy = SizedPolicy(latency=0.010)
        replica.prepare(1, LARGE)
    return policy


def test_frames_of_another_size_count_with_their_own_cost() -> None:
    large = frozenset(LARGE.items())
    assert compute_admission(policy_of_two_sizes(), 10, [], 0, limit=0.9).load == pytest.approx(0.1)
    expected = compute_admission(policy_of_two_sizes(), 10, [10], 0.5, limit=0.9, frames=large)
    assert (expected.fits, expected.load) == (False, pytest.approx(0.4))
    assert expected.per_second == 0
    assert "takes 40.0 ms here (480x640 frames, in batches of 1)" in expected.text
    assert compute_admission(policy_of_two_sizes(), 26, [], 0, limit=9.0, frames=large).per_second == pytest.approx(25)


def test_only_robots_with_frames_of_one_size_share_batches() -> None:
    policy, claims = served(b1=0.010, b2=0.010), Reservations(0.9)
    policy.replicas[0].latencies[frozenset(LARGE.items())].record(1, 0.040)
    claims.reserve("small", policy, 5, lambda: {"front": (48, 64)})
    assert claims.check_admission(policy, 5, read_sizes=lambda: {"front": (48, 64)}).load == pytest.approx(5 * 0.005)
    large = claims.check_admission(policy, 5, read_sizes=lambda: LARGE)
    assert (large.load, "0 other sessions" in large.text) == (pytest.approx(5 * 0.040), True)
    claims.reserve("large", policy, 5, lambda: LARGE)
    assert claims.load == pytest.approx(5 * 0.010 + 5 * 0.040)
    assert claims.per_second == 10


def test_reservations_follow_the_frames_that_arrive() -> None:
    policy, claims, shown = policy_of_two_sizes(), Reservations(0.9), dict[str, tuple[int, int]]()
    claims.reserve("robot", policy, 10, lambda: shown or None)
    assert claims.load == pytest.approx(0.1), "no other frame has arrived"
    shown |= LARGE
    assert claims.load == pytest.approx(0.4)
    claims.move("robot", other := policy_of_two_sizes())
    assert claims.load == pytest.approx(0.4), "the robot keeps its camera"
    assert not claims.check_admission(other, 15, read_sizes=lambda: LARGE).fits
    assert claims.check_admission(other, 15, read_sizes=lambda: LARGE, holder="robot").fits
    claims.release("robot")
    assert claims.load == 0


def test_unknown_frames_are_expected_to_cost_the_most() -> None:
    policy, claims, shown = policy_of_two_sizes(), Reservations(0.9), {"front": (48, 64)}

    def unknown(served: LoadedPolicy = policy) -> float:
        return claims.check_admission(served, 10, read_sizes=lambda: None).load

    claims.reserve("gone", policy_of_two_sizes(), 10, lambda: None)
    assert (claims.load, claims.per_second) == (0, 10), "a policy without a model costs no time"
    claims.reserve("robot", policy, 10, lambda: shown)
    assert unknown() == pytest.approx(0.1)
    shown |= LARGE
    assert unknown() == pytest.approx(0.4)
    claims.reserve("hidden", policy, 10, lambda: None)
    assert claims.load == pytest.approx(0.8)
    assert unknown(served(b1=0.010)) == pytest.approx(0.1), "frames of another policy do not count"
    shown["front"] = (48, 64)
    assert claims.load == pytest.approx(0.2), "no robot sends large frames now"


def test_unmeasured_frames_are_expected_to_cost_the_most() -> None:
    """The robot is held until the frame size is compiled, and then the cost is measured."""
    policy, claims, shown = policy_of_two_sizes(), Reservations(0.9), {"front": (960, 1280)}
    claims.reserve("robot", policy, 10, lambda: shown)
    assert claims.load == pytest.approx(0.1)
    claims.reserve("other", policy, 1, lambda: LARGE)
    assert claims.load == pytest.approx(11 * 0.04)
    policy.replicas[0].latencies[frozenset(shown.items())].record(1, 0.050)
    assert claims.load == pytest.approx(0.5 + 0.04)


def make_sessions() -> Sessions:
    """Return sessions with room for 18 inferences of 50 ms per second. Each session needs 5."""
    loader = ScriptedLoader(lambda: ScriptedPolicy(NEEDS, latency=0.05))
    return Sessions(transport=MemoryTransport(), load=loader, engine=Engine(max_load=0.9))


async def test_a_session_beyond_capacity_is_refused_or_slowed_down() -> None:
    sessions = make_sessions()
    try:
        for name in "abc":
            session = await sessions.create(NewSession(name, "p", f"memory://{name}"))
            assert session.status().stats["inferences_per_second"] == 5
        with pytest.raises(Overloaded, match=r"asks for 5\.0 .* there is time for 3\.0; send degrade: true"):
            await sessions.create(NewSession("d", "p", "memory://d"))
        assert (await sessions.create(NewSession("e", "p", "memory://e", degrade=True))).stage is Stage.READY
        stats = sessions.get_live("e").status().stats
        assert (stats["inferences_per_second"], stats["is_degraded"]) == (2.778, True)
        assert stats["action_steps"] == 9
        sessions.engine.batch_compiler.remaining_elsewhere = 2
        with pytest.raises(Overloaded, match=r"not even when all 20 actions .* larger batches .* not compiled yet: 2;"):
            await sessions.create(NewSession("f", "p", "memory://f", degrade=True))
        await sessions.delete("a")
        assert not (await sessions.create(NewSession("g", "p", "memory://g"))).status().stats["is_degraded"]
        assert sessions.engine.get_stats()["promised_load"] == pytest.approx(0.05 * (5 * 3 + 25 / 9), abs=1e-3)
        # The earlier reduced rate does not count for a new request.
        await sessions.delete("b")
        await sessions.adjust("e", {"action_steps": 5})
        assert not sessions.get_live("e").status().stats["is_degraded"]
        with pytest.raises(Overloaded):
            await sessions.adjust("c", {"action_steps": 2})
        assert sessions.get_live("c").status().stats["action_steps"] == 5
    finally:
        await sessions.close()
    await asyncio.sleep(0)
    assert sessions.engine.get_stats()["promised_per_second"] == 0


async def test_admission_counts_the_frames_that_robots_send() -> None:
    loader, transport = ScriptedLoader(lambda: SizedPolicy(NEEDS, latency=0.025)), MemoryTransport()
    sessions = Sessions(transport=transport, load=loader, engine=Engine(max_load=0.9))

    def promised() -> object:
        return sessions.engine.get_stats()["promised_load"]

    try:
        await sessions.create(NewSession("a", "p", "memory://a"))
        assert promised() == pytest.approx(5 * 0.025)
        transport.link.deliver_frame("front", np.zeros((480, 640, 3), np.uint8))
        await until(lambda: promised() == pytest.approx(5 * 0.1))
        with pytest.raises(
            Overloaded, match=r"takes 100\.0 ms here \(480x640 frames, in batches of 1\), 1 other sessions"
        ):
            await sessions.create(NewSession("b", "p", "memory://b"))
        assert (await sessions.create(NewSession("c", "p", "memory://c", degrade=True))).stage is Stage.READY
        assert promised() == pytest.approx(0.9, abs=0.1)
        transport.link.deliver_frame("front", np.zeros((48, 64, 3), np.uint8))
        await until(lambda: promised() == pytest.approx(5 * 0.1 + 25 / 7 * 0.025, abs=1e-3))
    finally:
        await sessions.close()
