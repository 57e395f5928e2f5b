"""Lifecycle of a script's server: it starts when the script ends, with the settings of its environment.

``atexit`` is too late: ``concurrent.futures`` shuts its thread pools down in an earlier hook, which is used here.
"""

import atexit
import hashlib
import importlib
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hooks.errors import HooksError
from hooks.receiver.endpoint import ReceiverSettings

AUTOSTART = "ROBOJAX_WEBHOOKS_AT_EXIT"
# On these versions, the hook cannot start threads (CPython gh-113964).
BROKEN_HOOK_VERSIONS = ((3, 12, 0), (3, 12, 1))


def is_interactive() -> bool:
    """Whether Python runs interactively (REPL, ``python -i``, IPython, a notebook), so that the script never ends."""
    ipython = sys.modules.get("IPython")
    return (
        hasattr(sys, "ps1")
        or bool(sys.flags.interactive)
        or (ipython is not None and getattr(ipython, "get_ipython", lambda: None)() is not None)
    )


def is_script() -> bool:
    """Whether this process runs a script as its main program."""
    return not (
        is_interactive()
        # Test runs and child processes only import scripts.
        or "pytest" in sys.modules
        or "unittest.__main__" in sys.modules
        or multiprocessing.parent_process() is not None
    )


class AtExit:
    """Call at the end of the script, unless it is cancelled, the script crashes, or the environment disables it."""

    def __init__(self, function: Callable[[], object]):
        self._function = function
        self._process = os.getpid()
        self._is_on = False
        self._is_registered = False

    def arm(self) -> None:
        """Schedule the call for the script's end; repeated calls schedule it once."""
        self._is_on = is_script() and os.environ.get(AUTOSTART, "").lower() not in ("0", "off", "no", "false")
        if self._is_on and not self._is_registered:
            self._is_registered = True
            register_at_exit(self._run)

    def cancel(self) -> None:
        """Cancel the call."""
        self._is_on = False

    def _run(self) -> None:
        has_crashed = hasattr(sys, "last_exc") or getattr(sys, "last_type", None) is not None
        # A spawned process knows that it is a child only after it has imported the script.
        if not self._is_on or not is_script() or has_crashed or os.getpid() != self._process:
            return
        self._is_on = False
        if sys.version_info[:3] in BROKEN_HOOK_VERSIONS:
            sys.stderr.write("webhooks: this Python cannot serve at the end of a script; call .run() in the script\n")
            _exit(1)
        try:
            self._function()
        # An exception would only be printed here, and the exit code would be 0.
        except HooksError as error:
            sys.stderr.write(f"webhooks: {error}\n")
            _exit(1)
        except KeyboardInterrupt:
            _exit(130)


def _exit(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def register_at_exit(function: Callable[[], Any]) -> None:
    """Register a call for the end of the main program, while threads still work; raise ``RuntimeError`` after it."""
    # Both modules register their shutdown at import, and the calls run in reverse order.
    for pools in ("concurrent.futures.thread", "concurrent.futures.process"):
        try:
            importlib.import_module(pools)
        except ImportError:  # The second module needs semaphores.
            continue
    threading._register_atexit(function)  # type: ignore[attr-defined]


SECRET, DATABASE = "WEBHOOK_SECRET", "ROBOJAX_WEBHOOKS_DATABASE"
MEMORY = "memory"
# Numbers of a script's servers, in the order of their creation.
_server_numbers: Iterator[int] = itertools.count(1)


def resolve_settings(
    settings: ReceiverSettings | None,
    secret: str | Sequence[str] | None,
    database: str | Path | None,
) -> ReceiverSettings:
    """Complete the settings with a secret and a database; empty values count as None."""
    settings = settings or ReceiverSettings()
    if secret and not isinstance(secret, str):
        settings = replace(settings, secrets=tuple(secret))
    elif secret := secret or (None if settings.secrets else os.environ.get(SECRET)):
        settings = replace(settings, secrets=(secret,))
    database = database or settings.database or os.environ.get(DATABASE) or None
    if database is None:
        database = choose_database(next(_server_numbers))
    return replace(settings, database=None if database in (None, MEMORY) else Path(database))


def get_default_folder() -> Path:
    """Return the folder for the events of scripts without a named database."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "robojax" / "webhooks"


def choose_database(number: int) -> Path | None:
    """Choose a file for the ``number``-th server of this script in the state folder; None without such a script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not is_script():
        return None
    path = Path(script).resolve()
    # Programs that run other apps (uvicorn, robojax) would share one file between all apps.
    if path.suffix != ".py" or "site-packages" in path.parts:
        return None
    folder = get_default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    # The hash distinguishes scripts with the same name.
    name = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return folder / (f"{name}.sqlite3" if number == 1 else f"{name}-{number}.sqlite3")
