import os
import time
from pathlib import Path

import pytest

from service.rollout import sources
from service.rollout.sources import FolderSource, SourceError


def ignore(stage: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("# hello")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> FolderSource:
    return FolderSource(tmp_path / "copies", max_copies=2)


async def test_the_commit_of_a_folder_is_a_hash_of_the_policy_files(folder: Path, source: FolderSource) -> None:
    first = await source.head(str(folder), None)
    assert len(first) == 40
    (folder / "README.md").write_text("# other")
    os.utime(folder / "config.json", (1, 1))
    assert await source.head(str(folder), "main") == first
    (folder / "model.safetensors").write_bytes(b"Weights")
    second = await source.head(str(folder), None)
    assert second != first
    (folder / "model.safetensors").rename(folder / "policy_preprocessor_step_0.safetensors")
    assert await source.head(str(folder), None) not in (first, second)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of files that are hashed."""
    names: list[str] = []
    content_hash = FolderSource._content_hash
    monkeypatch.setattr(
        FolderSource, "_content_hash", lambda self, path: names.append(path.name) or content_hash(self, path)
    )
    return names


@pytest.mark.parametrize("jump", [-3600, 3600])
async def test_files_are_hashed_once_after_a_clock_jump(folder, source, hashed, monkeypatch, jump) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    for _ in range(3):
        await source.head(str(folder), None)
    assert len(hashed) == len(set(hashed))


async def test_a_fetched_copy_does_not_change_with_the_folder(folder: Path, source: FolderSource) -> None:
    sha = await source.head(str(folder), None)
    copy = await source.fetch(str(folder), sha, ignore)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert {path.name for path in copy.iterdir()} == {"config.json", "model.safetensors"}
    assert await source.head(str(folder), sha) == sha  # A rollback to this commit stays possible.
    assert await source.fetch(str(folder), sha, ignore) == copy


async def test_shards_and_nested_files_are_copied(folder: Path, source: FolderSource, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"second")
    (folder / "owner" / "vlm").mkdir(parents=True)
    (folder / "owner" / "vlm" / "tokenizer.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"model-00001-of-00002\.safetensors missing"):
        await source.fetch(str(folder), await source.head(str(folder), None), ignore)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"first")
    sha = await source.head(str(folder), None)
    copy = await source.fetch(str(folder), sha, ignore)
    assert {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()} == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "owner/vlm/tokenizer.json",
    }
    (folder / "owner" / "vlm" / "tokenizer.json").write_text("{ }")
    assert await source.head(str(folder), None) != sha


async def test_a_copy_of_a_changed_folder_is_refused_and_removed(
    folder: Path, source: FolderSource, tmp_path: Path
) -> None:
    sha = await source.head(str(folder), None)
    (folder / "model.safetensors").write_bytes(b"weig")
    with pytest.raises(SourceError, match="written to") as raised:
        await source.fetch(str(folder), sha, ignore)
    assert raised.value.code == "changed_meanwhile"
    assert [path for path in (tmp_path / "copies").rglob("*") if path.is_file()] == []


async def test_a_damaged_copy_is_replaced(folder: Path, source: FolderSource) -> None:
    sha = await source.head(str(folder), None)
    copy = await source.fetch(str(folder), sha, ignore)
    (copy / "model.safetensors").write_bytes(b"w3ights")
    again = await source.fetch(str(folder), sha, ignore)
    assert (again / "model.safetensors").read_bytes() == b"weights"


async def test_only_the_newest_copies_are_kept(folder: Path, source: FolderSource) -> None:
    copies = []
    for step in range(4):
        (folder / "model.safetensors").write_bytes(bytes([step]) * 8)
        copies.append(await source.fetch(str(folder), await source.head(str(folder), None), ignore))
        os.utime(copies[-1], (step, step))
    assert [copy.is_dir() for copy in copies] == [False, False, True, True]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
async def test_a_folder_without_a_policy_is_refused(folder: Path, source: FolderSource, missing: str) -> None:
    (folder / missing).unlink()
    sha = await source.head(str(folder), None)
    with pytest.raises(SourceError, match=missing) as raised:
        await source.fetch(str(folder), sha, ignore)
    assert raised.value.code == "incomplete"


@pytest.mark.parametrize(
    ("name", "ref", "code"), [("policy", "v1", "unknown_revision"), ("nothing", None, "unknown_repo")]
)
async def test_an_unknown_folder_or_revision_has_an_error_code(
    folder: Path, source: FolderSource, name: str, ref: str | None, code: str
) -> None:
    with pytest.raises(SourceError) as raised:
        await source.head(str(folder.parent / name), ref)
    assert raised.value.code == code


async def test_unchanged_files_are_hashed_once(folder, source, hashed, monkeypatch) -> None:
    monkeypatch.setattr(sources, "SETTLE_SECONDS", -1.0)
    os.utime(folder / "config.json", (1, 1))  # The clock of the file system may not advance during this test.
    for _ in range(3):
        await source.head(str(folder), None)
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    (folder / "config.json").write_text("[]")
    await source.head(str(folder), None)
    assert sorted(hashed) == ["config.json", "config.json", "model.safetensors"]


@pytest.mark.parametrize("within", ["", "a", "a/b/c"])
async def test_a_folder_with_too_many_entries_is_refused(folder, source, monkeypatch, within: str) -> None:
    monkeypatch.setattr(sources, "MAX_ENTRIES", 20)
    (folder / within).mkdir(parents=True, exist_ok=True)
    (folder / "a").mkdir(exist_ok=True)
    (folder / "a" / "loop").symlink_to(folder)
    await source.head(str(folder), None)
    for number in range(20):
        (folder / within / f"{number}.safetensors").touch()
    with pytest.raises(SourceError, match="over 20 files and folders") as caught:
        await source.head(str(folder), None)
    assert caught.value.code == "too_large"
