"""What webhook commands are given besides their options: a token, and the secrets of a job."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from service.cli.failure import Code, fail
from service.cli.webhooks_shown import warn


def token_of(file: Path | None, token: str | None) -> str | None:
    """The token that was given, or None for the one of the login."""
    if token is not None:
        warn("--token stays in the shell's history and in process listings; log in once, or set HF_TOKEN")
    if file is None:
        return token
    try:
        found = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        _refuse(f"token file {str(file)!r} cannot be read: {why}", "write the token alone into it")
    if not found:
        _refuse(f"token file {str(file)!r} is empty", "write the token alone into it")
    return found


def job_secrets(named: list[str] | None, file: str | None) -> dict[str, str] | None:
    """Of the job: the lines of a file, then what was named; None when nothing was."""
    found: dict[str, str] = {}
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text()
        except (OSError, UnicodeDecodeError):
            _refuse(f"secrets file {file!r} cannot be read", "give a file of lines NAME=value")
        for line in map(str.strip, text.splitlines()):
            if line and not line.startswith("#"):
                found |= _job_secret(line.removeprefix("export ").strip())
    for one in named or []:
        if "=" in one:
            warn("--secrets NAME=value stays in the shell's history; --secrets NAME reads it from the environment")
        found |= _job_secret(one)
    return found or None


def _job_secret(line: str) -> dict[str, str]:
    name, equals, value = line.partition("=")
    name = name.strip()
    if not name.isidentifier():
        # Not quoted: without its name it may be nothing but a secret.
        _refuse("a secret of the job has no name", "give NAME, or NAME=value")
    if equals:
        value = value.strip()
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        return {name: value[1:-1] if is_quoted else value}
    found = os.environ.get(name)
    if found is None and name == "HF_TOKEN":
        from huggingface_hub import get_token

        found = get_token()
    if found is None:
        _refuse(f"secret {name} of the job is not in the environment", f"set it, or give {name}=value")
    return {name: found}


def _refuse(why: str, then: str) -> NoReturn:
    fail(Code.USAGE, "nothing was sent", why, then)
