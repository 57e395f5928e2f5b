"""A policy's files go to another machine as they are, and nothing but those."""

import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jaxmodels.errors import CheckpointError
from service.cluster import parcels
from service.cluster.parcels import Parcel, pack, unpack

FILES = {"config.json": b'{"type": "act"}', "model.safetensors": bytes(range(256)) * 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def same(piece: bytes) -> bytes:
    return piece


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_packed_is_unpacked(folder: Path, tmp_path: Path) -> None:
    parcel = pack(folder, same)
    assert read(unpack(parcel, tmp_path / "cache", same)) == FILES


def test_files_of_many_pieces_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(folder, same).sha
    monkeypatch.setattr(parcels, "PIECE", 100)
    parcel = pack(folder, same)
    assert max(len(pieces) for _, pieces in parcel.files) == 21
    assert parcel.sha == whole
    assert read(unpack(parcel, tmp_path / "cache", same)) == FILES


def test_its_name_is_of_what_is_in_it(folder: Path) -> None:
    before = pack(folder, same).sha
    assert pack(folder, same).sha == before
    (folder / "config.json").write_bytes(b"{}")
    other = pack(folder, same).sha
    (folder / "config.json").rename(folder / "train_config.json")
    assert len({before, other, pack(folder, same).sha}) == 3


def test_only_files_of_policies_are_packed(folder: Path) -> None:
    (folder / "keys.txt").write_text("secret")
    (folder / "run.py").write_text("print()")
    (folder / "nested.json").mkdir()
    assert {name for name, _ in pack(folder, same).files} == set(FILES)


def test_weights_that_do_not_travel_are_refused_before_anything_is_sent(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "orbax").mkdir()
    sent: list[bytes] = []
    with pytest.raises(CheckpointError, match=r"Orbax's, which are not sent to engines.*\.save\(path\)"):
        pack(folder, sent.append)
    assert not sent


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none of the files of a policy is in it"):
        pack(tmp_path, same)


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/tmp/config.json", "a/../../config.json", "..", "", "run.py", "a/model.safetensors", "\0.json"],
)
def test_no_file_is_written_that_is_none_of_a_policys(name: str, folder: Path, tmp_path: Path) -> None:
    parcel = pack(folder, same)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((CheckpointError, ValueError)):
        unpack(replace(parcel, files=((name, (b"x",)),)), tmp_path / "cache", same)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path not in before] in (
        [],
        [path for path in sorted((tmp_path / "cache").glob(".*.lock"))],
    )


@pytest.mark.parametrize("sha", ["..", "../policy", "", "0" * 63, "0" * 64 + "\n", "/tmp"])
def test_no_folder_is_made_but_one_of_its_name(sha: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        unpack(replace(pack(folder, same), sha=sha), tmp_path / "cache", same)
    assert not (tmp_path / "cache").exists()


def test_what_is_not_what_was_sent_is_not_kept(folder: Path, tmp_path: Path) -> None:
    parcel = pack(folder, same)
    with pytest.raises(CheckpointError, match="otherwise than they were sent"):
        unpack(parcel, tmp_path / "cache", lambda piece: piece[:-1])
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert read(unpack(parcel, tmp_path / "cache", same)) == FILES


def test_it_is_fetched_once_on_a_machine(folder: Path, tmp_path: Path) -> None:
    parcel, fetched = pack(folder, same), []

    def get(piece: bytes) -> bytes:
        fetched.append(piece)
        return piece

    for _ in range(3):
        unpack(parcel, tmp_path / "cache", get)
    assert len(fetched) == len(FILES)


def _unpack_in_process(parcel: Parcel, cache: Path, counts: "multiprocessing.SimpleQueue[int]") -> None:
    fetched = []

    def get(piece: bytes) -> bytes:
        fetched.append(piece)
        return piece

    assert read(unpack(parcel, cache, get)) == FILES
    counts.put(len(fetched))


def test_of_two_processes_at_once_one_fetches_it(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    counts = context.SimpleQueue()
    parcel = pack(folder, same)
    both = [
        context.Process(target=_unpack_in_process, args=(parcel, tmp_path / "cache", counts), daemon=True)
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    assert sorted(counts.get() for _ in both) == [0, len(FILES)]


def test_a_fetch_that_fails_leaves_nothing_and_is_tried_again(folder: Path, tmp_path: Path) -> None:
    parcel, cache = pack(folder, same), tmp_path / "cache"

    def fail(piece: bytes) -> bytes:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        unpack(parcel, cache, fail)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert read(unpack(parcel, cache, same)) == FILES


def test_a_cache_that_cannot_be_made_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        unpack(pack(folder, same), tmp_path / "cache", same)


def kept(cache: Path, name: str, size: int, age: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(size))
    used_at = (cache.stat().st_mtime) - age
    os.utime(folder, (used_at, used_at))
    return folder


def test_those_longest_unused_make_room(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "KEPT", 1000)
    cache = tmp_path / "cache"
    oldest, older, old = (kept(cache, f"{age}" * 64, 450, age * 1000.0) for age in (3, 2, 1))
    unpack(pack(folder, same), cache, same)
    assert [path.exists() for path in (oldest, older, old)] == [False, True, True]


def test_what_another_engine_may_be_writing_or_reading_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "KEPT", 0)
    cache = tmp_path / "cache"
    writing, reading = kept(cache, ".part-1", 10, 5.0), kept(cache, "1" * 64, 10, 300.0)
    died = kept(cache, ".part-2", 10, 86400.0)
    unpack(pack(folder, same), cache, same)
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
            unpack(pack(folder, same), cache, same)
    finally:
        ended.set()
        thread.join()
