"""Strict JSON from untrusted senders: bounded reading time, no repeated names.

The cost of JSON is in its values: a MiB of ``"a":0,`` holds Python's lock for 130 ms, a MiB of text for 2 ms. So values
are counted before any is created. msgspec and pydantic are five times as fast, but accept repeated names and refuse
half a surrogate pair, which the reason of an emergency stop may hold; pydantic reads 1e999 as infinity.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from json.decoder import JSONArray, JSONObject  # pyright: ignore[reportAttributeAccessIssue] - typeshed lacks them
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue] - likewise
from typing import Any

# Reading an int takes time quadratic in its digits: 30 ms for a MiB at Python's own limit, 3 ms at this one.
MAX_DIGITS = 640
# What is written between values, or in front of them.
_SEPARATORS = ",[{"
# Characters in which quotes are looked for; 128 KiB of nothing else take 4 ms.
_MAX_SCANNED = 1 << 17


class RepeatedName(ValueError):
    """A name stands twice in one JSON object."""


class TooManyValues(ValueError):
    """The JSON has more values than are allowed."""


def reject_repeated_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object (an ``object_pairs_hook``); raises RepeatedName, where Python alone takes the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedName("a name stands twice in one object")
    return found


def loads(text: str | bytes, max_values: int, *, counted: str = _SEPARATORS, **hooks: Any) -> Any:
    """Parse JSON as ``json.loads`` does, with at most so many values.

    Args:
        max_values: limit of the characters ``counted``, ignoring those in strings of short texts.
        hooks: as for ``json.loads``, but ``parse_int``; the same functions each time.

    Raises:
        TooManyValues: the limit is exceeded.
        ValueError: invalid JSON, or a number with more than ``MAX_DIGITS`` digits.
        RecursionError: nested too deep.
    """
    text = decode_text(text)
    if _add_values(text, counted) > max_values and (
        len(text) > _MAX_SCANNED or _add_values(_remove_strings(text), counted) > max_values
    ):
        raise TooManyValues(f"more than {max_values} values")
    return _get_decoder(**hooks).decode(text)


@lru_cache(maxsize=16)
def _get_decoder(**hooks: Any) -> json.JSONDecoder:
    """Return the decoder of these hooks, made once: ``json.loads`` makes one for each text."""
    return json.JSONDecoder(parse_int=_parse_integer, **hooks)


def loads_slowly(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON in Python code, in a thread: five times slower than C, but without blocking others. Raises as
    ``loads``.
    """
    decoder: Any = json.JSONDecoder(parse_int=_parse_integer, **hooks)
    # As the json package does where it has no C code.
    decoder.parse_object, decoder.parse_array = JSONObject, JSONArray
    decoder.scan_once = py_make_scanner(decoder)
    return decoder.decode(decode_text(text))


def decode_text(text: str | bytes) -> str:
    """Decode JSON's bytes, in whichever of its encodings; counting bytes would miss what UTF-16 quotes.

    Raises:
        ValueError: they are none.
    """
    if isinstance(text, str):
        return text
    return text.decode(json.detect_encoding(text), "surrogatepass")


def has_many_values(text: str, max_values: int) -> bool:
    """Whether a text may have more values than this; the content of its strings counts, too."""
    return _add_values(text, _SEPARATORS) > max_values


def _add_values(text: str, counted: str) -> int:
    return sum(map(text.count, counted))


def _remove_strings(text: str) -> str:
    return "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return int(text)
