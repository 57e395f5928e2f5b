import threading
from dataclasses import replace
from pathlib import Path

import pytest

from service.rollout.sources import HubLimits, HubSource, SourceError
from tests.testing.stub_hub import StubHub
from tests.unit.rollout.world import REPO, policy, until


def ignore(stage: str) -> None:
    pass


def limited(hub: StubHub, cache: Path, **limits) -> HubSource:
    return HubSource(hub.url, cache=cache, limits=replace(HubLimits(min_free_bytes=0), **limits))


async def test_heads_and_history_are_read_from_the_hub(hub: StubHub, hub_source: HubSource) -> None:
    made = [hub.push(REPO, policy(step), tag=f"deploy-{step}") for step in (9, 10, 2)]
    assert await hub_source.head(REPO, None) == made[2]
    assert await hub_source.head(REPO, "refs/heads/main") == made[2]
    assert await hub_source.head(REPO, "deploy-9") == made[0]
    assert await hub_source.head(REPO, made[1]) == made[1]
    assert await hub_source.head(REPO, "deploy-*") == made[1]
    first, second = hub.push(REPO, policy(1)), hub.push(REPO, policy(2))
    assert await hub_source.is_older(REPO, first, second) is True
    assert await hub_source.is_older(REPO, second, first) is False
    assert await hub_source.is_older(REPO, second, second) is False
    assert await hub_source.is_older(REPO, second, "9" * 40) is None


@pytest.mark.parametrize(
    ("how", "details", "code"),
    [
        (404, {"code": "RepoNotFound"}, "unknown_repo"),
        (404, {"code": "RevisionNotFound"}, "unknown_revision"),
        (403, {"code": "GatedRepo"}, "denied"),
        (401, {}, "denied"),
        (403, {}, "denied"),
        (429, {}, "limited"),
        (500, {}, "bad_answer"),
        ("drop", {}, "unreachable"),
        ("hang", {}, "timeout"),
        ("corrupt", {}, "bad_answer"),
    ],
)
async def test_each_hub_error_has_a_code(hub, tmp_path, how, details, code) -> None:
    hub.push(REPO, policy(1))
    hub.script("GET /api/models/", how, times=None, **details)
    with pytest.raises(SourceError, match=REPO) as raised:
        await limited(hub, tmp_path, answer_timeout=0.3 if how == "hang" else 30.0).head(REPO, "main")
    assert raised.value.code == code


async def test_only_policy_files_are_fetched_and_never_a_pickle(hub: StubHub, hub_source: HubSource) -> None:
    others = {"pytorch_model.bin": b"cos\nsystem\n", "vlm/notes.json": "{}", "a/b/c/d/config.json": "{}"}
    sha = hub.push(REPO, {**policy(1), **others, "vlm/config.json": "{}"})
    stages: list[str] = []
    folder = await hub_source.fetch(REPO, sha, stages.append)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "model.safetensors", "policy_preprocessor.json", "vlm/config.json"}
    assert stages == ["listing", "downloading", "verifying"]


async def test_damaged_bytes_in_the_cache_are_detected(hub: StubHub, hub_source: HubSource) -> None:
    sha = hub.push(REPO, policy(1))
    folder = await hub_source.fetch(REPO, sha, ignore)
    (folder / "model.safetensors").resolve().write_bytes(b"\0" * 4000)
    with pytest.raises(SourceError, match="other bytes"):
        await hub_source.fetch(REPO, sha, ignore)
    again = await hub_source.fetch(REPO, sha, ignore)
    assert (again / "model.safetensors").read_bytes() == policy(1)["model.safetensors"]


@pytest.mark.parametrize(("limits", "code"), [({"max_bytes": 100}, "too_large"), ({"min_free_bytes": 1 << 60}, "disk")])
async def test_a_fetch_has_limits(hub: StubHub, tmp_path: Path, limits: dict, code: str) -> None:
    sha = hub.push(REPO, policy(1))
    with pytest.raises(SourceError) as raised:
        await limited(hub, tmp_path, **limits).fetch(REPO, sha, ignore)
    assert raised.value.code == code


async def test_an_abandoned_download_ends(hub: StubHub, tmp_path: Path) -> None:
    sha = hub.push(REPO, policy(1))
    stalled = hub.script("GET .*/resolve/.*safetensors", "stall")
    with pytest.raises(SourceError) as raised:
        await limited(hub, tmp_path, download_timeout=0.3).fetch(REPO, sha, ignore)
    assert raised.value.code == "timeout"
    left_behind = [thread for thread in threading.enumerate() if thread.name == "hub-call"]
    assert left_behind
    stalled.released.set()
    await until(lambda: not any(thread.is_alive() for thread in left_behind))
    weights = tmp_path.rglob("*.safetensors")
    assert list(weights) == []


async def test_a_cached_commit_needs_no_free_space(hub: StubHub, hub_source: HubSource, tmp_path: Path) -> None:
    sha = hub.push(REPO, policy(1))
    folder = await hub_source.fetch(REPO, sha, ignore)
    assert await limited(hub, tmp_path / "cache", min_free_bytes=1 << 60).fetch(REPO, sha, ignore) == folder


async def test_a_separate_cache_keeps_the_newest_commits(hub: StubHub, tmp_path: Path) -> None:
    source = limited(hub, tmp_path, max_commits=2)
    made = [hub.push(REPO, policy(step)) for step in range(4)]
    folders = [await source.fetch(REPO, sha, ignore) for sha in made]
    assert [folder.is_dir() for folder in folders] == [False, False, True, True]
    assert (folders[2] / "policy_preprocessor.json").read_text() == "{}"  # All commits share this blob.
    assert len(list(tmp_path.rglob("blobs/*"))) == 5
