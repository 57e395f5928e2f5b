"""Who a request comes from, and what of the server's is theirs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from service.auth.roles import Role

if TYPE_CHECKING:
    # Commands that only make keys have no need of a server.
    from sanic import Request


@dataclass(frozen=True)
class Caller:
    """Whoever a key, a token or a ticket stands for.

    Attributes:
        name: of the key, or the token's subject.
        owner: whose sessions and rooms these are; several keys may have one owner. None sees all.
    """

    name: str
    role: Role
    owner: str | None

    @property
    def sees_all(self) -> bool:
        """Whether sessions and rooms of others are there for this caller."""
        return self.owner is None or self.role >= Role.ADMIN

    def sees(self, owner: str | None) -> bool:
        """Whether what belongs to this owner is there for this caller."""
        return self.sees_all or owner == self.owner


# Where no key is configured, everybody who reaches the port is this one.
ANYBODY = Caller("anybody", Role.ADMIN, None)
# On the routes that want no key: it sees nothing that belongs to somebody.
STRANGER = Caller("stranger", Role.VIEWER, "")


def caller_of(request: "Request[Any, Any]") -> Caller:
    """Who this request comes from. The guard sets it before any handler runs; without one this is an error."""
    return request.ctx.caller


def is_still_in(request: "Request[Any, Any]") -> bool:
    """Whether what let this request in still would: sockets live long, and their key may be revoked or expire."""
    return request.ctx.is_still_in()
