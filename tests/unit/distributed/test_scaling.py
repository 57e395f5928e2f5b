"""How many engines there should be: as many as there is work for, and no to and fro."""

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


def after(scaling: Scaling, seconds: float, there: list[EngineFacts], coming: int = 0, begin: float = 0.0) -> int:
    """What is wanted when it stood so for so long, looked at twice a second."""
    wanted = 0
    for step in range(int(2 * seconds) + 1):
        wanted = scaling.decide(begin + step / 2, there, coming)
    return wanted


def test_there_are_never_fewer_or_more_than_the_bounds_say() -> None:
    scaling = Scaling(Bounds(least=2, most=4))
    assert scaling.decide(0.0, []) == 2
    assert scaling.why == "there are 0, wanted are 2 to 4"
    assert scaling.decide(0.0, engines(1, 0.0)) == 2
    assert scaling.decide(0.0, engines(6, 1.0)) == 4
    assert scaling.decide(0.0, engines(4, 0.5), coming=2) == 4
    assert after(scaling, 100, engines(4, 1.0, 1.0)) == 4
    assert after(scaling, 100, engines(2, 0.0)) == 2


@pytest.mark.parametrize(("load", "queue"), [(0.9, 0.0), (0.5, 0.1)], ids=["busy", "late"])
def test_one_more_when_devices_are_busy_or_requests_late_for_a_while(load: float, queue: float) -> None:
    scaling = Scaling(BOUNDS)
    assert after(scaling, GROW_AFTER - 0.5, engines(2, load, queue)) == 2
    assert scaling.decide(GROW_AFTER, engines(2, load, queue)) == 3
    assert scaling.why.startswith(f"devices are {load:.0%} busy")


def test_a_burst_is_no_reason() -> None:
    scaling = Scaling(BOUNDS)
    for begin in range(0, 100, 10):
        assert after(scaling, GROW_AFTER - 0.5, engines(2, 1.0, 1.0), begin=begin) == 2
        assert scaling.decide(begin + GROW_AFTER, engines(2, 0.5)) == 2


def test_waiting_without_work_is_nothing_that_another_engine_would_mend() -> None:
    assert after(Scaling(BOUNDS), 100, engines(2, 0.1, 5.0)) == 2


def test_nothing_more_is_decided_while_one_is_coming() -> None:
    scaling = Scaling(BOUNDS)
    assert after(scaling, 100, engines(2, 1.0, 1.0), coming=1) == 3
    # From then on it takes as long again to see that it was not enough.
    assert after(scaling, GROW_AFTER - 0.5, engines(3, 1.0, 1.0), begin=101) == 3
    assert scaling.decide(101 + GROW_AFTER, engines(3, 1.0, 1.0)) == 4


def test_one_fewer_when_those_that_stay_have_little_to_do_for_long() -> None:
    scaling = Scaling(BOUNDS)
    assert after(scaling, SHRINK_AFTER - 0.5, engines(3, 0.2)) == 3
    assert scaling.decide(SHRINK_AFTER, engines(3, 0.2)) == 2
    assert scaling.why == "devices are 20% busy, and one less would be 30%"


def test_none_goes_while_requests_are_late_or_the_others_would_be_busy() -> None:
    assert after(Scaling(BOUNDS), 100, engines(3, 0.2, 0.1)) == 3
    assert after(Scaling(BOUNDS), 100, engines(2, 0.3)) == 2


@pytest.mark.parametrize("work", [0.1, 0.3, 0.41, 0.76, 0.9, 1.3, 1.7, 2.4, 3.1, 5.0])
def test_for_the_same_work_it_comes_to_one_number_and_stays_there(work: float) -> None:
    """Work in devices; requests are late where it is more than nine tenths of what there is."""
    bounds = replace(BOUNDS, most=6)
    ends = []
    for there in (1, 6):
        scaling, numbers = Scaling(bounds), [there]
        for step in range(2000):
            load = min(work / there, 1.0)
            there = scaling.decide(step / 2, engines(there, load, 0.2 if work / there > 0.9 else 0.0))
            numbers.append(there)
        changes = [(now > before) - (now < before) for before, now in pairwise(numbers)]
        assert len({change for change in changes if change}) <= 1, "one direction"
        assert not any(changes[-1000:])
        ends.append(there)
    assert ends[0] <= ends[1] <= ends[0] + 2


def test_steps_of_load_are_followed_and_no_more() -> None:
    scaling, there, changes = Scaling(BOUNDS), 1, 0
    for step in range(4000):
        work = (0.3, 2.6, 0.3, 2.6)[step // 1000]
        wanted = scaling.decide(step / 2, engines(there, min(work / there, 1.0)))
        assert abs(wanted - there) <= 1
        changes, there = changes + (wanted != there), wanted
    assert changes == 9


def why(
    free: float, *, there: float = 2, running: int = 0, waiting: int = 2, seconds: float = PLACEMENT_TIMEOUT + 1
) -> str:
    return explain_shortage(
        {"CPU": 1}, {"CPU": there}, {"CPU": free}, running=running, waiting=waiting, seconds=seconds
    )


def test_slow_start_is_no_shortage() -> None:
    assert why(0) == ""


@pytest.mark.parametrize(("there", "running", "waiting"), [(0, 0, 1), (2, 0, 3), (2, 2, 1)])
def test_where_there_is_too_little_it_is_said_soon(there: float, running: int, waiting: int) -> None:
    assert why(0, there=there, running=running, waiting=waiting) == (
        f"Ray has had no place for an engine for 20 s; an engine wants 1 CPU (engine_resources), and free in the "
        f"cluster are 0 of {there} CPU"
    )
    assert why(0, there=there, running=running, waiting=waiting, seconds=PLACEMENT_TIMEOUT - 1) == ""


def test_one_resource_that_is_missing_is_enough() -> None:
    wanted, there = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0}
    assert explain_shortage(wanted, there, there, running=0, waiting=1, seconds=PLACEMENT_TIMEOUT + 1).endswith(
        "8 of 8 CPU, 0 of 0 GPU"
    )


@pytest.mark.parametrize(("free", "reason"), [(0, "which others may have"), (2, "though not all on one node")])
def test_where_nobody_knows_it_is_said_late(free: float, reason: str) -> None:
    assert why(free, seconds=START_TIMEOUT - 1) == ""
    assert reason in why(free, seconds=START_TIMEOUT + 1)
