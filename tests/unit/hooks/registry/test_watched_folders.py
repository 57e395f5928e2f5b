"""A policy folder that changes on disk, in all the ways that folders are written, is one event when it is whole."""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from watchfiles import awatch

from hooks.registry.folder_watcher import FolderWatcher, SettleTimer, WatchStopped, hash_folder, scan_folder
from hooks.registry.registry import Registry
from service.rollout.sources import FolderSource
from tests.testing.pauses import Pauses
from tests.testing.target import TargetServer, target_server
from tests.testing.waiting import until
from tests.unit.hooks.registry.serving import settings, until_delivered, until_known

GO_ON = threading.Event()


def write_policy(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


class Heard(list):
    """The shas that a watcher told, and a watcher that runs."""

    async def settled(self, name: str, sha: str) -> None:
        self.append((name, sha))


@pytest.fixture
async def heard(tmp_path: Path, pauses: Pauses) -> AsyncIterator[Heard]:
    heard = Heard()
    watcher = FolderWatcher({"act": tmp_path / "act"}, heard.settled, quiet=0.15, poll=30.0)
    running = asyncio.create_task(watcher.run())
    await asyncio.sleep(0.1)
    yield heard
    began = time.monotonic()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert pauses.running(began) < 1.0


def test_quiet_is_counted_from_the_last_move() -> None:
    quiet = SettleTimer(2.0)
    first, second = frozenset({("a", 1, 1, 1)}), frozenset({("a", 2, 2, 1)})
    assert quiet.get_remaining(first, 10.0) == 2.0
    assert quiet.get_remaining(first, 11.5) == 0.5
    assert quiet.get_remaining(second, 11.9) == 2.0
    assert quiet.get_remaining(second, 13.9) == 0.0
    assert quiet.get_remaining(None, 14.0) == 2.0


async def test_the_sha_is_the_one_of_the_deployments_and_of_content_only(tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "act")
    sha = hash_folder(folder, GO_ON)
    assert sha == await FolderSource(tmp_path / "cache").head(str(folder), None)
    assert len(sha) == 40
    os.utime(folder / "config.json", (1, 1))
    (folder / ".hidden").write_text("x")
    (folder / "model.safetensors.tmp").write_text("x")
    (folder / "training.log").write_text("x")
    assert hash_folder(shutil.copytree(folder, tmp_path / "copy"), GO_ON) == sha
    write_policy(folder, b"weightz")
    assert hash_folder(folder, GO_ON) != sha


def test_a_folder_that_is_no_policy_is_taken_whole(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("a")
    before = hash_folder(tmp_path, GO_ON)
    (tmp_path / "deep" / "a.txt").rename(tmp_path / "deep" / "b.txt")
    assert hash_folder(tmp_path, GO_ON) != before
    assert scan_folder(tmp_path / "nowhere") is None


def test_reading_ends_when_asked_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WatchStopped):
        hash_folder(write_policy(tmp_path / "act"), stop)


async def test_a_file_exchanged_by_a_rename_is_one_change(heard: Heard, tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "act")
    await until(lambda: len(heard) == 1)
    (folder / "tmp8f3a").write_bytes(b"other weights")
    os.replace(folder / "tmp8f3a", folder / "model.safetensors")
    await until(lambda: len(heard) == 2)
    assert heard[1] == ("act", hash_folder(folder, GO_ON))
    assert heard[0] != heard[1]


async def test_a_folder_renamed_into_place_is_one_change_and_is_followed_on(heard: Heard, tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "act")
    await until(lambda: len(heard) == 1)
    write_policy(tmp_path / "new", b"second")
    folder.rename(tmp_path / "old")
    (tmp_path / "new").rename(folder)
    await until(lambda: len(heard) == 2)
    assert heard[1] == ("act", hash_folder(folder, GO_ON))
    await asyncio.sleep(0.1)
    write_policy(folder, b"third")
    await until(lambda: len(heard) == 3)
    assert heard[2] == ("act", hash_folder(folder, GO_ON))


async def test_a_link_that_is_turned_to_another_folder_is_a_change(heard: Heard, tmp_path: Path) -> None:
    write_policy(tmp_path / "v1", b"one")
    write_policy(tmp_path / "v2", b"two")
    (tmp_path / "act").symlink_to("v1")
    await until(lambda: len(heard) == 1)
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", tmp_path / "act")
    await until(lambda: len(heard) == 2)
    assert heard[1] == ("act", hash_folder(tmp_path / "v2", GO_ON))


async def test_a_file_that_grows_is_not_read_before_it_rests(tmp_path: Path) -> None:
    heard, now = Heard(), [0.0]
    folder = write_policy(tmp_path / "act", b"")
    watcher = FolderWatcher({"act": folder}, heard.settled, quiet=0.05, poll=30.0, clock=lambda: now[0])
    running = asyncio.create_task(watcher.run())
    with (folder / "model.safetensors").open("wb") as file:
        for _ in range(5):
            file.write(b"x" * 1000)
            file.flush()
            await asyncio.sleep(0.06)
            assert heard == []
    # No time has passed for the watcher so far. Now it does.
    for _ in range(500):
        now[0] += 0.01
        await asyncio.sleep(0.01)
        if heard:
            break
    assert heard == [("act", hash_folder(folder, GO_ON))]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_folder_that_moves_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, read = Heard(), []
    folder = write_policy(tmp_path / "act", b"first")

    def read_and_move(folder: Path, stop: threading.Event) -> str:
        read.append(hash_folder(folder, stop))
        if len(read) == 1:
            write_policy(folder, b"second")
        return read[-1]

    monkeypatch.setattr("hooks.registry.folder_watcher.hash_folder", read_and_move)
    running = asyncio.create_task(FolderWatcher({"act": folder}, heard.settled, quiet=0.05, poll=30.0).run())
    await until(lambda: heard)
    assert heard == [("act", hash_folder(folder, GO_ON))]
    assert len(read) == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_folder_that_is_not_there_is_said_once_and_looked_at_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    heard, watched = Heard(), []
    folder = tmp_path / "not" / "there" / "act"

    def watch(path: Path, **options):
        watched.append(path)
        return awatch(path, **options)

    monkeypatch.setattr("hooks.registry.folder_watcher.awatch", watch)
    running = asyncio.create_task(FolderWatcher({"act": folder}, heard.settled, quiet=0.05, poll=0.02).run())
    await until(lambda: watched.count(folder) > 3)
    assert [line.count(f"{folder} is not there") for line in caplog.messages] == [1]
    write_policy(folder)
    await until(lambda: len(heard) == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_change_reaches_the_webhooks_once_and_the_same_content_never(tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "act")
    first = hash_folder(folder, GO_ON)
    made = settings(folders={"lab/act": folder}, database=tmp_path / "db" / "registry.sqlite3")
    async with target_server() as target:
        async with Registry(made).running() as registry:
            await registry.management.create({"url": target.url, "watched": [{"type": "model", "name": "lab/act"}]})
            await until_known(registry)
            write_policy(folder)  # other times, the same content
            await asyncio.sleep(0.4)
            assert target.got == []
            write_policy(folder, b"second")
            await target.wait_for(1)
            await until_delivered(registry, 1)  # what is under way at the end is sent again
        second = hash_folder(folder, GO_ON)
        body = target.got[0].json
        assert body["repo"]["headSha"] == second
        assert body["repo"]["name"] == "lab/act"
        assert body["updatedRefs"] == [{"ref": "refs/heads/main", "oldSha": first, "newSha": second}]
        assert str(tmp_path) not in target.got[0].body.decode()
        await _changed_while_off(made, target, folder, second)


async def _changed_while_off(made, target: TargetServer, folder: Path, second: str) -> None:
    async with Registry(made).running():
        await asyncio.sleep(0.4)
    assert len(target.got) == 1
    write_policy(folder, b"third")
    async with Registry(made).running():
        await target.wait_for(2)
    assert target.got[1].json["updatedRefs"][0]["oldSha"] == second
