"""The folder of a training: whose it is, and the lines of its metrics."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmodels.errors import TrainingError

SETUP, METRICS, POLICY = "training.json", "metrics.jsonl", "policy"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def claim(output: Path, setup: dict[str, Any], *, resume: bool) -> None:
    """Writes the set-up of a new run, or checks that the one that is there was the same.

    Raises:
        TrainingError: the folder holds a run that nobody asked to go on with, or one of another set-up (every
            difference named).
    """
    path = output / SETUP
    text = json.dumps(setup, indent=2) + "\n"
    if not path.exists():
        if output.is_dir() and any(entry != _draft(path) for entry in output.iterdir()):
            raise TrainingError(f"{output}: is there and holds no training; choose another --output_dir")
        output.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
        return
    if not resume:
        raise TrainingError(f"{output}: holds a training; add --resume=true to go on with it, or choose another folder")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise TrainingError(f"{path}: unreadable ({error}); choose another --output_dir") from error
    if differing := _differences("", found, json.loads(text)):
        raise TrainingError(
            f"{output}: holds a run with another set-up ({'; '.join(differing)}); choose another folder"
        )
    for draft in output.glob(f".{POLICY}-*"):  # of a run that was killed while it wrote it
        shutil.rmtree(draft, ignore_errors=True)


def _differences(where: str, found: Any, wanted: Any) -> list[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = sorted({*found, *wanted})
        return [line for name in names for line in _differences(f"{where}.{name}", found.get(name), wanted.get(name))]
    return [] if found == wanted else [f"{where.removeprefix('.')}: was {found!r}, now {wanted!r}"]


def cut_metrics(output: Path, step: int) -> float:
    """Drops lines that a killed run wrote after its last checkpoint; gives the seconds that the kept ones took."""
    path = output / METRICS
    if not path.exists():
        return 0.0
    # The last line may have been cut by the kill.
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    kept = [line for line in lines if line["step"] <= step]
    _replace(path, "".join(json.dumps(line) + "\n" for line in kept))
    return float(kept[-1]["seconds"]) if kept else 0.0


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Says of which run a full disk is, and what to do: neither the system nor Orbax does.

    Raises:
        OSError: something could not be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.errno not in FULL:
            raise
        raise OSError(
            f"{output}: cannot be written ({error.strerror or error}); make room there, or give rights, and go on with "
            "the run (--resume=true): the checkpoints in it are whole"
        ) from error


def _replace(path: Path, text: str) -> None:
    """Writes a file that appears whole, or stays as it was when the disk is full or the process killed."""
    draft = _draft(path)
    draft.write_text(text)
    os.replace(draft, path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}")
