"""Caller and role of a request."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Commands that only make keys have no need of a server.
    from sanic import Request


class Role(IntEnum):
    """Role of a key: a higher role may do all that a lower one may. Every key may make an emergency stop."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, name: str) -> "Role":
        """Return the role of this name.

        Raises:
            ValueError: there is none; the message lists them.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"role {name!r} is not known; wanted {', '.join(map(str, cls))}") from None


@dataclass(frozen=True)
class Caller:
    """Sender of a request: the holder of a key, a token or a ticket.

    Attributes:
        name: of the key, or the token's subject.
        owner: whose sessions and rooms these are; several keys may have one owner. None sees all.
    """

    name: str
    role: Role
    owner: str | None

    @property
    def sees_all(self) -> bool:
        """Whether this caller sees sessions and rooms of all owners."""
        return self.owner is None or self.role >= Role.ADMIN

    def sees(self, owner: str | None) -> bool:
        """Whether this caller sees what belongs to this owner."""
        return self.sees_all or owner == self.owner


@dataclass(frozen=True)
class Admission:
    """The caller of an admitted request, and whether it would still be admitted: a socket may outlive its key."""

    caller: Caller
    is_still_authorized: Callable[[], bool]


# The caller of every request if no key is configured.
ANYBODY = Caller("anybody", Role.ADMIN, None)
# The caller without a key on routes that need none; it sees no owner's sessions or rooms.
STRANGER = Caller("stranger", Role.VIEWER, "")


def caller_of(request: "Request[Any, Any]") -> Caller:
    """Return who sent this request. The access guard sets it before any handler runs; without it, this is an error."""
    return request.ctx.caller
