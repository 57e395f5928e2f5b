"""A policy's files go to another machine as they are, and nothing but those."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxmodels.errors import CheckpointError
from service.distributed import artifacts
from service.distributed.artifacts import PolicyArtifact, pack, unpack
from tests.unit.distributed.policy_files import files
from tests.unit.distributed.policy_files.files import FILES, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return files.write(tmp_path / "policy")


def same(piece: bytes) -> bytes:
    return piece


def test_files_of_many_pieces_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(folder, same).sha
    monkeypatch.setattr(artifacts, "PIECE_BYTES", 100)
    artifact = pack(folder, same)
    assert {name: len(pieces) for name, pieces in artifact.pieces.items()} == {
        "config.json": 1,
        "model.safetensors": 21,
        "owner/vlm/tokenizer.json": 1,
    }
    assert artifact.sha == whole
    assert read(unpack(artifact, tmp_path / "cache", same)) == FILES


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
    assert set(pack(folder, same).pieces) == set(FILES)


def test_weights_that_do_not_travel_are_refused_before_anything_is_sent(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "orbax").mkdir()
    sent: list[bytes] = []
    with pytest.raises(CheckpointError, match=r"Orbax's, which are not sent to other machines.*\.save\(path\)"):
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
    artifact = pack(folder, same)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((CheckpointError, ValueError)):
        unpack(PolicyArtifact(replace(artifact.listing, files=((name, 1),)), {name: (b"x",)}), tmp_path / "cache", same)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path not in before] in (
        [],
        [path for path in sorted((tmp_path / "cache").glob(".*.lock"))],
    )


@pytest.mark.parametrize("sha", ["..", "../policy", "", "0" * 63, "0" * 64 + "\n", "/tmp"])
def test_no_folder_is_made_but_one_of_its_name(sha: str, folder: Path, tmp_path: Path) -> None:
    artifact = pack(folder, same)
    with pytest.raises(CheckpointError):
        unpack(replace(artifact, listing=replace(artifact.listing, sha=sha)), tmp_path / "cache", same)
    assert not (tmp_path / "cache").exists()


def test_what_is_not_what_was_sent_is_not_kept(folder: Path, tmp_path: Path) -> None:
    artifact = pack(folder, same)
    with pytest.raises(CheckpointError, match="changed while they were sent"):
        unpack(artifact, tmp_path / "cache", lambda piece: piece[:-1])
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert read(unpack(artifact, tmp_path / "cache", same)) == FILES


def test_it_is_fetched_once_on_a_machine(folder: Path, tmp_path: Path) -> None:
    artifact, fetched = pack(folder, same), []

    def get(piece: bytes) -> bytes:
        fetched.append(piece)
        return piece

    for _ in range(3):
        unpack(artifact, tmp_path / "cache", get)
    assert len(fetched) == len(FILES)


def test_a_fetch_that_fails_leaves_nothing_and_is_tried_again(folder: Path, tmp_path: Path) -> None:
    artifact, cache = pack(folder, same), tmp_path / "cache"

    def fail(piece: bytes) -> bytes:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        unpack(artifact, cache, fail)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert read(unpack(artifact, cache, same)) == FILES


def test_a_cache_that_cannot_be_made_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        unpack(pack(folder, same), tmp_path / "cache", same)
