"""Strict JSON from untrusted senders: bounded reading time, no repeated names.

Values are counted before any is created, because parsing holds Python's lock: 130 ms for a MiB of ``"a":0,``. msgspec
and pydantic accept repeated names, and refuse half a surrogate pair in the reason of an emergency stop.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from json.decoder import JSONArray, JSONObject  # pyright: ignore[reportAttributeAccessIssue] - typeshed lacks them
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue] - typeshed lacks it
from typing import Any

# Digits of an integer, because parsing takes quadratic time: 3 ms for a MiB of such numbers.
MAX_DIGITS = 640
# Characters between values, or in front of them.
_SEPARATORS = ",[{"
# Characters of a text whose strings are removed before its separators are counted: 128 KiB take 4 ms.
_MAX_SCANNED = 1 << 17


class RepeatedName(ValueError):
    """A JSON object has a name twice."""


class TooManyValues(ValueError):
    """The JSON has more values than are allowed."""


def reject_repeated_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object (an ``object_pairs_hook``); raises RepeatedName if a name is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedName("a name stands twice in one object")
    return found


def loads(text: str | bytes, max_values: int, *, counted: str = _SEPARATORS, **hooks: Any) -> Any:
    """Parse JSON as ``json.loads`` does, with a limit on the number of values.

    Args:
        max_values: largest number of the characters ``counted``, except in strings of short texts.
        hooks: arguments of ``json.loads`` other than ``parse_int``; the same functions in each call.

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
    """Return the decoder with these hooks; ``json.loads`` would create a decoder for each text."""
    return json.JSONDecoder(parse_int=_parse_integer, **hooks)


def loads_slowly(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON in Python code, five times slower than C, but without blocking other threads; raises as ``loads``."""
    decoder: Any = json.JSONDecoder(parse_int=_parse_integer, **hooks)
    # The json package does the same if it has no C code.
    decoder.parse_object, decoder.parse_array = JSONObject, JSONArray
    decoder.scan_once = py_make_scanner(decoder)
    return decoder.decode(decode_text(text))


def decode_text(text: str | bytes) -> str:
    """Decode the bytes of a JSON text in UTF-8, UTF-16 or UTF-32.

    Raises:
        ValueError: the bytes have another encoding.
    """
    if isinstance(text, str):
        return text
    return text.decode(json.detect_encoding(text), "surrogatepass")


def has_many_values(text: str, max_values: int) -> bool:
    """Return whether a text may have more values than this; separators in strings count too."""
    return _add_values(text, _SEPARATORS) > max_values


def _add_values(text: str, counted: str) -> int:
    return sum(map(text.count, counted))


def _remove_strings(text: str) -> str:
    return "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return int(text)
