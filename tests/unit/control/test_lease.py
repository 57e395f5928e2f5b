"""One controller per robot, however its server's address is written."""

from dataclasses import dataclass

import pytest

from service.control.lease import Leases, find_robot
from service.errors import RobotTaken


@dataclass(frozen=True)
class Holder:
    id: str


SAME = (
    "http://localhost:8000",
    "http://LOCALHOST:8000/",
    "ws://127.0.0.1:8000",
    "http://[::1]:8000/api",
    "http://localhost.:8000/api/",
)


@pytest.mark.parametrize("url", SAME)
def test_one_robot_has_one_name_however_it_is_reached(url: str) -> None:
    assert find_robot(url, "w", "s-joint-output") == find_robot(SAME[0], "w", "s-joint-output")


@pytest.mark.parametrize(
    ("one", "other"), [("http://Host.example", "ws://host.example:80"), ("https://h/api", "wss://h:443/")]
)
def test_default_ports_and_case_make_no_difference(one: str, other: str) -> None:
    assert find_robot(one, "w", "r") == find_robot(other, "w", "r")


@pytest.mark.parametrize(
    "other",
    [
        ("http://localhost:8001", "w", "r"),
        ("https://localhost:8000", "w", "R"),
        ("http://localhost:8000", "v", "r"),
        ("http://localhost:8000/site", "w", "r"),
        ("memory://", "w", "r"),
    ],
)
def test_other_robots_are_others(other: tuple[str, str, str]) -> None:
    assert find_robot(*other) != find_robot("http://localhost:8000", "w", "r")


def test_a_robot_is_commanded_by_one_session_until_it_is_given_back() -> None:
    leases, robot = Leases(), find_robot("http://h", "w", "r")
    first, second = Holder("one"), Holder("two")
    leases.take(robot, first)
    with pytest.raises(RobotTaken, match="'one' commands; delete that one first") as refused:
        leases.take(robot, second)
    assert refused.value.status == 409
    leases.release(robot, second)
    assert leases.holder(robot) is first
    leases.release(robot, first)
    leases.take(robot, second)
    assert leases.holder(robot) is second


def test_what_hangs_on_from_before_takes_nothing_from_its_successor() -> None:
    leases, robot = Leases(), find_robot("http://h", "w", "r")
    before, after = Holder("one"), _Other("one")
    leases.take(robot, before)
    leases.take(robot, after)
    leases.release(robot, before)
    assert leases.holder(robot) is after


class _Other(Holder):
    """Another one of the same id."""
