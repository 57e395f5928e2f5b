"""Policy artifacts: packing, transfer, verification and cache."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxmodels import is_policy_file
from jaxmodels.errors import CheckpointError
from service.distributed import artifacts
from service.distributed.artifacts import PolicyArtifact, pack, unpack

FILES = {
    "config.json": b'{"type": "act"}',
    "model.safetensors": bytes(range(256)) * 8,
    "owner/vlm/tokenizer.json": b"{}",
}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(piece: bytes) -> bytes:
    return piece


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "policy", FILES)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_large_files_are_sent_in_pieces(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(folder, same).sha
    monkeypatch.setattr(artifacts, "PIECE_BYTES", 100)
    artifact = pack(folder, same)
    assert [len(artifact.pieces[name]) for name in FILES] == [1, 21, 1]
    assert artifact.sha == whole
    assert read(unpack(artifact, cache, same)) == FILES


def test_the_hash_covers_names_contents_and_boundaries_of_files(tmp_path: Path) -> None:
    contents = [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b"")]
    folders = [{"config.json": first, "model.safetensors": second} for first, second in contents]
    folders.append({"train_config.json": b"ab", "model.safetensors": b"c"})
    shas = [pack(write(tmp_path / str(number), files), same).sha for number, files in enumerate(folders)]
    assert len(set(shas)) == 4


def test_only_policy_files_are_packed(folder: Path) -> None:
    write(folder, {"keys.txt": b"secret", "run.py": b"print()"})
    (folder / "nested.json").mkdir()
    assert set(pack(folder, same).pieces) == set(FILES)
    with pytest.raises(CheckpointError, match="none of the files of a policy is in it"):
        pack(folder / "nested.json", same)


def test_orbax_weights_are_refused_before_anything_is_sent(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "orbax").mkdir()
    sent: list[bytes] = []
    with pytest.raises(CheckpointError, match=r"Orbax's, which are not sent to other machines.*\.save\(path\)"):
        pack(folder, sent.append)
    assert not sent


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "run.py", "train_config.json", "\0.json", "policy_preprocessor_step_/../x.safetensors"),
        *("../config.json", "/tmp/config.json", "a//config.json", "a/../../config.json", ".a/config.json"),
        *("a/b/c/d/config.json", "a/model.safetensors", "a/robojax.json", "model-1-of-2.safetensors"),
        "model-0/../-of-00001.safetensors",
    ],
)
def test_files_with_other_names_are_refused(name: str, folder: Path, cache: Path) -> None:
    assert not is_policy_file(name)
    artifact = PolicyArtifact(pack(folder, same).sha, (("config.json", 2), (name, 1)), {name: (b"x",)})
    with pytest.raises(CheckpointError, match="no file of a policy"):
        unpack(artifact, cache, same)
    assert not cache.exists()


@pytest.mark.parametrize("sha", ["..", "../policy", "", "0" * 63, "0" * 64 + "\n", "/tmp"])
def test_a_name_that_is_not_a_hash_is_refused(sha: str, folder: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="is no hash of a policy's files"):
        unpack(replace(pack(folder, same), sha=sha), cache, same)
    assert not cache.exists()


def fail(piece: bytes) -> bytes:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("get", "error", "text"),
    [(lambda piece: piece[:-1], CheckpointError, "changed while they were sent"), (fail, OSError, "No space left")],
)
def test_a_failed_fetch_leaves_no_folder(
    folder: Path, cache: Path, get: Any, error: type[Exception], text: str
) -> None:
    artifact = pack(folder, same)
    with pytest.raises(error, match=text):
        unpack(artifact, cache, get)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert read(unpack(artifact, cache, same)) == FILES


def test_a_folder_with_exactly_these_files_matches(folder: Path) -> None:
    artifact = pack(folder, same)
    write(folder, {"notes.txt": b"unrelated"})
    assert artifact.matches(folder)
    assert not artifact.matches(folder / "nowhere")
    write(folder, {"tokenizer.json": b"{}"})
    assert not artifact.matches(folder)
    (folder / "tokenizer.json").unlink()
    write(folder, {"config.json": b'{"type": "ACT"}'})
    assert not artifact.matches(folder)
    (folder / "config.json").unlink()
    assert not artifact.matches(folder)


def test_a_policy_is_fetched_once_and_again_if_it_is_damaged(folder: Path, cache: Path) -> None:
    artifact, fetched = pack(folder, same), list[bytes]()

    def get(piece: bytes) -> bytes:
        fetched.append(piece)
        return piece

    cached, *others = [unpack(artifact, cache, get) for _ in range(3)]
    assert others == [cached, cached]
    assert len(fetched) == len(FILES)
    assert cache.stat().st_mode & 0o777 == cached.stat().st_mode & 0o777 == 0o700
    write(cached, {"config.json": b'{"type": "ACT"}'})
    assert unpack(artifact, cache, get) == cached
    assert read(cached) == FILES


def test_a_cache_that_cannot_be_created_is_an_error(folder: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(OSError, match="exists"):
        unpack(pack(folder, same), cache, same)


def test_two_concurrent_requests_fetch_once(folder: Path, cache: Path) -> None:
    artifact, counts = pack(folder, same), list[int]()

    def fetch() -> None:
        fetched = list[bytes]()
        unpack(artifact, cache, lambda piece: fetched.append(piece) or piece)
        counts.append(len(fetched))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(counts) == [0, len(FILES)]
    assert read(cache / artifact.sha) == FILES


def cached_folder(cache: Path, name: str, size: int, age: float) -> Path:
    folder = write(cache / name, {"model.safetensors": bytes(size)})
    used_at = cache.stat().st_mtime - age
    os.utime(folder, (used_at, used_at))
    return folder


def test_least_recently_used_policies_are_deleted(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "CACHE_BYTES", 1000)
    oldest, older, old = (cached_folder(cache, f"{age}" * 64, 450, age * 1000.0) for age in (3, 2, 1))
    unpack(pack(folder, same), cache, same)
    assert [path.exists() for path in (oldest, older, old)] == [False, True, True]


def test_folders_in_use_are_not_deleted(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "CACHE_BYTES", 0)
    writing, reading = cached_folder(cache, ".part-1", 10, 5.0), cached_folder(cache, "1" * 64, 10, 300.0)
    died = cached_folder(cache, ".part-2", 10, 86400.0)
    unpack(pack(folder, same), cache, same)
    assert [path.exists() for path in (writing, reading, died)] == [True, True, False]


def test_a_folder_that_vanishes_during_the_deletion_is_not_an_error(folder: Path, cache: Path) -> None:
    ended = threading.Event()

    def create_and_delete() -> None:
        while not ended.is_set():
            (cache / ".part-x").mkdir(parents=True, exist_ok=True)
            (cache / ".part-x").rmdir()

    thread = threading.Thread(target=create_and_delete)
    thread.start()
    try:
        for number in range(50):
            write(folder, {"config.json": str(number).encode()})
            unpack(pack(folder, same), cache, same)
    finally:
        ended.set()
        thread.join()
