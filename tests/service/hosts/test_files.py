"""A policy's files on a follower: those that are there, or those of the front."""

import shutil
from pathlib import Path

import pytest

from jaxmodels.errors import CheckpointError
from service.hosts import files
from service.hosts.files import find_files, read_piece
from service.policy_files.listing import Listing, listing_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "policy"
    found.mkdir()
    (found / "config.json").write_text("{}")
    (found / "model.safetensors").write_bytes(bytes(range(256)) * 10)
    (found / "notes.txt").write_text("not sent")
    return found


def refuse(name: str, at: int, length: int) -> bytes:
    raise AssertionError(f"{name} was asked for")


def test_the_same_folder_with_the_same_content_is_used(folder: Path, tmp_path: Path) -> None:
    assert find_files(listing_of(folder), folder, tmp_path / "cache", refuse) == folder


def test_another_content_is_fetched_once_in_pieces(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "PIECE", 1000)
    listing, there = listing_of(folder), tmp_path / "there"
    shutil.copytree(folder, there)
    (there / "config.json").write_text('{"older": 1}')
    asked: list[tuple[str, int, int]] = []

    def fetch(name: str, at: int, length: int) -> bytes:
        asked.append((name, at, length))
        return read_piece(folder, name, at, length)

    found = find_files(listing, there, tmp_path / "cache", fetch)
    assert asked == [
        ("config.json", 0, 2),
        ("model.safetensors", 0, 1000),
        ("model.safetensors", 1000, 1000),
        ("model.safetensors", 2000, 560),
    ]
    assert listing_of(found) == listing
    assert not (found / "notes.txt").exists()
    assert find_files(listing, tmp_path / "nowhere", tmp_path / "cache", refuse) == found
    (found / "config.json").write_text("[]")  # damaged on the disk
    assert find_files(listing, tmp_path / "nowhere", tmp_path / "cache", fetch) == found
    assert listing_of(found) == listing


def test_what_changes_while_it_is_sent_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="changed while they were sent"):
        find_files(listing_of(folder), tmp_path / "nowhere", tmp_path / "cache", lambda name, at, length: b"")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("name", ["../config.json", "/tmp/config.json", "run.py", ""])
def test_no_other_files_are_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="no file of a policy"):
        find_files(Listing("0" * 64, ((name, 2),)), tmp_path / "nowhere", tmp_path / "cache", lambda *_: b"{}")
