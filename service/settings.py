"""All settings of the server: flags over environment over TOML over defaults."""

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from service.auth.config import AccessSettings
from service.control.config import ControlSettings, SafetySettings
from service.control.limits import LimitsError, read_limits
from service.distributed.config import ClusterSettings
from service.http.config import LerobotSettings, LimitSettings, ServerSettings, TransportSettings
from service.inference.config import ModelSettings, PolicySettings
from service.logging import LogSettings
from service.recording.recorder import RecordingSettings
from service.rollout.config import UpdateSettings, WebhookSettings
from service.setting_types import Group, Mark, SettingsError
from service.state import default_state

PREFIX = "ROBOJAX_"
FILE = "robojax.toml"
FILE_VARIABLE = f"{PREFIX}CONFIG"
# Commands and clients read these; they are not settings of a server.
CLIENT_VARIABLES = frozenset({f"{PREFIX}KEY", f"{PREFIX}SERVER"})


class Settings(BaseModel):
    """All settings by group, in the order of the help: ``settings.control.rate``.

    For users, a setting has one name without its group: ``--frame-age-limit``, ``ROBOJAX_FRAME_AGE_LIMIT``,
    ``frame_age_limit`` in the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = ServerSettings()
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    control: ControlSettings = ControlSettings()
    safety: SafetySettings = SafetySettings()
    policies: PolicySettings = PolicySettings()
    cluster: ClusterSettings = ClusterSettings()
    models: ModelSettings = ModelSettings()
    transport: TransportSettings = TransportSettings()
    lerobot: LerobotSettings = LerobotSettings()
    updates: UpdateSettings = UpdateSettings()
    webhooks: WebhookSettings = WebhookSettings()
    recording: RecordingSettings = RecordingSettings()
    logging: LogSettings = LogSettings()

    @classmethod
    def from_values(cls, **values: object) -> Self:
        """Create settings from these values by name and the defaults, without flags, environment and files.

        Raises:
            ValidationError: a value cannot be used.
            KeyError: there is no setting of a name.
        """
        groups: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            groups.setdefault(_GROUP_OF[name], {})[name] = value
        return cls.model_validate(groups)

    def public_values(self) -> dict[str, object]:
        """Return the values by name, JSON-ready, without paths on this machine and secrets."""
        groups = self.model_dump(mode="json").values()
        values = {name: value for group in groups for name, value in group.items()}
        return {name: value for name, value in values.items() if Mark.PRIVATE not in FIELDS[name].metadata}

    def with_state(self) -> Self:
        """Return these settings, with the state folder of this port if none is named."""
        if self.webhooks.state is not None:
            return self
        webhooks = self.webhooks.model_copy(update={"state": default_state(self.server.port)})
        return self.model_copy(update={"webhooks": webhooks})


GROUPS: Mapping[str, type[Group]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Group)
}
FIELDS: Mapping[str, FieldInfo] = {
    name: field for group in GROUPS.values() for name, field in group.model_fields.items()
}
_GROUP_OF = {name: attribute for attribute, group in GROUPS.items() for name in group.model_fields}


def load_settings(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """Load the settings from all sources.

    Args:
        flags: setting name to its value on the command line; None if it is not given.
        file: a TOML file; ``ROBOJAX_CONFIG`` names one too, else ``robojax.toml`` here is read if there is one.

    Raises:
        SettingsError: a source or a value cannot be used; the text lists all problems.
    """
    path = _find_file(file)
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("flag --{flag}", {name: value for name, value in (flags or {}).items() if value is not None}),
        (f"environment {PREFIX}{{upper}}", _read_environment()),
    ]
    if path is not None:
        sources.append((f"{path} {{name}}", _read_file(path)))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, values in reversed(sources):
        for name, value in values.items():
            merged[name] = value
            origin[name] = place.format(name=name, flag=name.replace("_", "-"), upper=name.upper())
    wrong = [_explain_unknown(name, origin[name]) for name in merged if name not in FIELDS]
    try:
        settings = Settings.from_values(**{name: value for name, value in merged.items() if name in FIELDS})
    except ValidationError as error:
        raise SettingsError("\n".join([*_explain(error, origin), *wrong])) from error
    if wrong:
        raise SettingsError("\n".join(wrong))
    if settings.safety.limits is not None:
        try:
            read_limits(settings.safety.limits)
        except LimitsError as error:
            raise SettingsError(f"limits ({origin.get('limits', 'default')}): {error}") from error
    return settings


def unknown_variables() -> list[str]:
    """Return environment variables that look like settings, but are not.

    They are not errors, because container platforms set such variables themselves.
    """
    known = {f"{PREFIX}{name.upper()}" for name in FIELDS} | {FILE_VARIABLE} | CLIENT_VARIABLES
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def _read_environment() -> Mapping[str, str]:
    """Return the environment's values by setting; variables may be in small letters."""
    lowered = {name.lower(): value for name, value in os.environ.items()}
    variables = {name: f"{PREFIX}{name}".lower() for name in FIELDS}
    return {name: lowered[variable] for name, variable in variables.items() if variable in lowered}


def _find_file(asked: Path | None) -> Path | None:
    named = asked or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
    if named is None:
        return Path(FILE) if Path(FILE).is_file() else None
    if not named.is_file():
        source = "flag --config" if asked else f"environment {FILE_VARIABLE}"
        raise SettingsError(f"config ({source}): found no file {str(named)!r}; wanted a TOML file")
    return named


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise SettingsError(f"config ({path}): {error}; wanted a readable TOML file") from error


def _explain_unknown(name: str, origin: str) -> str:
    close = get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"wanted one of {', '.join(sorted(FIELDS))}"
    return f"{name} ({origin}): no such setting; {hint}"


def _explain(error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    """Return a line for each problem."""
    lines = []
    for entry in error.errors(include_url=False):
        if entry["type"] == "conflict":
            where = " and ".join(f"{name} ({origin.get(name, 'default')})" for name in entry.get("ctx", {})["names"])
            lines.append(f"{where}: {entry['msg']}")
            continue
        _, name, *inside = map(str, entry["loc"])
        wanted = entry["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        found = repr(entry["input"]) if FIELDS[name].repr else "another value"
        lines.append(
            f"{'.'.join([name, *inside])} ({origin.get(name, 'default')}): found {found[:80]}; wanted {wanted}"
        )
    return lines
