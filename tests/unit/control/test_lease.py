"""One controller per robot, for every spelling of the server address."""

from dataclasses import dataclass

import pytest

from service.control.lease import Leases, find_robot
from service.errors import RobotTaken


@dataclass(frozen=True)
class Holder:
    id: str


LOCAL = "http://localhost:8000"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LOCAL, "http://LOCALHOST:8000/"),
        (LOCAL, "ws://127.0.0.1:8000"),
        (LOCAL, "http://[::1]:8000/api"),
        (LOCAL, "http://localhost.:8000/api/"),
        ("http://Host.example", "ws://host.example:80"),
        ("https://h/api", "wss://h:443/"),
    ],
)
def test_one_robot_has_one_name_for_all_spellings_of_its_server(one: str, other: str) -> None:
    assert find_robot(one, "w", "s-joint-output") == find_robot(other, "w", "s-joint-output")


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
def test_other_robots_have_other_names(other: tuple[str, str, str]) -> None:
    assert find_robot(*other) != find_robot("http://localhost:8000", "w", "r")


def test_one_session_commands_a_robot_until_it_releases_it() -> None:
    class Successor(Holder):
        """A later session with the same id."""

    leases, robot = Leases(), find_robot("http://h", "w", "r")
    first, second, after = Holder("one"), Holder("two"), Successor("two")
    leases.take(robot, first)
    with pytest.raises(RobotTaken, match="'one' commands; delete that session first") as refused:
        leases.take(robot, second)
    assert refused.value.status == 409
    leases.release(robot, second)
    assert leases.holder(robot) is first
    leases.release(robot, first)
    leases.take(robot, second)
    assert leases.holder(robot) is second
    leases.take(robot, after)
    leases.release(robot, second)
    assert leases.holder(robot) is after
