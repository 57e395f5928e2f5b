"""Stages of a test run: the order of all tests, for one or several processes.

Models are compiled first, then long tests run. Tests that keep real time (``timed``) begin when no process computes,
in two of the three processes of ``--dist loadfile``; tests that need the whole machine (``alone``) come last. The
processes wait for each other at both borders: each holds a lock for each border that it has not reached.
"""

import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from xdist.scheduler import LoadFileScheduling

STAGES = ("models", "long", "", "timed", "alone")  # By mark; tests without a mark run in the third stage.
BORDERS = ("timed", "alone")
TESTS = Path(__file__).parents[1]
# Marks of whole folders; other modules set `pytestmark`.
FOLDERS = {
    "unit/jaxmodels": "models",
    "parity": "models",
    "unit/robojax/sim": "long",
    "integration/distributed": "long",
    "integration/rollout": "timed",
    "integration/rooms": "timed",
    "hostile": "timed",
    "faults": "timed",
    "e2e": "timed",
}
# Thresholds of the garbage collector: Python's own, and larger ones for tests that trace models.
GARBAGE = gc.get_threshold(), (50_000, 20, 20)
KEEPING_TIME = 2  # Maximum number of processes that run ``timed`` tests.
HELD = "PYTEST_STAGES"  # Folder of the locks, shared by all processes of a run.
# File in it that lists the ``timed`` files for the controller, which collects no tests itself.
TIMED = "timed.json"
stages = pytest.StashKey[dict[Path, int]]()
reached = pytest.StashKey[str]()  # Stage of the last test.
locks = pytest.StashKey[dict[str, FileLock]]()


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*GARBAGE[1])
    worker, held = os.environ.get("PYTEST_XDIST_WORKER"), config.stash.setdefault(locks, {})
    if worker is None:
        os.environ[HELD] = tempfile.mkdtemp(prefix="robojax-stages-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(HELD), ignore_errors=True))
        return
    for border in BORDERS:
        held[border] = FileLock(Path(os.environ[HELD]) / f"{border}-{worker}")
        held[border].acquire()
        config.add_cleanup(held[border].release)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order by stage and keep each file whole: slow files first, then large ones, but models by name."""
    stage, slow, size = config.stash.setdefault(stages, {}), set[Path](), dict[Path, int]()
    for item in items:
        for folder, mark in FOLDERS.items():
            if item.path.is_relative_to(TESTS / folder):
                item.add_marker(mark)
        if item.get_closest_marker("models") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))  # A slow machine needs a minute to compile a model.
        marks = [number for number, mark in enumerate(STAGES) if mark and item.get_closest_marker(mark)]
        stage[item.path] = max(stage.get(item.path, 0), *marks, STAGES.index("") if not marks else 0)
        if item.get_closest_marker("slow"):
            slow.add(item.path)
        if item.path not in size:
            size[item.path] = item.path.stat().st_size
    models = STAGES.index("models")
    items.sort(
        key=lambda item: (
            stage[item.path],
            item.path not in slow,
            0 if stage[item.path] == models else -size[item.path],
        )
    )
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        timed = sorted({item.nodeid.split("::")[0] for item in items if STAGES[stage[item.path]] in BORDERS})
        written = Path(os.environ[HELD]) / f"{worker}.json"
        written.write_text(json.dumps(timed))
        written.replace(written.with_name(TIMED))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "Scheduler | None":
    return Scheduler(config, log) if config.getoption("dist") == "loadfile" else None


class Scheduler(LoadFileScheduling):
    """Schedule files in the order of the list, and ``timed`` files only on the first processes."""

    _timed: frozenset[str]

    def schedule(self) -> None:
        if self.collection is None:
            self._timed = frozenset(json.loads((Path(os.environ[HELD]) / TIMED).read_text()))
            self.config.option.loadscopereorder = False
        super().schedule()

    def _assign_work_unit(self, node: Any) -> None:
        if next(iter(self.workqueue)) in self._timed and self.nodes.index(node) >= KEEPING_TIME:
            node.shutdown()
        else:
            super()._assign_work_unit(node)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # Modules and the list of tests live until the end.


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    mark = STAGES[item.config.stash[stages][item.path]]
    if mark != item.config.stash.get(reached, None):
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()  # Drop models of earlier stages.
        gc.collect()
        if mark == "timed":
            gc.freeze()  # Later collections skip the objects of earlier tests.
            gc.set_threshold(*GARBAGE[0])
    item.config.stash[reached] = mark
    held = item.config.stash[locks]
    for border in BORDERS[: BORDERS.index(mark) + 1] if mark in BORDERS else ():
        if border in held:
            held.pop(border).release()
            for other in Path(os.environ[HELD]).glob(f"{border}-*"):
                with FileLock(other):  # Released at the border or at the end of its process.
                    pass
    return (yield)
