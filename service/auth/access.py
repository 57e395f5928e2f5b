"""The guard of a server, as its settings want it."""

from collections.abc import Sequence
from pathlib import Path

from service.auth.admission import Admissions
from service.auth.guard import Guard, Rule
from service.auth.keys import KeyFile
from service.auth.places import is_loopback, keys_path, secret_path
from service.auth.tokens import SecretFile
from service.auth.watched import FileUnusable
from service.edge.origins import Origins
from service.settings import Settings, SettingsError


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
    keys, secret = keys_path(settings, settings.state), secret_path(settings, settings.state)
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
