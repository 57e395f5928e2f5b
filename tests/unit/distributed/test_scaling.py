"""Number of engines: it follows the load, stays in its bounds and does not oscillate."""

from dataclasses import replace
from itertools import pairwise

import pytest

from service.distributed.scaling import (
    GROW_AFTER,
    PLACEMENT_TIMEOUT,
    SHRINK_AFTER,
    START_TIMEOUT,
    Bounds,
    Scaling,
    explain_shortage,
)
from service.engines.messages import EngineFacts

BOUNDS = Bounds(least=1, most=4)


def engines(count: int, load: float, queue: float = 0.0) -> list[EngineFacts]:
    return [EngineFacts(load=load, queue=queue)] * count


def after(scaling: Scaling, seconds: float, count: list[EngineFacts], coming: int = 0, begin: float = 0.0) -> int:
    """Return the decision after a constant state of this duration, with two decisions per second."""
    target = 0
    for step in range(int(2 * seconds) + 1):
        target = scaling.decide(begin + step / 2, count, coming)
    return target


def test_the_number_of_engines_stays_within_its_bounds() -> None:
    scaling = Scaling(Bounds(least=2, most=4))
    assert (scaling.decide(0.0, []), scaling.why) == (2, "there are 0, wanted are 2 to 4")
    assert scaling.decide(0.0, engines(1, 0.0)) == 2
    assert scaling.decide(0.0, engines(6, 1.0)) == 4
    assert scaling.decide(0.0, engines(4, 0.5), coming=2) == 4
    assert after(scaling, 100, engines(4, 1.0, 1.0)) == 4
    assert after(scaling, 100, engines(2, 0.0)) == 2


@pytest.mark.parametrize(("load", "queue"), [(0.9, 0.0), (0.5, 0.1)], ids=["busy", "late"])
def test_an_engine_is_added_after_a_period_of_load_or_late_requests(load: float, queue: float) -> None:
    scaling = Scaling(BOUNDS)
    assert after(scaling, GROW_AFTER - 0.5, engines(2, load, queue)) == 2
    assert scaling.decide(GROW_AFTER, engines(2, load, queue)) == 3
    assert scaling.why.startswith(f"devices are {load:.0%} busy")


def test_a_burst_or_a_starting_engine_adds_no_engine() -> None:
    scaling = Scaling(BOUNDS)
    for begin in range(0, 100, 10):
        assert after(scaling, GROW_AFTER - 0.5, engines(2, 1.0, 1.0), begin=begin) == 2
        assert scaling.decide(begin + GROW_AFTER, engines(2, 0.5)) == 2
    scaling = Scaling(BOUNDS)
    assert after(scaling, 100, engines(2, 1.0, 1.0), coming=1) == 3
    # After the new engine starts, the period of load begins again.
    assert after(scaling, GROW_AFTER - 0.5, engines(3, 1.0, 1.0), begin=101) == 3
    assert scaling.decide(101 + GROW_AFTER, engines(3, 1.0, 1.0)) == 4


@pytest.mark.parametrize(
    ("count", "load", "queue"),
    [(2, 0.1, 5.0), (3, 0.2, 0.1), (2, 0.3, 0.0)],
    ids=["no work", "late", "busy after removal"],
)
def test_the_number_stays_if_another_engine_would_not_help(count: int, load: float, queue: float) -> None:
    assert after(Scaling(BOUNDS), 100, engines(count, load, queue)) == count


def test_an_engine_is_removed_after_a_long_period_of_low_load() -> None:
    scaling = Scaling(BOUNDS)
    assert after(scaling, SHRINK_AFTER - 0.5, engines(3, 0.2)) == 3
    assert scaling.decide(SHRINK_AFTER, engines(3, 0.2)) == 2
    assert scaling.why == "devices are 20% busy, and one less would be 30%"


@pytest.mark.parametrize("work", [0.1, 0.3, 0.41, 0.76, 0.9, 1.3, 1.7, 2.4, 3.1, 5.0])
def test_constant_work_leads_to_one_stable_number(work: float) -> None:
    """The unit of work is one busy device. Requests are late if devices are more than 90% busy."""
    bounds = replace(BOUNDS, most=6)
    ends = []
    for count in (1, 6):
        scaling, numbers = Scaling(bounds), [count]
        for step in range(2000):
            load = min(work / count, 1.0)
            count = scaling.decide(step / 2, engines(count, load, 0.2 if work / count > 0.9 else 0.0))
            numbers.append(count)
        changes = [(now > before) - (now < before) for before, now in pairwise(numbers)]
        assert len({change for change in changes if change}) <= 1, "all changes have one direction"
        assert not any(changes[-1000:])
        ends.append(count)
    assert ends[0] <= ends[1] <= ends[0] + 2


def test_the_number_follows_steps_of_load_without_oscillation() -> None:
    scaling, count, changes = Scaling(BOUNDS), 1, 0
    for step in range(4000):
        work = (0.3, 2.6, 0.3, 2.6)[step // 1000]
        target = scaling.decide(step / 2, engines(count, min(work / count, 1.0)))
        assert abs(target - count) <= 1
        changes, count = changes + (target != count), target
    assert changes == 9


def why(
    free: float, *, count: float = 2, running: int = 0, waiting: int = 2, seconds: float = PLACEMENT_TIMEOUT + 1
) -> str:
    return explain_shortage(
        {"CPU": 1}, {"CPU": count}, {"CPU": free}, running=running, waiting=waiting, seconds=seconds
    )


@pytest.mark.parametrize(("count", "running", "waiting"), [(0, 0, 1), (2, 0, 3), (2, 2, 1)])
def test_a_shortage_of_resources_is_reported_soon(count: float, running: int, waiting: int) -> None:
    assert why(0, count=count, running=running, waiting=waiting) == (
        f"Ray has had no place for an engine for 20 s; an engine wants 1 CPU (engine_resources), and free in the "
        f"cluster are 0 of {count} CPU"
    )
    assert why(0, count=count, running=running, waiting=waiting, seconds=PLACEMENT_TIMEOUT - 1) == ""


def test_one_missing_resource_is_a_shortage() -> None:
    target, count = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0}
    text = explain_shortage(target, count, count, running=0, waiting=1, seconds=PLACEMENT_TIMEOUT + 1)
    assert text.endswith("8 of 8 CPU, 0 of 0 GPU")


@pytest.mark.parametrize(("free", "reason"), [(0, "which others may have"), (2, "though not all on one node")])
def test_a_shortage_of_unknown_cause_is_reported_late(free: float, reason: str) -> None:
    assert why(free) == why(free, seconds=START_TIMEOUT - 1) == "", "a slow start is not reported as a shortage"
    assert reason in why(free, seconds=START_TIMEOUT + 1)
