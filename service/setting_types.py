"""Base class of setting groups, value parsers, SettingsError."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

MODEL_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,64}")


def _split(value: object) -> object:
    """``a, b`` as flags and the environment say it; a TOML array passes."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _from_json(value: object) -> object:
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
    if not MODEL_NAME.fullmatch(name):
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


def _engine(value: str) -> str:
    if not re.fullmatch(r"here|ray-local|ray-auto|ray://[^/@\s]+:\d+", value):
        raise ValueError("here, ray-local, ray-auto or ray://HOST:PORT")
    return value


def _database(value: str) -> str:
    # What was found is not told again: it may hold a password.
    if not re.fullmatch(r"postgres(ql)?://\S+", value):
        raise ValueError("postgresql://USER@HOST:PORT/NAME")
    return value


def _address(value: str) -> str:
    if not re.fullmatch(r"https?://[^/@\s]+", value):
        raise ValueError("http://HOST:PORT or https://HOST:PORT, without a path")
    return value


Where = Annotated[str, AfterValidator(_engine)]
DatabaseUrl = Annotated[str, AfterValidator(_database)]
Address = Annotated[str, AfterValidator(_address)]
Amounts = Annotated[Mapping[str, Annotated[FiniteFloat, Field(gt=0)]], NoDecode, BeforeValidator(_amounts)]
Sources = Annotated[Mapping[str, tuple[str, str | None]], NoDecode, BeforeValidator(_sources)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=512)], ...], NoDecode, BeforeValidator(_split)]
Ranges = Annotated[
    Mapping[str, tuple[FiniteFloat, FiniteFloat]], NoDecode, BeforeValidator(_from_json), AfterValidator(_ranges)
]
Seconds = Annotated[FiniteFloat, Field(gt=0)]
Step = Annotated[FiniteFloat, Field(gt=0)]
Steps = Annotated[Step | Mapping[str, Step] | None, NoDecode, BeforeValidator(_from_json)]


PREFIX = "ROBOJAX_"


class SettingsError(Exception):
    """Settings that cannot be used; the text names each setting, its source, what was found and what was wanted."""


class Group(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Only what `load_settings` gathered, and what tests give: it knows where each value came from.
        return (init_settings,)
