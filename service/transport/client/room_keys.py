"""API keys for transport servers: this process's own key, and a file with keys for other servers."""

import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from service.auth.keys import OwnKey
from service.errors import InvalidRequest, TransportError
from service.reloading_file import FileUnusable, ReloadingFile
from service.transport.address import Address, is_own_address

FORBIDDEN_MODE = 0o027
# Header with a session's secret, which limits commands of its robot to the session; other servers ignore it.
CLAIM_HEADER = "x-robojax-claim"


def auth_headers(key: str | None) -> Mapping[str, str]:
    """Return the header for an API key or a bearer token; no header for None.

    Raises:
        InvalidRequest: the key has characters that no key has.
    """
    if key is None:
        return {}
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequest("the key for the transport server has characters that no key has")
    return {"authorization": f"Bearer {key}"} if key.count(".") == 2 else {"x-api-key": key}


class RoomKeys:
    """Keys of a server: its own key for its own rooms, and keys from a file for other transport servers.

    Args:
        get_own_address: host and port of this process's rooms, or None.
        owner_of: owner of a session; None without keys.
        claim_of: secret by which a transport server recognizes a session.
        key_file: file with lines of URL and key.
    """

    def __init__(
        self,
        own: OwnKey,
        get_own_address: Callable[[], tuple[str, int] | None],
        owner_of: Callable[[str], str | None],
        key_file: Path | None = None,
        claim_of: Callable[[str], str | None] = lambda session_id: None,
    ):
        self._own = own
        self._get_own_address = get_own_address
        self._owner_of = owner_of
        self._claim_of = claim_of
        self._key_file = None if key_file is None else ReloadingFile(key_file, _parse, FORBIDDEN_MODE)

    def check(self) -> None:
        """Raise FileUnusable if the file of keys is missing, unreadable or malformed."""
        if self._key_file is not None and self._key_file.read() is None:
            raise FileUnusable(f"{str(self._key_file.path)!r}: there is no such file")

    def for_address(self, address: Address, session_id: str | None) -> tuple[Address, dict[str, str]]:
        """Return the address to connect to and its headers; this process's own address is numeric.

        Raises:
            TransportError: the file of keys cannot be used.
        """
        claim = None if session_id is None else self._claim_of(session_id)
        claims = {} if claim is None else {CLAIM_HEADER: claim}
        parts = urlsplit(address.base)
        bound = self._get_own_address()
        number = None if bound is None else _own_url(parts, *bound)
        if number is not None:
            owner = None if session_id is None else self._owner_of(session_id)
            return Address(f"{number}{parts.path}"), {**self._own.headers(owner), **claims}
        try:
            keys = {} if self._key_file is None else self._key_file.read() or {}
        except FileUnusable as error:
            raise TransportError("the keys for other transport servers cannot be read; see the server's log") from error
        return address, {**auth_headers(keys.get(_origin(parts))), **claims}


def _own_url(parts: SplitResult, host: str, port: int) -> str | None:
    """Return the numeric URL of this process's listener at host and port if these parts of a URL mean it."""
    if parts.scheme != "http" or (parts.port or 80) != port:
        return None
    listening, named = ipaddress.ip_address(host), parts.hostname or ""
    if listening.is_unspecified:
        if named != "localhost" and not _is_of_this_machine(named, listening.version):
            return None
        listening = ipaddress.ip_address("127.0.0.1" if listening.version == 4 else "::1")
    elif named != str(listening) and not (named == "localhost" and listening.is_loopback):
        return None
    return f"http://{listening}:{port}" if listening.version == 4 else f"http://[{listening}]:{port}"


def _is_of_this_machine(named: str, version: int) -> bool:
    try:
        address = ipaddress.ip_address(named)
    except ValueError:
        return False
    is_single = address.version == version and not address.is_unspecified and not address.is_multicast
    return is_single and is_own_address(address)


def _origin(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.hostname}:{parts.port or {'https': 443}.get(parts.scheme, 80)}"


def _parse(content: bytes) -> Mapping[str, str]:
    keys: dict[str, str] = {}
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise FileUnusable("is not text; wanted lines of URL and key") from None
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        try:
            url, key = parts
            auth_headers(key)
            keys[_origin(urlsplit(Address.parse(url).base))] = key
        except (ValueError, InvalidRequest):
            raise FileUnusable(f"is invalid in line {number}; wanted a URL, a space and a key") from None
    return keys
