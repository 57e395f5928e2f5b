"""Which API key goes to which transport server."""

import ipaddress
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from service.auth.keys import OwnKey
from service.errors import InvalidRequest, TransportError
from service.reloading_file import FileUnusable, ReloadingFile
from service.transport.address import Address
from service.transport.client.rest import CLAIM, headers_of

FORBIDDEN = 0o027


class RoomKeys:
    """``service.transport.client.rest.Credentials`` of a server.

    Args:
        bound: host and port that this process listens on; None while it does not, or serves no rooms.
        owner_of: whose session this is; None where there are no keys.
        claim_of: the secret of a session, by which the server of its rooms knows what the session itself sends.
        elsewhere: file with lines of URL and key.
    """

    def __init__(
        self,
        own: OwnKey,
        bound: Callable[[], tuple[str, int] | None],
        owner_of: Callable[[str], str | None],
        elsewhere: Path | None = None,
        claim_of: Callable[[str], str | None] = lambda session_id: None,
    ):
        self._own = own
        self._bound = bound
        self._owner_of = owner_of
        self._claim_of = claim_of
        self._elsewhere = None if elsewhere is None else ReloadingFile(elsewhere, _parse, FORBIDDEN)

    def check(self) -> None:
        """Read the file.

        Raises:
            FileUnusable: it is not there, cannot be read, or makes no sense.
        """
        if self._elsewhere is not None and self._elsewhere.read() is None:
            raise FileUnusable(f"{str(self._elsewhere.path)!r}: there is no such file")

    def of(self, address: Address, session_id: str | None) -> tuple[Address, Mapping[str, str]]:
        """Our own address by the number it is bound to: what a name stands for could be another process.

        Raises:
            TransportError: the file of keys cannot be used.
        """
        claim = None if session_id is None else self._claim_of(session_id)
        claims = {} if claim is None else {CLAIM: claim}
        parts = urlsplit(address.base)
        bound = self._bound()
        number = None if bound is None else _own_number(parts, *bound)
        if number is not None:
            owner = None if session_id is None else self._owner_of(session_id)
            return Address(f"{number}{parts.path}"), {**self._own.headers(owner), **claims}
        try:
            keys = {} if self._elsewhere is None else self._elsewhere.read() or {}
        except FileUnusable as error:
            raise TransportError("the keys for other transport servers cannot be read; see the server's log") from error
        return address, {**headers_of(keys.get(_origin(parts))), **claims}


def _own_number(parts: SplitResult, host: str, port: int) -> str | None:
    """The URL of what is listened on at host and port, if these parts of a URL mean it."""
    if parts.scheme != "http" or (parts.port or 80) != port:
        return None
    bound, named = ipaddress.ip_address(host), parts.hostname or ""
    if bound.is_unspecified:
        if named != "localhost" and not _is_of_this_machine(named, bound.version):
            return None
        bound = ipaddress.ip_address("127.0.0.1" if bound.version == 4 else "::1")
    elif named != str(bound) and not (named == "localhost" and bound.is_loopback):
        return None
    return f"http://{bound}:{port}" if bound.version == 4 else f"http://[{bound}]:{port}"


def _is_of_this_machine(named: str, version: int) -> bool:
    try:
        address = ipaddress.ip_address(named)
    except ValueError:
        return False
    if address.version != version or address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((named, 0))  # only an address of this machine can be
        except OSError:
            return False
    return True


def _origin(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.hostname}:{parts.port or {'https': 443}.get(parts.scheme, 80)}"


def _parse(content: bytes) -> Mapping[str, str]:
    keys: dict[str, str] = {}
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise FileUnusable("is no text; wanted lines of URL and key") from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            url, key = words
            headers_of(key)
            keys[_origin(urlsplit(Address.parse(url).base))] = key
        except (ValueError, InvalidRequest):
            raise FileUnusable(f"makes no sense in line {number}; wanted a URL, a space and a key") from None
    return keys
