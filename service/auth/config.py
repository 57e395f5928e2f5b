"""Access settings and paths of key files."""

from pathlib import Path

from pydantic import Field, FiniteFloat

from service.setting_types import Common, Group, Private
from service.state import state_folder


class AccessSettings(Group):
    """Access."""

    insecure: Common[bool] = Field(
        default=False,
        description="Accept all clients if there is no key, also from other machines",
    )
    keys_file: Common[Private[str | None]] = Field(
        default=None,
        description="File of the keys that `robojax token new` creates; default: keys.json in the state folder. If "
        "it has a key, every request needs one.",
    )
    jwt_secret_file: Private[str | None] = Field(
        default=None,
        description="File with the secret that signs bearer tokens; default: jwt-secret in the state folder, which "
        "`robojax token jwt` creates",
    )
    jwt_hours: FiniteFloat = Field(default=24.0, gt=0, le=720, description="Lifetime limit of a bearer token, in hours")
    transport_key_file: Private[str | None] = Field(
        default=None,
        description="File with lines of URL and key, for sessions with rooms on another server that requires keys",
    )


KEYS = "keys.json"
SECRET = "jwt-secret"


def keys_path(access: AccessSettings, state: str | None) -> Path | None:
    """Return the path of the keys' file, which need not exist; None when nothing is written to disk."""
    return _path(access.keys_file, state, KEYS)


def secret_path(access: AccessSettings, state: str | None) -> Path | None:
    """Return the path of the bearer tokens' secret, which need not exist; None when nothing is written to disk."""
    return _path(access.jwt_secret_file, state, SECRET)


def _path(named: str | None, state: str | None, usual: str) -> Path | None:
    if named is not None:
        return Path(named).expanduser()
    folder = state_folder(state)
    return None if folder is None else folder / usual
