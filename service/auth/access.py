"""Who is let into a server with these settings: where its keys are, and whether it may listen where it is to."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from service.auth.admission import Admissions
from service.auth.guard import Guard, Rule
from service.auth.keys import KeyFile
from service.auth.tokens import SecretFile
from service.auth.watched import FileUnusable
from service.origins import Origins
from service.settings import Settings, SettingsError
from service.state import state_folder

KEYS = "keys.json"
SECRET = "jwt-secret"


def keys_path(settings: Settings) -> Path | None:
    """Where the keys are, or would be; None when nothing is kept."""
    return _path(settings, settings.keys_file, KEYS)


def secret_path(settings: Settings) -> Path | None:
    """Where the secret of bearer tokens is, or would be; None when nothing is kept."""
    return _path(settings, settings.jwt_secret_file, SECRET)


def guard_of(settings: Settings, rules: Sequence[Rule] = ()) -> Guard:
    """The guard of a server.

    Raises:
        SettingsError: a file of keys or secrets cannot be used, or is named and not there.
    """
    for name in ("keys_file", "jwt_secret_file"):
        named = getattr(settings, name)
        if named is not None and not Path(named).expanduser().is_file():
            made = "robojax token new --keys-file" if name == "keys_file" else "robojax token jwt --jwt-secret-file"
            raise SettingsError(f"{name}: there is no file {named!r}; `{made} {named}` makes it")
    keys, secret = keys_path(settings), secret_path(settings)
    admissions = Admissions(
        None if keys is None else KeyFile(keys),
        None if secret is None else SecretFile(secret, settings.jwt_hours * 3600),
        # A file that was named is meant: with no key in it, nobody gets in.
        is_wanted=settings.keys_file is not None or settings.jwt_secret_file is not None,
    )
    try:
        admissions.check()
    except FileUnusable as error:
        raise SettingsError(str(error)) from error
    origins = Origins(settings.origins)
    return Guard(admissions, origins=origins, is_local=is_loopback(settings.host), rules=rules)


def is_loopback(host: str) -> bool:
    """Whether an address, or ``localhost``, is only for this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(settings: Settings, named: str | None, usual: str) -> Path | None:
    if named is not None:
        return Path(named).expanduser()
    folder = state_folder(settings)
    return None if folder is None else folder / usual
