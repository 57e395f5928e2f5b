"""Where a server with these settings has its keys and the secret of its tokens, and whom its address is for."""

import ipaddress
from pathlib import Path

from service.setting_groups.access import AccessSettings
from service.state import state_folder

KEYS = "keys.json"
SECRET = "jwt-secret"


def keys_path(access: AccessSettings, state: str | None) -> Path | None:
    """Where the keys are, or would be; None when nothing is kept."""
    return _path(access.keys_file, state, KEYS)


def secret_path(access: AccessSettings, state: str | None) -> Path | None:
    """Where the secret of bearer tokens is, or would be; None when nothing is kept."""
    return _path(access.jwt_secret_file, state, SECRET)


def is_loopback(host: str) -> bool:
    """Whether an address, or ``localhost``, is only for this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(named: str | None, state: str | None, usual: str) -> Path | None:
    if named is not None:
        return Path(named).expanduser()
    folder = state_folder(state)
    return None if folder is None else folder / usual
