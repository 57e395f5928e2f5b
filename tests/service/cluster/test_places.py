"""When Ray is said to have no place for an engine, and when only to be slow."""

import pytest

from service.cluster.places import NO_PLACE, SLOW, lack


def why(free: float, *, there: float = 2, running: int = 0, waiting: int = 2, seconds: float = NO_PLACE + 1) -> str:
    return lack({"CPU": 1}, {"CPU": there}, {"CPU": free}, running=running, waiting=waiting, seconds=seconds)


def test_engines_that_have_their_place_and_whose_processes_are_slow_are_waited_for() -> None:
    assert why(0) == ""


@pytest.mark.parametrize(("there", "running", "waiting"), [(0, 0, 1), (2, 0, 3), (2, 2, 1)])
def test_where_there_is_too_little_it_is_said_soon(there: float, running: int, waiting: int) -> None:
    assert why(0, there=there, running=running, waiting=waiting) == (
        f"Ray has had no place for an engine for 20 s; an engine wants 1 CPU (engine_resources), and free in the "
        f"cluster are 0 of {there} CPU"
    )
    assert why(0, there=there, running=running, waiting=waiting, seconds=NO_PLACE - 1) == ""


def test_one_resource_that_is_missing_is_enough() -> None:
    wanted, there = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0}
    assert lack(wanted, there, there, running=0, waiting=1, seconds=NO_PLACE + 1).endswith("8 of 8 CPU, 0 of 0 GPU")


@pytest.mark.parametrize(("free", "reason"), [(0, "which others may have"), (2, "though not all on one node")])
def test_where_nobody_knows_it_is_said_late(free: float, reason: str) -> None:
    assert why(free, seconds=SLOW - 1) == ""
    assert reason in why(free, seconds=SLOW + 1)
