"""What a server is told by its arguments, and else by the environment."""

import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hooks.receiving.settings import ReceiverSettings
from hooks.serving.at_exit import is_script

SECRET, DATABASE = "WEBHOOK_SECRET", "ROBOJAX_WEBHOOKS_DATABASE"
MEMORY = "memory"
# Servers of one script are told apart by the order in which it makes them.
_made: Iterator[int] = itertools.count(1)


def settings_of(
    given: ReceiverSettings | None,
    secret: str | Sequence[str] | None,
    database: str | Path | None,
    *,
    has_script: bool = True,
) -> ReceiverSettings:
    """The settings with a secret and a database; what is empty counts as not given.

    Args:
        has_script: whether the running program is the one that describes the server, and not a command that loads it.
    """
    settings = given or ReceiverSettings()
    if secret and not isinstance(secret, str):
        settings = replace(settings, secrets=tuple(secret))
    elif secret := secret or (None if settings.secrets else os.environ.get(SECRET)):
        settings = replace(settings, secrets=(secret,))
    database = database or settings.database or os.environ.get(DATABASE) or None
    if database is None and has_script:
        database = usual_database(next(_made))
    return replace(settings, database=None if database in (None, MEMORY) else Path(database))


def usual_folder() -> Path:
    """Where scripts keep their events when nothing else was said."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "robojax" / "webhooks"


def usual_database(number: int) -> Path | None:
    """A file of this script's own in the user's state folder, so that a restart remembers what came.

    None where there is no script to come back (a REPL, a notebook, a test run), or where nothing can be written.

    Args:
        number: of the server in its script, from 1.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not is_script():
        return None
    path = Path(script).resolve()
    # A program that runs other people's apps (uvicorn, robojax) would give all of them one file.
    if path.suffix != ".py" or "site-packages" in path.parts:
        return None
    folder = usual_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    # Two scripts of one name are two scripts.
    name = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return folder / (f"{name}.sqlite3" if number == 1 else f"{name}-{number}.sqlite3")
