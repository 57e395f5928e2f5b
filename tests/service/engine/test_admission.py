import asyncio

import pytest

from jaxmodels import Requirements
from service.engine.admission import judge
from service.engine.engine import Engine
from service.engine.scripted_policy import ScriptedLoader, ScriptedPolicy
from service.engine.served import Replica, Served
from service.errors import Overloaded
from service.sessions.sessions import NewSession, Sessions
from service.stage import Stage
from service.transport.memory import MemoryTransport

NEEDS = Requirements(
    policy_type="act", cameras={"front": (48, 64)}, state=6, action=6, chunk=20, action_steps=5, rate=25
)


def served(*, replicas: int = 1, **seconds: float) -> Served:
    """With batches that take so long, on each of so many devices."""
    policy = ScriptedPolicy()
    copies = [Replica(policy, lane) for lane in range(replicas)]
    for copy in copies:
        for size, taken in seconds.items():
            policy.latency = taken
            copy.prepare(int(size[1:]), None)
    return Served(policy, copies)


def test_what_batches_take_decides_how_many_robots_fit() -> None:
    policy = served(b1=0.010, b4=0.020)  # 100 or 200 in a second
    nine = judge(policy, 10, [10] * 8, 0, limit=0.9)
    assert (nine.fits, nine.share, nine.per_second) == (True, 0.05, 10)
    assert judge(policy, 10, [10] * 17, 0, limit=0.9).fits
    too_many = judge(policy, 10, [10] * 17 + [5], 0, limit=0.9)
    assert not too_many.fits
    assert too_many.per_second == pytest.approx(5)
    assert "5.0 ms here (in batches of 4), 18 other sessions" in too_many.text
    assert "asks for 10.0 inferences per second and there is time for 5.0" in too_many.text


def test_a_robot_that_is_alone_has_batches_of_one_and_no_more_than_one_at_a_time() -> None:
    policy = served(b1=0.010, b4=0.020)
    assert judge(policy, 80, [], 0, limit=0.9).fits
    assert not judge(policy, 95, [], 0, limit=0.9).fits
    assert not judge(policy, 110, [], 0, limit=9.0).fits
    assert judge(policy, 110, [], 0, limit=9.0).per_second == pytest.approx(100)


def test_a_batch_that_takes_longer_than_the_quickest_robot_waits_is_not_reckoned_with() -> None:
    policy = served(b1=0.010, b4=0.020)
    assert judge(policy, 1, [20] * 3, 0, limit=0.9).share == pytest.approx(0.005)
    assert judge(policy, 1, [40] * 2 + [1], 0, limit=0.9).share == pytest.approx(0.010)


def test_other_policies_and_more_devices_count() -> None:
    assert not judge(served(b1=0.010), 50, [], 0.5, limit=0.9).fits
    assert judge(served(b1=0.010, replicas=2), 50, [80, 30], 0, limit=0.9).fits
    assert judge(served(), 1000, [], 0, limit=0.9).fits, "nothing is known of it"


def a_house() -> Sessions:
    """One inference takes 50 ms here, so 18 a second are promised; a session asks for 5."""
    loader = ScriptedLoader(lambda: ScriptedPolicy(NEEDS, latency=0.05))
    return Sessions(transport=MemoryTransport(), load=loader, engine=Engine(switch_interval=None, load=0.9))


async def test_a_session_that_there_is_no_time_for_is_refused_with_the_figure_or_slowed_down() -> None:
    sessions = a_house()
    try:
        for name in "abc":
            session = await sessions.create(NewSession(name, "p", f"memory://{name}"))
            assert session.status().stats["inferences_per_second"] == 5
        with pytest.raises(Overloaded, match=r"asks for 5\.0 .* there is time for 3\.0; send degrade: true"):
            await sessions.create(NewSession("d", "p", "memory://d"))
        assert (await sessions.create(NewSession("e", "p", "memory://e", degrade=True))).stage is Stage.READY
        stats = sessions.live("e").status().stats
        assert (stats["inferences_per_second"], stats["is_degraded"]) == (2.778, True)
        assert stats["action_steps"] == 9
        with pytest.raises(Overloaded, match="not even when all 20 actions"):
            await sessions.create(NewSession("f", "p", "memory://f", degrade=True))
        await sessions.delete("a")
        assert not (await sessions.create(NewSession("g", "p", "memory://g"))).status().stats["is_degraded"]
        assert sessions.engine.facts()["promised_load"] == pytest.approx(0.05 * (5 * 3 + 25 / 9), abs=1e-3)
        # What it was given counts no more when it asks anew.
        await sessions.delete("b")
        await sessions.adjust("e", {"action_steps": 5})
        assert not sessions.live("e").status().stats["is_degraded"]
        with pytest.raises(Overloaded):
            await sessions.adjust("c", {"action_steps": 2})
        assert sessions.live("c").status().stats["action_steps"] == 5
    finally:
        await sessions.close()
    await asyncio.sleep(0)
    assert sessions.engine.facts()["promised_per_second"] == 0
