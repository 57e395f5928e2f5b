"""Lifecycle of a script's server: it starts when the script ends and serves until a signal.

``atexit`` is too late: by then thread pools are shut, and with them ``asyncio.to_thread`` and name look-ups. The hook
that ``concurrent.futures`` shuts its pools by runs earlier, and the last one registered goes first.
"""

import atexit
import hashlib
import importlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hooks.errors import HooksError
from hooks.receiver.endpoint import ReceiverSettings

AUTOSTART = "ROBOJAX_WEBHOOKS_AT_EXIT"
# There the hook is called, but no thread can be started in it any more (CPython gh-113964).
BROKEN_HOOK_VERSIONS = ((3, 12, 0), (3, 12, 1))
RUNNER = "hooks.server.script"


def is_interactive() -> bool:
    """Whether a person types here (REPL, ``python -i``, IPython, a notebook), so that no end of a script will come."""
    ipython = sys.modules.get("IPython")
    return (
        hasattr(sys, "ps1")
        or bool(sys.flags.interactive)
        or (ipython is not None and getattr(ipython, "get_ipython", lambda: None)() is not None)
    )


def is_autostart_allowed() -> bool:
    """Whether a server may start by itself at the end of this process."""
    return os.environ.get(AUTOSTART, "").lower() not in ("0", "off", "no", "false") and is_script()


def is_script() -> bool:
    """Whether this process runs a script of its own, which ends by itself and may be started again."""
    return not (
        is_interactive()
        # Test runs and child processes import scripts; that is no running of them.
        or "pytest" in sys.modules
        or "unittest.__main__" in sys.modules
        or multiprocessing.parent_process() is not None
    )


def has_crashed() -> bool:
    """Whether the script ended by an uncaught exception; its error is then the last word."""
    return hasattr(sys, "last_exc") or getattr(sys, "last_type", None) is not None


class AtExit:
    """Call at the end of the script, unless cancelled, the script crashed, or the start by itself is switched off."""

    def __init__(self, function: Callable[[], object]):
        self._function = function
        self._process = os.getpid()
        self._is_on = False
        self._is_registered = False

    def arm(self) -> None:
        """Schedule the call for the script's end; repeated calls schedule it once."""
        self._is_on = is_autostart_allowed()
        if not self._is_on or self._is_registered:
            return
        self._is_registered = True
        register = get_exit_hook()
        if register is not None:
            register(self._run)
        else:
            # Asked now: at its end a script has forgotten its file.
            atexit.register(self._restart_script, get_restart_command())

    def cancel(self) -> bool:
        """Cancel the call; return whether it was scheduled."""
        was_on, self._is_on = self._is_on, False
        return was_on

    def _is_due(self) -> bool:
        # Asked again: a spawned process does not know yet that it is a child while it imports the script.
        return self._is_on and is_autostart_allowed() and not has_crashed() and os.getpid() == self._process

    def _run(self) -> None:
        if not self._is_due():
            return
        self._is_on = False
        try:
            self._function()
        # An exception would only be printed here, and the process would end with 0.
        except HooksError as error:
            sys.stderr.write(f"webhooks: {error}\n")
            _exit(1)
        except KeyboardInterrupt:
            _exit(130)

    def _restart_script(self, command: list[str] | None) -> None:
        if self._is_due():
            self._is_on = False
            if command is None:
                sys.stderr.write("webhooks: this Python cannot serve at the end of a script; call .run() in it\n")
                return
            sys.stdout.flush()
            sys.stderr.flush()
            os.execv(command[0], command)


def _exit(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def get_exit_hook(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Callable[[Callable[[], Any]], None] | None:
    """Return the function that registers a call at exit; None where this Python has none that works."""
    # Imported now: both register themselves at import, which fails later, and have to be shut after us.
    for pools in ("concurrent.futures.thread", "concurrent.futures.process"):
        try:
            importlib.import_module(pools)
        except ImportError:  # the second one, where there are no semaphores
            continue
    return None if version in BROKEN_HOOK_VERSIONS else getattr(threading, "_register_atexit", None)


def get_restart_command() -> list[str] | None:
    """Return the command that runs this script in a process that serves at its end; None without a file."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        script = ["-m", name]
    elif file := getattr(main, "__file__", None):
        script = [os.path.abspath(file)]
    else:
        return None
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-m", RUNNER, *script, *sys.argv[1:]]


SECRET, DATABASE = "WEBHOOK_SECRET", "ROBOJAX_WEBHOOKS_DATABASE"
MEMORY = "memory"
# Servers of one script are told apart by the order in which it makes them.
_server_numbers: Iterator[int] = itertools.count(1)


def resolve_settings(
    settings: ReceiverSettings | None,
    secret: str | Sequence[str] | None,
    database: str | Path | None,
    *,
    has_script: bool = True,
) -> ReceiverSettings:
    """Complete the settings with a secret and a database; empty values count as not given.

    Args:
        has_script: whether the running program is the one that describes the server, and not a command that loads it.
    """
    settings = settings or ReceiverSettings()
    if secret and not isinstance(secret, str):
        settings = replace(settings, secrets=tuple(secret))
    elif secret := secret or (None if settings.secrets else os.environ.get(SECRET)):
        settings = replace(settings, secrets=(secret,))
    database = database or settings.database or os.environ.get(DATABASE) or None
    if database is None and has_script:
        database = choose_database(next(_server_numbers))
    return replace(settings, database=None if database in (None, MEMORY) else Path(database))


def get_default_folder() -> Path:
    """Return the folder for scripts' events when none is given."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "robojax" / "webhooks"


def choose_database(number: int) -> Path | None:
    """Choose a database file for this script in the user's state folder, so that a restart remembers its events.

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
    folder = get_default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    # Two scripts of one name are two scripts.
    name = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return folder / (f"{name}.sqlite3" if number == 1 else f"{name}-{number}.sqlite3")
