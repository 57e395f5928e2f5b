"""Fixtures: a stub Hub with a policy, and a robot that follows the policy."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from service.rollout.sources import FolderSource, HubLimits, HubSource
from tests.testing.stub_hub import StubHub
from tests.unit.rollout.world import REPO, Robot, Robots, World, policy


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with StubHub() as hub:
        yield hub


@pytest.fixture
def hub_source(hub: StubHub, tmp_path: Path) -> HubSource:
    limits = HubLimits(answer_timeout=30.0, download_timeout=60.0, min_free_bytes=0)
    return HubSource(hub.url, token="hf_someone", cache=tmp_path / "cache", limits=limits)


@pytest.fixture
async def world(hub: StubHub, hub_source: HubSource, tmp_path: Path) -> AsyncIterator[World]:
    """Return a world with one robot that follows the default branch and runs its first commit."""
    folders = FolderSource(tmp_path / "copies")
    first = hub.push(REPO, policy(0), deliver=False)
    robots = Robots(Robot("a", sha=first))
    world = World(hub, robots, lambda repo: folders if repo.startswith("/") else hub_source, tmp_path)
    world.start()
    yield world
    await world.stop()
