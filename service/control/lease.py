"""One controlling session per robot."""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from service.errors import InvalidRequest, RobotTaken
from service.transport.address import Address

_PORTS = {"http": 80, "https": 443}


class LeaseHolder(Protocol):
    """Who commands a robot: a session."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True)
class RobotAddress:
    """The room that a robot takes its commands from, written in one way however it was asked for.

    Attributes:
        server: scheme, host, port and path of the transport server.
        workspace: as asked for.
        room: the output room.
    """

    server: str
    workspace: str
    room: str


def find_robot(url: str, workspace: str, room: str) -> RobotAddress:
    """The robot behind a room of a transport server.

    ``/api`` at the end is left out, as servers of this kind answer at both; all names of this machine are one. An
    address that is none of the wire's own (a double's, in tests) stands for itself.
    """
    try:
        base = Address.parse(url).base
    except InvalidRequest:
        return RobotAddress(url, workspace, room)
    parts = urlsplit(base)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _PORTS[parts.scheme]
    path = parts.path.rstrip("/").removesuffix("/api")
    return RobotAddress(f"{'loopback' if _is_loopback(host) else host}:{port}{path}", workspace, room)


class Leases:
    """Which session commands which robot; of one process."""

    def __init__(self) -> None:
        self._holders: dict[RobotAddress, LeaseHolder] = {}

    def take(self, robot: RobotAddress, holder: LeaseHolder) -> None:
        """Let a session, and nobody else, command this robot until it is given back.

        One of the same id takes it over: the one before was deleted, and its link hangs and cannot send.

        Raises:
            RobotTaken: another session does.
        """
        before = self._holders.get(robot)
        if before is not None and before.id != holder.id:
            raise RobotTaken(
                f"session {holder.id!r} would command the robot of room {robot.room!r} in workspace "
                f"{robot.workspace!r}, which session {before.id!r} commands; delete that one first, or use another "
                "workspace"
            )
        self._holders[robot] = holder

    def release(self, robot: RobotAddress, holder: LeaseHolder) -> None:
        """Give it back; of one that somebody else holds nothing changes."""
        if self._holders.get(robot) is holder:
            del self._holders[robot]

    def holder(self, robot: RobotAddress) -> LeaseHolder | None:
        """Who commands it."""
        return self._holders.get(robot)


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
