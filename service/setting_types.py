"""Base class of setting groups, value parsers, SettingsError."""

import ipaddress
import json
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat
from pydantic_core import PydanticCustomError

# Of sessions, cameras, workspaces, models, keys and owners. Names travel in URL paths, and clients of the RobotHub wire
# do not percent-encode.
NAME_PATTERN = r"^(?!\.+$)[A-Za-z0-9_.-]{1,64}$"
NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")  # `$` alone would let a last newline pass
# Control characters other than newline and tab, and lone surrogates, which no encoding has.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _split(value: object) -> object:
    """``a, b`` as flags and the environment say it; a TOML array passes."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def read_json(value: object) -> object:
    """Return a value from JSON, as flags say it; other values pass. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"JSON ({error})") from error


def _ranges(value: Mapping[str, tuple[float, float]]) -> Mapping[str, tuple[float, float]]:
    empty = sorted(name for name, (low, high) in value.items() if not low < high)
    if empty:
        raise ValueError(f"low below high for {', '.join(empty)}")
    return value


def _sources(value: object) -> object:
    """``name=path[@revision]`` once per model, as flags say it or with commas between; a TOML table passes."""
    if isinstance(value, str):
        value = _split(value)
    if isinstance(value, list | tuple):
        pairs = [(name, path) for name, _, path in (str(part).partition("=") for part in value)]
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"each name once, not {', '.join(twice)} twice")
        value = dict(pairs)
    if not isinstance(value, Mapping):
        raise ValueError("name=path or name=path@revision")
    return {str(name): _source(str(name), source) for name, source in value.items()}


def _source(name: str, source: object) -> object:
    if not isinstance(source, str):
        return source  # read already
    if not NAME.fullmatch(name):
        raise ValueError("name=path with a name of 1 to 64 letters, digits, '_', '.' or '-' (not only dots)")
    path, _, revision = source.strip().rpartition("@") if "@" in source else (source.strip(), "", "")
    if not path or Path(source.strip()).expanduser().exists():
        path, revision = source.strip(), ""
    if not path:
        raise ValueError(f"a path or a repo id after {name}=")
    return (path, revision or None)


def _amounts(value: object) -> object:
    """``CPU=1,GPU=0.5``, as flags say it; a TOML table passes."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in map(str.strip, value.split(",")) if part]
    if wrong := [name for name, equals, amount in pairs if not (name and equals and amount)]:
        raise ValueError(f"NAME=AMOUNT with commas between, not {wrong[0]!r}")
    return {name.strip(): amount.strip() for name, _, amount in pairs}


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(f"networks as 192.168.1.0/24 or 10.0.0.7 ({error})") from None
    return value


def _matching(pattern: str, wanted: str) -> AfterValidator:
    """Return a validator of a text; its error does not show the value, which may hold a password."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(wanted)
        return value

    return AfterValidator(check)


Where = Annotated[
    str,
    _matching(r"local|ray-local|ray-auto|ray://[^/@\s]+:\d+", "local, ray-local, ray-auto or ray://HOST:PORT"),
]
DatabaseUrl = Annotated[str, _matching(r"postgres(ql)?://\S+", "postgresql://USER@HOST:PORT/NAME")]
Address = Annotated[str, _matching(r"https?://[^/@\s]+", "http://HOST:PORT or https://HOST:PORT, without a path")]
_ENDPOINT = r"(tcp|tls)/(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):\d{1,5}"
ZenohEndpoint = Annotated[str, _matching(_ENDPOINT, "tcp/HOST:PORT or tls/HOST:PORT")]
Amounts = Annotated[Mapping[str, Annotated[FiniteFloat, Field(gt=0)]], BeforeValidator(_amounts)]
Sources = Annotated[Mapping[str, tuple[str, str | None]], BeforeValidator(_sources)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Networks = Annotated[Names, AfterValidator(_check_networks)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=512)], ...], BeforeValidator(_split)]
Ranges = Annotated[Mapping[str, tuple[FiniteFloat, FiniteFloat]], BeforeValidator(read_json), AfterValidator(_ranges)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]
Step = Annotated[FiniteFloat, Field(gt=0)]
Steps = Annotated[Step | Mapping[str, Step] | None, BeforeValidator(read_json)]


class SettingsError(Exception):
    """Settings that cannot be used; the text has each setting, its source, its value and the accepted values."""


class Mark(Enum):
    """What the type of a setting says about it beyond its value, as ``Common[int]``."""

    COMMON = "common"
    PRIVATE = "private"


Value = TypeVar("Value")
# In `robojax serve --help`, which shows what most people need; `--help-all` shows all.
Common = Annotated[Value, Mark.COMMON]
# A path on this machine, or a secret: GET /debug/system leaves it out.
Private = Annotated[Value, Mark.PRIVATE]


class Group(BaseModel):
    """Base class of a group of settings. The docstring of a group is its heading in the help.

    A setting is a field of one group. Its flag, its environment variable, its key in a file and its line in the help
    and in docs/reference/settings.md follow from it. A field with ``repr=False`` is a secret and is never shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


def conflict(values: Mapping[str, object], wanted: str, found: str | None = None) -> PydanticCustomError:
    """Make the error of settings that contradict each other, for validators to raise.

    Args:
        values: name to value of the settings to change.
        found: text instead of their values.
    """
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values.values())
    return PydanticCustomError(
        "conflict",
        "found {found}; wanted {wanted}",
        {"found": found or " and ".join(shown), "wanted": wanted, "names": tuple(values)},
    )
