"""What goes over the page's socket: one message out per beat, numbers and pictures behind its JSON; few words in."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.words import printable

LONGEST = 4096  # characters of what a page may say


@dataclass(frozen=True)
class Part:
    """Bytes behind the JSON, and what is said about them there (``size`` is added)."""

    about: Mapping[str, Any]
    content: bytes


def pack(head: Mapping[str, Any], parts: Sequence[Part] = ()) -> bytes:
    """Length of the JSON (4 bytes, little endian), the JSON, each part; all aligned to 4 bytes.

    Raises:
        ValueError: a number that JSON does not have.
    """
    about = [{**part.about, "size": len(part.content)} for part in parts]
    text = json.dumps({**head, "parts": about}, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return b"".join(
        (struct.pack("<I", len(text)), text, *(part.content + bytes(-len(part.content) % 4) for part in parts))
    )


class BadMessage(Exception):
    """What a page said cannot be understood; the text says why."""


@dataclass(frozen=True)
class Look:
    """Show this session from now on (None: none), with pictures or without."""

    session: str | None
    pictures: bool


@dataclass(frozen=True)
class Seen:
    """The page has drawn message ``number``; without that it gets no more."""

    number: int


@dataclass(frozen=True)
class Stop:
    """Stop every robot. ``number`` comes back in the answer."""

    number: int
    reason: str


def parse(raw: str | bytes) -> Look | Seen | Stop:
    """What a page said.

    Raises:
        BadMessage: it is none of the three.
    """
    if not isinstance(raw, str) or len(raw) > LONGEST:
        raise BadMessage(f"wanted a text of at most {LONGEST} characters")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadMessage("wanted JSON") from error
    match said:
        case {"type": "seen", "number": int(number)}:
            return Seen(number)
        case {"type": "look", "session": None | str() as session}:
            return Look(session, said.get("pictures") is True)
        case {"type": "stop"}:
            # Nothing that is wrong with the rest may keep the robots moving.
            number, reason = said.get("number"), said.get("reason")
            return Stop(number if type(number) is int else 0, _plain(reason) or "asked for on the page")
    raise BadMessage("wanted an object of type look, seen or stop")


def _plain(text: object) -> str:
    return printable(text) if isinstance(text, str) else ""
