"""Optional peers of tests: packages and programs that `make test` does not need.

A test that needs a peer has the mark ``needs_peers`` and is skipped with a reason where the peer is missing. CI
installs the peers after `make test` and then runs the marked tests alone: ``pytest -m needs_peers``.
"""

import os
import shutil
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# openpi-client needs an older NumPy than robojax, so `make peers` creates a separate environment for it.
OPENPI_PYTHON = Path(
    os.environ.get("ROBOJAX_OPENPI_PYTHON", Path(__file__).parents[2] / ".venv" / "openpi" / "bin" / "python")
)
# The plugin that compiles for GPUs has one, too, because JAX looks for a GPU wherever the plugin is installed.
GPU_PYTHON = Path(os.environ.get("ROBOJAX_GPU_PYTHON", Path(__file__).parents[2] / ".venv" / "gpu" / "bin" / "python"))
# LeRobot needs Python 3.12, and PyTorch of another version.
LEROBOT_PYTHON = Path(
    os.environ.get("ROBOJAX_LEROBOT_PYTHON", Path(__file__).parents[2] / ".venv" / "lerobot" / "bin" / "python")
)
INSTALL = {
    "torch": "make peers",
    "diffusers": "make peers",
    "ray": "make peers",
    "openpi-client": "make peers",
    "jax-cuda13-plugin": "make peers",
    "lerobot": "make lerobot",
    "peft": "pip install peft",
    "flatbuffers": "pip install flatbuffers",
    "libtpu": "pip install 'jax[tpu]'",
    "postgresql": "make servers",
    "nginx": "make servers",
    "caddy": "make servers",
    "chromium": "make servers",
}
# Tests with any of these fixtures get the mark automatically.
FIXTURES = {"postgres_server", "lerobots_own", "peer", "theirs_of", "pair_of"}
PREFIX = "needs a peer: "


def has_peer(name: str) -> bool:
    """Return whether a package can be imported or a program is installed."""
    if name == "postgresql":
        return any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if name == "openpi-client":
        return OPENPI_PYTHON.exists()
    if name == "jax-cuda13-plugin":
        return GPU_PYTHON.exists()
    if name == "lerobot":
        return LEROBOT_PYTHON.exists()
    if name in ("nginx", "caddy", "chromium"):
        return shutil.which(name) is not None
    return find_spec(name) is not None


def skip_reason(*names: str) -> str:
    """Return why a test is skipped without these peers; ``names`` are keys of ``INSTALL``."""
    how = " and ".join(dict.fromkeys(INSTALL[name] for name in names))
    return f"{PREFIX}{', '.join(names)} not installed; run {how}"


def require_peers(*names: str) -> None:
    """Skip the running test, or the module at its import, when any of these peers is missing."""
    missing = [name for name in names if not has_peer(name)]
    if missing:
        pytest.skip(skip_reason(*missing), allow_module_level=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("needs_peers")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Fail a module that was skipped for a peer without the mark."""
    report = yield
    if report.skipped and PREFIX in str(report.longrepr) and "needs_peers" not in collector.path.read_text():
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} needs a peer; add pytestmark = pytest.mark.needs_peers"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Fail a test that was skipped for a peer without the mark, because CI would never run it."""
    report = yield
    if report.skipped and PREFIX in str(report.longrepr) and item.get_closest_marker("needs_peers") is None:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needs a peer; mark it with pytest.mark.needs_peers"
    return report
