"""A policy that reads its behaviour from a file at each inference; the test writes the file."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import CheckpointError
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy

FILE = "script.json"
RATE = 50.0
CHUNK = 20
STEP = 0.01  # Change of each joint per action, which identifies the action of a command.
REQUIREMENTS = replace(SO100_REQUIREMENTS, chunk=CHUNK, action_steps=CHUNK // 2, rate=RATE)


class Script:
    """Folder of a policy. ``set_mode("nan", times=1)`` puts a NaN into the next chunk; `FollowedPolicy` lists modes."""

    def __init__(self, folder: Path, **settings: Any):
        self.folder = folder
        self._serial = 0
        self._settings = settings
        folder.mkdir(parents=True)
        self.set_mode("good")

    def set_mode(self, mode: str, times: int | None = None) -> None:
        self._serial += 1
        order = {"serial": self._serial, "mode": mode, "times": times, **self._settings}
        fresh = self.folder / f".{FILE}"
        fresh.write_text(json.dumps(order))
        fresh.replace(self.folder / FILE)


class FollowedPolicy(ScriptedPolicy):
    def __init__(self, folder: Path):
        super().__init__(requirements=REQUIREMENTS, step=STEP)
        self._file = folder / FILE
        self._read_at = -1
        self._order: dict[str, Any] = {}
        self._done = 0
        self._look()
        time.sleep(self._order.get("loading", 0.0))
        self.compile_latency = self._order.get("compiling", 0.0)

    def _look(self) -> dict[str, Any]:
        changed = os.stat(self._file).st_mtime_ns
        if changed != self._read_at:
            order = json.loads(self._file.read_text())
            if order["serial"] != self._order.get("serial"):
                self._done = 0
            self._order, self._read_at = order, changed
        return self._order

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        order = self._look()
        self.latency = order.get("latency", 0.0)
        chunk = super().act(observation)
        if order["times"] is not None and self._done >= order["times"]:
            return chunk
        if order.get("when") and not Path(order["when"]).exists():
            return chunk
        self._done += 1
        match order["mode"]:
            case "nan":
                chunk[0, CHUNK // 2, 2] = np.nan
            case "inf":
                chunk[0, CHUNK - 1, 0] = -np.inf
            case "shape":
                return chunk[:, :, :5]
            case "wild":
                chunk[0, -1, 3] = 1000.0
            case "outside":
                # Stay below the distance that counts as broken instead of outside.
                chunk[:] += np.where(np.arange(6) % 2, 95.0, -95.0)
            case "jump":
                chunk[0, CHUNK // 2 :] += 80.0
            case "raise":
                raise RuntimeError("the policy's own text, which no client may read: /secret/place")
            case "memory":
                raise MemoryError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8796093022208 bytes.")
            case "late":
                time.sleep(1.0)
            case "hang":
                begins = order.get("when")
                while self._look()["serial"] == order["serial"] and (not begins or Path(begins).exists()):
                    time.sleep(0.02)
        return chunk


def load(
    path: str, revision: str | None = None, /, *, like: object = None, on_progress: Callable[[str], None] | None = None
) -> FollowedPolicy:
    if on_progress is not None:
        on_progress("reading")
    if not (Path(path) / FILE).is_file():
        raise CheckpointError(f"no {FILE} in {Path(path).name!r}")
    return FollowedPolicy(Path(path))


def read(path: str, revision: str | None) -> Requirements:
    return REQUIREMENTS
