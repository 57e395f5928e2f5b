"""Where this machine keeps what can be made or fetched again: programs, frames, policies that were sent."""

import os
from pathlib import Path

OFF = ("", "0", "off", "none", "false")


def user_cache() -> Path:
    """``XDG_CACHE_HOME``, else ``~/.cache`` (https://specifications.freedesktop.org/basedir-spec)."""
    # A variable that is set and empty counts as not set, as that specification has it.
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cache_folder(name: str, asked: str | None = None) -> Path | None:
    """What was asked for: a folder, or ``off``, which is None; else ``robojax/NAME`` in the user's cache folder."""
    if asked is None:
        return user_cache() / "robojax" / name
    return None if asked.lower() in OFF else Path(asked).expanduser()
