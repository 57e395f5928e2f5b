"""Control leases of robots: one controlling session per robot."""

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from service.errors import InvalidRequest, RobotTaken
from service.http.origins import is_loopback
from service.transport.address import Address, is_localhost

_PORTS = {"http": 80, "https": 443}


class LeaseHolder(Protocol):
    """A session that commands a robot."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True)
class RobotAddress:
    """Address of a robot: the normalized transport server (host, port and path), workspace and output room."""

    server: str
    workspace: str
    room: str


def find_robot(url: str, workspace: str, room: str) -> RobotAddress:
    """Return the address of the robot of a room, without ``/api`` at the end and with one name for this machine."""
    try:
        base = Address.parse(url).base
    except InvalidRequest:
        return RobotAddress(url, workspace, room)
    parts = urlsplit(base)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS[parts.scheme]
    path = parts.path.rstrip("/").removesuffix("/api")
    return RobotAddress(
        f"{'loopback' if is_localhost(host) or is_loopback(host) else host}:{port}{path}", workspace, room
    )


class Leases:
    """Control leases of all robots in one process."""

    def __init__(self) -> None:
        self._holders: dict[RobotAddress, LeaseHolder] = {}

    def take(self, robot: RobotAddress, holder: LeaseHolder) -> None:
        """Lease a robot to one session, or to its successor with the same id, until it is released.

        Raises:
            RobotTaken: another session has the robot.
        """
        before = self._holders.get(robot)
        if before is not None and before.id != holder.id:
            raise RobotTaken(
                f"session {holder.id!r} would command the robot of room {robot.room!r} in workspace "
                f"{robot.workspace!r}, which session {before.id!r} commands; delete that session first, or use "
                "another workspace"
            )
        self._holders[robot] = holder

    def release(self, robot: RobotAddress, holder: LeaseHolder) -> None:
        """Release a robot, unless another session has it."""
        if self._holders.get(robot) is holder:
            del self._holders[robot]

    def holder(self, robot: RobotAddress) -> LeaseHolder | None:
        """Return the session that commands a robot, or None."""
        return self._holders.get(robot)
