"""Where a transport server is: one base URL, and the paths of its rooms under it."""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from service.errors import InvalidRequest

_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class Kind(StrEnum):
    """The two services of a transport server, by the first part of their paths."""

    ROBOTICS = "robotics"
    VIDEO = "video"


@dataclass(frozen=True)
class Address:
    """A transport server's base URL, http or https, with its path (``/api`` on the public image) and no last slash."""

    base: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read what a caller gave as ``transport_server_url``.

        Raises:
            InvalidRequest: not an http(s) or ws(s) URL with a host, or one with credentials, query or fragment.
        """

        def wrong(found: str) -> InvalidRequest:
            return InvalidRequest(
                f"transport_server_url: {found}; wanted something like http://localhost:8000 or https://host/api, "
                "or direct, without rooms",
                ("body", "transport_server_url"),
            )

        # URLs with these parse differently in different libraries, so none is guessed at.
        if any(character.isspace() or ord(character) < 0x21 or character == "\\" for character in url):
            raise wrong("holds a space, a control character or a backslash")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise wrong(f"is not a URL ({error})") from error
        if parts.scheme not in _SCHEMES:
            raise wrong(f"scheme is {parts.scheme!r}" if parts.scheme else "has no scheme")
        if not parts.hostname:
            raise wrong("has no host")
        if parts.username is not None or parts.password is not None:
            raise wrong("holds a user name or password")
        if parts.query or parts.fragment:
            raise wrong("holds a query or a fragment")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        where = host if port is None else f"{host}:{port}"
        return cls(f"{_SCHEMES[parts.scheme]}://{where}{parts.path.rstrip('/')}")

    def rooms(self, kind: Kind, workspace: str) -> str:
        """The collection that rooms are created in."""
        return f"{self.base}/{kind}/workspaces/{workspace}/rooms"

    def room(self, kind: Kind, workspace: str, room: str) -> str:
        """One room."""
        return f"{self.rooms(kind, workspace)}/{room}"

    def socket(self, kind: Kind, workspace: str, room: str) -> str:
        """One room's WebSocket. The base path stays: the public image has everything under ``/api``."""
        return f"ws{self.room(kind, workspace, room).removeprefix('http')}/ws"
