"""State folder of a server: lock, secret files, the registry's token."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from service.reloading_file import FileUnusable, read_regular_file
from service.setting_types import SettingsError

OFF = "off"


class StateTaken(Exception):
    """The state folder cannot be used by this server; the text says what to do."""


def state_folder(state: str | None) -> Path | None:
    """Return the folder that the setting `state` names, or None when nothing is written to disk."""
    return None if state in (None, OFF) else Path(state).expanduser()


@contextmanager
def lock_state_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a state folder, which only one server may use.

    Raises:
        StateTaken: another server uses it, or it cannot be created.
    """
    lock = FileLock(folder / "server.lock", mode=0o600, blocking=False, thread_local=False, fallback_to_soft=False)
    name = f"state folder {str(folder)!r}"
    try:
        held = lock.acquire()
    except Timeout:
        raise StateTaken(
            f"{name}: another server uses it; end that server, or give this server another folder"
        ) from None
    except OSError as error:
        why = f"its server.lock cannot be made ({error.strerror}); name another folder with --state"
        raise StateTaken(f"{name}: {why}") from error
    with held:
        yield


def default_state(port: int) -> str:
    """Return the default state folder of a server on this port; a server on any free port (0) has none."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(base).expanduser() / "robojax" / str(port)) if port else OFF


def read_secrets(name: str, path: str | None) -> tuple[str, ...]:
    """Read the lines of a secret file, without empty ones and comments; none when there is no path.

    Raises:
        SettingsError: the file cannot be read, or is empty.
    """
    if path is None:
        return ()
    try:
        lines = read_regular_file(Path(path).expanduser()).decode().splitlines()
    except (FileUnusable, OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or ("it is not text" if isinstance(error, ValueError) else f"it {error}")
        raise SettingsError(f"{name} {path!r}: {why}; wanted a file with one secret per line") from error
    values = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not values:
        raise SettingsError(f"{name} {path!r}: it is empty; wanted a file with one secret per line")
    return values


def load_registry_token(folder: Path) -> tuple[str, Path]:
    """Return the token of this server's registry and its private file, which the first call creates.

    Raises:
        SettingsError: the file cannot be written.
    """
    path = folder / "registry-token"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"rjx_{secrets.token_urlsafe(32)}\n")
        return path.read_text().strip(), path
    except OSError as error:
        raise SettingsError(
            f"state: the registry's token cannot be kept at {str(path)!r} ({error.strerror}); set registry_token_file"
        ) from error
