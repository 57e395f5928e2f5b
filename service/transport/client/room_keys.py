"""API keys for transport servers: this process's own key, and a file with keys for other servers."""

import ipaddress
from collections.abc import Mapping
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


def open_key_file(path: Path) -> ReloadingFile[Mapping[str, str]]:
    """Open a file with lines of URL and key; raises FileUnusable if it is missing, unreadable or malformed."""
    file = ReloadingFile(path, _parse, FORBIDDEN_MODE)
    if file.read() is None:
        raise FileUnusable(f"{str(path)!r}: there is no such file")
    return file


class RoomKeys:
    """Keys of a server: its own key for its own rooms, and keys from a file for other transport servers.

    Args:
        own_address: host and port of this process's rooms, or None.
        key_file: see `open_key_file`.
    """

    def __init__(
        self,
        own: OwnKey,
        own_address: tuple[str, int] | None,
        key_file: ReloadingFile[Mapping[str, str]] | None = None,
    ):
        self._own = own
        self._own_address = own_address
        self._key_file = key_file

    def for_address(self, address: Address, owner: str | None) -> tuple[Address, dict[str, str]]:
        """Return the address to connect to and its headers; this process's own address is numeric.

        Args:
            owner: owner of the session, or None.

        Raises:
            TransportError: the file of keys cannot be used.
        """
        parts = urlsplit(address.base)
        number = None if self._own_address is None else _own_url(parts, *self._own_address)
        if number is not None:
            return Address(f"{number}{parts.path}"), dict(self._own.headers(owner))
        try:
            keys = {} if self._key_file is None else self._key_file.read() or {}
        except FileUnusable as error:
            raise TransportError("the keys for other transport servers cannot be read; see the server's log") from error
        return address, dict(auth_headers(keys.get(_origin(parts))))


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
