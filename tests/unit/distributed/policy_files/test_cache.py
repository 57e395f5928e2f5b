"""Policies' files on a machine that was sent them: whole or not at all, fetched once, and kept while in use."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.distributed import artifacts
from service.distributed.artifacts import Listing, fetch_to_cache, make_listing
from tests.unit.distributed.policy_files.files import FILES, read


def fetch(name: str) -> Iterator[bytes]:
    yield FILES[name][:5]
    yield FILES[name][5:]


def find(folder: Path, cache: Path) -> Path:
    """What a front's folder becomes."""
    return fetch_to_cache(cache, make_listing(folder), lambda name: iter([(folder / name).read_bytes()]))


def test_what_was_damaged_on_the_disk_is_fetched_again(folder: Path, tmp_path: Path) -> None:
    listing, cache = make_listing(folder), tmp_path / "cache"
    kept = fetch_to_cache(cache, listing, fetch)
    (kept / "config.json").write_bytes(b'{"type": "ACT"}')
    assert fetch_to_cache(cache, listing, fetch) == kept
    assert read(kept) == FILES


def test_it_is_for_this_user_alone(folder: Path, tmp_path: Path) -> None:
    kept = fetch_to_cache(tmp_path / "cache", make_listing(folder), fetch)
    assert kept.parent.stat().st_mode & 0o777 == kept.stat().st_mode & 0o777 == 0o700


def _find_in_process(listing: Listing, cache: Path, counts: "multiprocessing.SimpleQueue[int]") -> None:
    fetched = []

    def counted(name: str) -> Iterator[bytes]:
        fetched.append(name)
        return fetch(name)

    assert read(fetch_to_cache(cache, listing, counted)) == FILES
    counts.put(len(fetched))


def test_of_two_processes_at_once_one_fetches_it(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    counts = context.SimpleQueue()
    listing = make_listing(folder)
    both = [
        context.Process(target=_find_in_process, args=(listing, tmp_path / "cache", counts), daemon=True)
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    assert sorted(counts.get() for _ in both) == [0, len(FILES)]


def kept(cache: Path, name: str, size: int, age: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(size))
    used_at = (cache.stat().st_mtime) - age
    os.utime(folder, (used_at, used_at))
    return folder


def test_those_longest_unused_make_room(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "CACHE_BYTES", 1000)
    cache = tmp_path / "cache"
    oldest, older, old = (kept(cache, f"{age}" * 64, 450, age * 1000.0) for age in (3, 2, 1))
    find(folder, cache)
    assert [path.exists() for path in (oldest, older, old)] == [False, True, True]


def test_what_another_process_may_be_writing_or_reading_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "CACHE_BYTES", 0)
    cache = tmp_path / "cache"
    writing, reading = kept(cache, ".part-1", 10, 5.0), kept(cache, "1" * 64, 10, 300.0)
    died = kept(cache, ".part-2", 10, 86400.0)
    find(folder, cache)
    assert [path.exists() for path in (writing, reading, died)] == [True, True, False]


def test_one_that_vanishes_while_room_is_made_is_no_error(folder: Path, tmp_path: Path) -> None:
    cache, ended = tmp_path / "cache", threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            part = cache / ".part-x"
            part.mkdir(parents=True, exist_ok=True)
            part.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for number in range(50):
            (folder / "config.json").write_text(str(number))
            find(folder, cache)
    finally:
        ended.set()
        thread.join()
