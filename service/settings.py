"""All settings of the server: flags over environment over TOML over defaults."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from service.auth.config import AccessSettings
from service.control.config import ControlSettings, SafetySettings
from service.control.limits import LimitsError, read_limits
from service.distributed.config import ClusterSettings, HostSettings
from service.http.config import LimitSettings, ServerSettings, TransportSettings
from service.inference.config import ModelSettings, PolicySettings
from service.logging import LogSettings
from service.recording.recorder import RecordingSettings
from service.rollout.config import UpdateSettings, WebhookSettings
from service.setting_types import PREFIX, Group, SettingsError

__all__ = ["FILE", "GROUPS", "PREFIX", "Settings", "SettingsError", "load_settings", "unknown_variables"]

FILE = "robojax.toml"
FILE_VARIABLE = f"{PREFIX}CONFIG"
_SECRET = {"database"}  # what was found is not told again
KEY_VARIABLE = f"{PREFIX}KEY"  # no setting of a server: what commands send to one

# As they stand in the help and in the file; each setting is in exactly one of them.
GROUPS: tuple[type[Group], ...] = (
    ServerSettings,
    AccessSettings,
    LimitSettings,
    ControlSettings,
    SafetySettings,
    PolicySettings,
    HostSettings,
    ClusterSettings,
    ModelSettings,
    TransportSettings,
    UpdateSettings,
    WebhookSettings,
    RecordingSettings,
    LogSettings,
)


class Settings(
    LogSettings,
    RecordingSettings,
    WebhookSettings,
    UpdateSettings,
    TransportSettings,
    ModelSettings,
    ClusterSettings,
    HostSettings,
    PolicySettings,
    SafetySettings,
    ControlSettings,
    LimitSettings,
    AccessSettings,
    ServerSettings,
):
    """A setting has one name: ``--frame-age-limit``, ``ROBOJAX_FRAME_AGE_LIMIT``, ``frame_age_limit`` in the file."""


def load_settings(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """Settings from everywhere.

    Args:
        flags: setting name to what a command line said; None is "not said".
        file: a TOML file; ``ROBOJAX_CONFIG`` names one too, else ``robojax.toml`` here is read if there is one.

    Raises:
        SettingsError: something cannot be read or used; lists everything that is wrong.
    """
    path = _file(file)
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("flag --{flag}", {name: value for name, value in (flags or {}).items() if value is not None}),
        (f"environment {PREFIX}{{upper}}", EnvSettingsSource(Settings, env_prefix=PREFIX, case_sensitive=False)()),
    ]
    if path is not None:
        sources.append((f"{path} {{name}}", _read(path)))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, values in reversed(sources):
        for name, value in values.items():
            merged[name] = value
            origin[name] = place.format(name=name, flag=name.replace("_", "-"), upper=name.upper())
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise SettingsError(_explain(error, origin)) from error
    if settings.limits is not None:
        try:
            read_limits(settings.limits)
        except LimitsError as error:
            raise SettingsError(f"limits ({origin.get('limits', 'default')}): {error}") from error
    if settings.update_quiet > settings.update_latest:
        where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in ("update_quiet", "update_latest"))
        found = f"{settings.update_quiet:g} and {settings.update_latest:g}"
        raise SettingsError(f"{where}: found {found}; wanted update_quiet <= update_latest")
    if settings.degraded_after >= settings.stop_after:
        where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in ("degraded_after", "stop_after"))
        found = f"{settings.degraded_after:g} and {settings.stop_after:g}"
        raise SettingsError(f"{where}: found {found}; wanted degraded_after < stop_after")
    if settings.placement == "shard" and not settings.devices:
        where = origin.get("placement", "default")
        raise SettingsError(f"placement ({where}): found shard without devices; wanted devices too, as --devices all")
    if settings.engines_most is not None and settings.engines > settings.engines_most:
        where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in ("engines", "engines_most"))
        raise SettingsError(
            f"{where}: found {settings.engines} and {settings.engines_most}; wanted engines <= engines_most"
        )
    if settings.hosts_count > 1 and (settings.devices, settings.placement) != (("all",), "shard"):
        where = origin.get("hosts_count", "default")
        raise SettingsError(
            f"hosts_count ({where}): found {settings.hosts_count}; wanted --devices all --placement shard with it"
        )
    if settings.hosts_count > 1 and settings.engine != "here":
        where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in ("hosts_count", "engine"))
        raise SettingsError(
            f"{where}: found {settings.hosts_count} and {settings.engine}; wanted one of the two: a policy over "
            "several hosts, or engines of a cluster"
        )
    alone = [name for name in ("front_name", "front_url") if getattr(settings, name) is not None]
    if alone and settings.database is None:
        where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in alone)
        raise SettingsError(f"{where}: found without database; wanted --database postgresql://... for all servers, too")
    if settings.rate > settings.max_rate:
        where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in ("rate", "max_rate"))
        raise SettingsError(f"{where}: found {settings.rate:g} and {settings.max_rate:g}; wanted rate <= max_rate")
    return settings


def unknown_variables() -> list[str]:
    """Environment variables that look like settings and are none.

    They are no errors: container platforms put variables of this form there by themselves.
    """
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {FILE_VARIABLE, KEY_VARIABLE}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def _file(asked: Path | None) -> Path | None:
    named = asked or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
    if named is None:
        return Path(FILE) if Path(FILE).is_file() else None
    if not named.is_file():
        source = "flag --config" if asked else f"environment {FILE_VARIABLE}"
        raise SettingsError(f"config ({source}): found no file {str(named)!r}; wanted a TOML file")
    return named


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return TomlConfigSettingsSource(Settings, path)()
    except (ValueError, OSError) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise SettingsError(f"config ({path}): {error}; wanted a readable TOML file") from error


def _explain(error: ValidationError, origin: Mapping[str, str]) -> str:
    lines = []
    for entry in error.errors(include_url=False, include_context=False):
        name, *inside = map(str, entry["loc"])
        if entry["type"] == "extra_forbidden":
            close = get_close_matches(name, Settings.model_fields, n=1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"wanted one of {', '.join(sorted(Settings.model_fields))}"
            )
            lines.append(f"{name} ({origin.get(name, 'unknown')}): no such setting; {hint}")
            continue
        wanted = entry["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        found = "another value" if name in _SECRET else repr(entry["input"])
        lines.append(
            f"{'.'.join([name, *inside])} ({origin.get(name, 'default')}): found {found[:80]}; wanted {wanted}"
        )
    return "\n".join(lines)
