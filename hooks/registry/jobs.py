"""The jobs that webhooks may start, from the operator's TOML file.

A request only ever names one by its id. What runs, where, and with which variables is in the file::

    [jobs.retrain]
    argv = ["/srv/retrain/.venv/bin/python", "retrain.py"]
    cwd = "/srv/retrain"             # default: the folder of this file
    env = { WANDB_MODE = "offline" } # beside PATH, HOME, LANG and the WEBHOOK_ variables
    secrets = ["HF_TOKEN"]           # variables that a webhook may set
    timeout = 600                    # seconds
    max_output = 16384               # bytes of its output that are kept, the last ones
"""

import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hooks.errors import InvalidSettings

MOST_OUTPUT = 1 << 20
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_KEYS = {"argv", "cwd", "env", "secrets", "timeout", "max_output"}


@dataclass(frozen=True)
class Job:
    """A program with its arguments; see the module."""

    id: str
    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = ()
    timeout: float = 600.0
    max_output: int = 16 << 10


def load_jobs(path: Path | None) -> dict[str, Job]:
    """The jobs of a file, by id; none without a file.

    Raises:
        InvalidSettings: with all that is wrong in it.
    """
    if path is None:
        return {}
    try:
        mode = path.stat().st_mode
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidSettings(f"jobs file {str(path)!r}: {error.strerror or type(error).__name__}") from error
    except ValueError as error:  # of the TOML, or of its encoding
        raise InvalidSettings(f"jobs file {str(path)!r}: {error}") from error
    wrong: list[str] = []
    if mode & stat.S_IWOTH:
        wrong.append("everybody on this machine can write it, and so start anything as this server; chmod o-w")
    table = content.get("jobs", {})
    if not isinstance(table, dict) or set(content) - {"jobs"}:
        wrong.append(f"wanted only tables [jobs.ID], found {', '.join(sorted(content))}")
        table = {}
    jobs = {name: _job(name, given, path.resolve().parent, wrong) for name, given in table.items()}
    if wrong:
        raise InvalidSettings(f"jobs file {str(path)!r}: " + "; ".join(wrong))
    return {name: job for name, job in jobs.items() if job is not None}


def _job(name: str, given: object, folder: Path, wrong: list[str]) -> Job | None:
    if not isinstance(given, dict):
        wrong.append(f"{name}: wanted a table")
        return None
    before = len(wrong)

    def check(is_right: bool, text: str) -> None:
        if not is_right:
            wrong.append(f"{name}: {text}")

    argv, cwd, env = given.get("argv", []), given.get("cwd", "."), given.get("env", {})
    secrets, timeout, most = given.get("secrets", []), given.get("timeout", 600), given.get("max_output", 16 << 10)
    check(bool(_ID.fullmatch(name)), "an id is of letters, digits, dots, dashes and underscores")
    check(not set(given) - _KEYS, f"unknown {', '.join(sorted(set(given) - _KEYS))}; known: {', '.join(sorted(_KEYS))}")
    check(_is_texts(argv) and bool(argv), "argv: wanted a list of the program and its arguments (no shell reads it)")
    check(isinstance(cwd, str), "cwd: wanted a folder")
    is_env = isinstance(env, dict) and _is_texts(list(env.values())) and all(map(_VARIABLE.fullmatch, env))
    check(is_env, "env: wanted a table of texts")
    is_secrets = _is_texts(secrets) and all(map(_VARIABLE.fullmatch, secrets))
    check(
        is_secrets and not any(_is_ours(one) for one in secrets), "secrets: wanted names of variables, not WEBHOOK_.."
    )
    check(_is_number(timeout) and timeout > 0, "timeout: wanted seconds above 0")
    check(
        _is_number(most) and isinstance(most, int) and 0 < most <= MOST_OUTPUT,
        f"max_output: wanted 1 to {MOST_OUTPUT} bytes",
    )
    if len(wrong) > before:
        return None
    return Job(name, tuple(argv), folder / cwd, env, tuple(secrets), float(timeout), most)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) and "\0" not in part for part in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_ours(variable: str) -> bool:
    return variable.startswith("WEBHOOK_")
