"""Ranges of numbers in untrusted configs, checked before anything is computed. Imports no JAX.

A field declares its range, ``n_layers: Annotated[int, Range(1, 256)] = 6``; jaxmodels/memory.py checks combinations.
"""

import logging
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from jaxmodels.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BITS = 256  # Bits of an integer in a message; Python refuses to write very long integers.

# Ranges that several configs share. The largest published policies have 24 layers of width 4096, CLIP's towers 32.
LAYERS_WRITTEN_OUT = 64  # Each layer is a separate part of the program.
LAYERS_STACKED = 256  # All layers are one part of the program.
WIDTH = 65_536
HEADS = 1024
CHUNK = 10_000


@dataclass(frozen=True)
class Range:
    """Values that a number may have: `minimum` to `maximum`, exclusive if `above` or `below`."""

    minimum: float | int
    maximum: float | int
    above: bool = False
    below: bool = False

    def __contains__(self, value: float | int) -> bool:
        is_high = value > self.minimum if self.above else value >= self.minimum
        return is_high and (value < self.maximum if self.below else value <= self.maximum)

    def describe(self, kind: str = "a number") -> str:
        """Return the range in words, e.g. ``an integer of 1 or more, at most 256``."""
        if (self.minimum, self.maximum, self.above, self.below) == (0, 1, False, False) and kind == "a number":
            return "a share, 0 to 1"
        low = f"above {self.minimum:g}" if self.above else f"of {_format_number(self.minimum)} or more"
        high = f", {'below' if self.below else 'at most'} {_format_number(self.maximum)}"
        return f"{kind} {low}{'' if self.maximum == math.inf else high}"


SHARE = Range(0, 1)
SHARE_BELOW_ONE = Range(0, 1, below=True)
POSITIVE = Range(0, 1e6, above=True)
NOT_NEGATIVE = Range(0, 1e6)
COUNT = Range(1, math.inf)


@dataclass(frozen=True)
class Number:
    """Declared type of a config's number.

    Attributes:
        is_integer: whether fractions, and floats such as 1.0, are refused.
        may_be_none: whether null is a value.
        count: length of a list; None for one number.
        range: None if the field declares none, which a test forbids.
    """

    is_integer: bool
    may_be_none: bool
    count: int | None
    range: Range | None

    def describe_error(self, name: str, value: Any) -> str | None:
        """Return the error text for a value, or None when it is allowed."""
        if value is None and self.may_be_none:
            return None
        allowed = self.range or Range(-math.inf, math.inf)
        parts: list[Any] = [value]
        if self.count is not None:
            parts = list(value) if isinstance(value, list | tuple) and len(value) == self.count else [None]
        if are_numbers(parts, allowed, integer=self.is_integer):
            return None
        return f"{name} is {shorten_value(value)}; wanted {self.describe()}"

    def describe(self) -> str:
        kind = "integer" if self.is_integer else "number"
        article = "an" if self.is_integer else "a"
        kind = f"{article} {kind}" if self.count is None else f"{_COUNTS.get(self.count, self.count)} {kind}s"
        words = kind if self.range is None else self.range.describe(kind)
        return f"{words} (or null)" if self.may_be_none else words


_COUNTS = {2: "two", 3: "three"}


def read_number_type(declared: Any) -> Number | None:
    """Return the number type of a field's annotation; None for a field of another type."""
    number, kind = None, declared
    if get_origin(declared) is Annotated:
        kind, *notes = get_args(declared)
        number = next((note for note in notes if isinstance(note, Range)), None)
    count, may_be_none = None, type(None) in get_args(kind)
    lists = [part for part in get_args(kind) if get_origin(part) is tuple]
    if may_be_none and len(lists) == 1:
        kind = lists[0]
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if Ellipsis in parts or len(set(parts)) != 1:
            return None
        kind, count = parts[0], len(parts)
    kinds = set(get_args(kind)) or {kind}
    if not kinds & {int, float} or not kinds <= {int, float, type(None)}:
        return None
    return Number(float not in kinds, may_be_none, count, number)


@cache
def list_numbers(config: type[Any]) -> Mapping[str, Number]:
    """Return the number types of a dataclass's fields, by name."""
    numbers = {field.name: read_number_type(field.type) for field in fields(config)}
    return {name: number for name, number in numbers.items() if number is not None}


def find_number_errors(config: Any, *, integers: bool | None = None) -> list[str]:
    """Return the errors of the numbers of a dataclass: of its integers, of all others, or (None) of all."""
    numbers = list_numbers(type(config)).items()
    selected = {name: number for name, number in numbers if integers in (None, number.is_integer)}
    return find_value_errors(selected, vars(config))


def find_choice_errors(config: Any, choices: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the errors of fields whose value is not one of their `choices`."""
    return [
        f"{name} is {shorten_value(getattr(config, name))}; known: {', '.join(known)}"
        for name, known in choices.items()
        if getattr(config, name) not in known
    ]


def find_value_errors(numbers: Mapping[str, Number], values: Mapping[str, Any]) -> list[str]:
    """Return the errors of values whose numbers are declared."""
    errors = (number.describe_error(name, values[name]) for name, number in numbers.items() if name in values)
    return [error for error in errors if error is not None]


def check_fields(config: Any, what: str, choices: Mapping[str, Iterable[str]]) -> None:
    """Raise ConfigError with all errors of the numbers and the `choices` of a dataclass."""
    if wrong := [*find_number_errors(config), *find_choice_errors(config, choices)]:
        raise ConfigError(f"{what}: " + "; ".join(wrong))


def check_unknown_fields(what: str, unknown: Mapping[str, Any], advice: str) -> None:
    """Log unknown fields that are off, and refuse unknown fields that are on.

    Args:
        what: name of the config in errors.
        unknown: the unknown fields and their values, from JSON.
        advice: text that names the version whose fields are supported.

    Raises:
        ConfigError: with the name and value of each field that is on.
    """
    if not unknown:
        return
    on = {name: value for name, value in unknown.items() if not is_off(value)}
    if on:
        found = ", ".join(f"{name[:80]} = {shorten_value(value)}" for name, value in sorted(on.items()))
        raise ConfigError(
            f"{what}: unknown fields {found[:400]}; {advice}. The policy may act differently without them: use a "
            "version of robojax that knows them. If the training did not use a field, set it to null"
        )
    names = ", ".join(shorten_value(name) for name in sorted(unknown))
    logger.warning("%s: ignoring unknown fields that are off: %s; %s", what, names[:400], advice)


def is_off(value: Any) -> bool:
    """Return whether a value of JSON is false, 0, null, or a list or an object that contains only such values."""
    if isinstance(value, Mapping):
        return all(map(is_off, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_off, value))
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def is_number(value: Any, allowed: Range, *, integer: bool = False) -> bool:
    """Return whether a value of a file is a finite number in a range; booleans are not."""
    kinds = (int,) if integer else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    return (isinstance(value, int) or math.isfinite(value)) and value in allowed


def are_numbers(values: Iterable[Any], allowed: Range, *, integer: bool = False) -> bool:
    """Return whether all values are numbers as `is_number` accepts them."""
    return all(is_number(value, allowed, integer=integer) for value in values)


def shorten_value(value: Any) -> str:
    """Return a value for an error text, never longer than a line."""
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8
        self.maxstring = self.maxother = self.maxlong = 90

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= MAX_BITS else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()


def _format_number(number: float | int) -> str:
    return f"{number:,}".replace(",", "_") if isinstance(number, int) and abs(number) >= 10_000 else f"{number:g}"
