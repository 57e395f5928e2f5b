"""API keys in a file, as SHA-256 hashes (256 random bits need no slow hash or salt), and the process's own key."""

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock

from service.auth.caller import Caller, Role
from service.reloading_file import FileUnusable, ReloadingFile, write_private_file
from service.setting_types import NAME

PREFIX = "rjk_"
MAX_KEY = 128
ALL_OWNERS = "*"  # owner in the file of a key that sees all sessions
# Other users may read names and hashes (a mounted secret is often readable), but not add keys.
FORBIDDEN_MODE = 0o022


class KeyRefused(Exception):
    """A key cannot be made or removed; the text says why and what to do."""


@dataclass(frozen=True)
class Key:
    """Stored description of a key: its holder and its hash, not the key itself. Times are seconds since 1970."""

    name: str
    role: Role
    owner: str | None
    made_at: float
    expires_at: float | None
    digest: bytes = field(repr=False)

    def is_expired(self, now: float) -> bool:
        """Whether the key has expired."""
        return self.expires_at is not None and now >= self.expires_at

    @property
    def caller(self) -> Caller:
        """The caller with this key."""
        return Caller(self.name, self.role, self.owner)


def hash_key(key: str) -> bytes:
    """Return the SHA-256 hash that the file holds in place of a key."""
    return hashlib.sha256(key.encode()).digest()


class KeyFile:
    """File of API keys; a change of the file counts at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file = ReloadingFile(path, _parse, FORBIDDEN_MODE)

    def read_keys(self) -> tuple[Key, ...]:
        """Return all keys, expired ones too; none when there is no file.

        Raises:
            FileUnusable: it cannot be read, others may change it, or it is no file of keys.
        """
        try:
            return self._file.read() or ()
        except FileUnusable as error:
            raise FileUnusable(f"the file of keys {error}") from error

    def last_keys(self) -> tuple[Key, ...]:
        """Return the keys of the newest usable file, also while the file is missing or unusable."""
        return self._file.last or ()

    def find(self, sent: str, keys: tuple[Key, ...] | None = None) -> Key | None:
        """Return the stored key of the sent text, from the file or from ``keys``; it may have expired.

        Raises:
            FileUnusable: as ``read_keys``.
        """
        if not sent.startswith(PREFIX) or len(sent) > MAX_KEY or not sent.isascii():
            return None
        digest, match = hash_key(sent), None
        # The time of the comparison reveals nothing about the stored keys.
        for key in self.read_keys() if keys is None else keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match

    def create(self, name: str, role: Role, owner: str | None, now: float, days: float | None = None) -> str:
        """Create a key and return its text, which can be read only now.

        Args:
            owner: owner of the sessions that the key controls; None for all owners.

        Raises:
            KeyRefused: the name cannot be used or is taken.
            FileUnusable: the file cannot be read or written.
        """
        for word, what in ((name, "name"), (owner or name, "owner")):
            if not NAME.fullmatch(word):
                raise KeyRefused(f"{what} {word[:80]!r}: wanted 1 to 64 letters, digits, '_', '.' or '-'")
        if days is not None and not (math.isfinite(days) and days > 0):
            raise KeyRefused(f"days is {days}; wanted more than 0")
        text = PREFIX + secrets.token_urlsafe(32)
        key = Key(name, role, owner, now, None if days is None else now + days * 86400, hash_key(text))
        with self._edit() as keys:
            if any(known.name == name for known in keys):
                raise KeyRefused(f"there is a key of the name {name!r}; revoke it first, or choose another name")
            keys.append(key)
        return text

    def revoke(self, name: str) -> Key:
        """Remove a key; a running server refuses it from now on.

        Raises:
            KeyRefused: there is none of this name.
            FileUnusable: the file cannot be read or written.
        """
        with self._edit() as keys:
            gone = next((key for key in keys if key.name == name), None)
            if gone is None:
                names = ", ".join(key.name for key in keys) or "none"
                raise KeyRefused(f"no key is called {name[:80]!r}; there is {names}")
            keys.remove(gone)
        return gone

    @contextmanager
    def _edit(self) -> Iterator[list[Key]]:
        """Context with the keys, which are written at its end; the lock keeps the keys of two commands at a time."""
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), mode=0o600, fallback_to_soft=False)
        try:
            held = lock.acquire()
        except OSError as error:
            raise FileUnusable(f"the file of keys {str(self.path)!r} cannot be written: {error.strerror}") from error
        with held:
            keys = list(self.read_keys())
            yield keys
            entries = {"keys": [_to_entry(key) for key in keys]}
            write_private_file(self.path, json.dumps(entries, indent=1).encode() + b"\n")


def _to_entry(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "role": str(key.role),
        "owner": ALL_OWNERS if key.owner is None else key.owner,
        "made_at": key.made_at,
        "expires_at": key.expires_at,
        "sha256": key.digest.hex(),
    }


def _parse(content: bytes) -> tuple[Key, ...]:
    try:
        keys = tuple(_parse_entry(entry) for entry in json.loads(content)["keys"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileUnusable(
            f"makes no sense ({type(error).__name__}); `robojax token new` writes it, and nothing else should"
        ) from error
    names = [key.name for key in keys]
    if len(set(names)) != len(names):
        raise FileUnusable("makes no sense: two keys have one name")
    return keys


def _parse_entry(entry: Any) -> Key:
    digest = bytes.fromhex(entry["sha256"])
    name, owner = entry["name"], entry["owner"]
    times = [entry["made_at"], *([] if entry["expires_at"] is None else [entry["expires_at"]])]
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(name)
    if not NAME.fullmatch(name) or (owner != ALL_OWNERS and not NAME.fullmatch(owner)):
        raise ValueError(name)
    if not all(isinstance(time, int | float) and math.isfinite(time) for time in times):
        raise ValueError(name)
    return Key(
        name, Role.parse(entry["role"]), None if owner == ALL_OWNERS else owner, times[0], entry["expires_at"], digest
    )


OWN_PREFIX = "rjo_"
OWN_KEY_HEADER = "x-api-key"
OWN_KEY_FOR = "x-robojax-for"
OWN_NAME = "this server"


class OwnKey:
    """The process's own key: sessions make and join their rooms with it, with the rights of their owner and no more."""

    def __init__(self) -> None:
        self._key = OWN_PREFIX + secrets.token_urlsafe(32)

    def headers(self, owner: str | None) -> Mapping[str, str]:
        """Return the headers for requests to this process's own address; never send them to another."""
        return {OWN_KEY_HEADER: self._key} | ({} if owner is None else {OWN_KEY_FOR: quote(owner, safe="")})

    def identify(self, sent: str, behalf: str | None) -> Caller | None:
        """Return the caller if the sent key is this process's own key, else None."""
        if not hmac.compare_digest(sent.encode(errors="replace"), self._key.encode()):
            return None
        owner = None if behalf is None else unquote(behalf)
        return Caller(owner or OWN_NAME, Role.OPERATOR, owner)
