"""A policy's content has one name, however it is read, and nothing but a policy's files is in it."""

from pathlib import Path

import pytest

from jaxmodels import is_policy_file
from jaxmodels.errors import CheckpointError
from service.distributed.artifacts import Digest, Listing, list_files, make_listing, matches_listing, read_pieces
from tests.unit.distributed.policy_files.files import FILES


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_it_is_called_the_same_in_whatever_pieces_it_is_read(folder: Path, size: int) -> None:
    digest = Digest()
    for name in list_files(folder):
        assert b"".join(digest.hash_pieces(name, read_pieces(folder / name, size))) == FILES[name]
    assert digest.listing == make_listing(folder)
    assert digest.listing.files == (("config.json", 15), ("model.safetensors", 2048), ("owner/vlm/tokenizer.json", 2))


def test_what_goes_from_one_file_to_the_next_is_another_content(tmp_path: Path) -> None:
    names = []
    for number, (first, second) in enumerate([(b"ab", b"c"), (b"a", b"bc"), (b"abc", b"")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_bytes(first)
        (tmp_path / str(number) / "model.safetensors").write_bytes(second)
        names.append(make_listing(tmp_path / str(number)).sha)
    assert len(set(names)) == 3


def test_only_a_folder_with_just_these_files_is_like_it(folder: Path) -> None:
    listing = make_listing(folder)
    (folder / "notes.txt").write_text("not of the policy")
    assert matches_listing(folder, listing)
    assert not matches_listing(folder / "nowhere", listing)
    (folder / "tokenizer.json").write_text("{}")
    assert not matches_listing(folder, listing)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_bytes(b'{"type": "ACT"}')
    assert not matches_listing(folder, listing)
    (folder / "config.json").unlink()
    assert not matches_listing(folder, listing)


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "run.py", "train_config.json", "\0.json", "policy_preprocessor_step_/../x.safetensors"),
        *(
            "../config.json",
            "/config.json",
            "a//config.json",
            "a/../config.json",
            ".a/config.json",
            "a/b/c/d/config.json",
        ),
        *("a/model.safetensors", "a/robojax.json", "model-1-of-2.safetensors", "model-0/../-of-00001.safetensors"),
    ],
)
def test_others_are_not(name: str) -> None:
    assert not is_policy_file(name)
    with pytest.raises(CheckpointError, match="no file of a policy"):
        Listing("0" * 64, (("config.json", 2), (name, 2))).check()
