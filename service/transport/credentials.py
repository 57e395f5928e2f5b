"""What a link says of itself to a transport server that lets only those in whom it knows."""

from collections.abc import Mapping
from typing import Protocol

from service.errors import InvalidRequest
from service.transport.address import Address

# What a session sends beside its key, to every transport server: only who sends the same may command its robot. Servers
# that know nothing of it ignore it.
CLAIM = "x-robojax-claim"


class Credentials(Protocol):
    """Which key goes where."""

    def of(self, address: Address, session_id: str | None) -> tuple[Address, Mapping[str, str]]:
        """The address to go to, and the headers to send there, and only there.

        Args:
            session_id: whose rooms; None for those of sessions that are gone.
        """
        ...


class NoCredentials:
    """Nothing is sent."""

    def of(self, address: Address, session_id: str | None) -> tuple[Address, Mapping[str, str]]:
        """The address as it is."""
        return address, {}


def headers_of(key: str | None) -> Mapping[str, str]:
    """The header of an API key or of a bearer token; none without one.

    Raises:
        InvalidRequest: it has characters that no key has.
    """
    if key is None:
        return {}
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequest("the key for the transport server has characters that no key has")
    return {"authorization": f"Bearer {key}"} if key.count(".") == 2 else {"x-api-key": key}
