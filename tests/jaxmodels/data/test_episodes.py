"""Folders of demonstrations, and batches out of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmodels.data import Episodes, EpisodeWriter
from jaxmodels.data.batches import Batches
from jaxmodels.errors import CheckpointError

NAMES = ("a", "b")


def episode(length: int, value: float) -> dict[str, np.ndarray]:
    steps = np.arange(length, dtype=np.float32)
    return {
        "observation.state": np.stack((np.full(length, value, np.float32), steps), axis=1),
        "action": np.stack((np.full(length, value, np.float32), steps), axis=1),
        "observation.images.front": np.full((length, 4, 6, 3), int(value), np.uint8),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with EpisodeWriter(tmp_path / "demos", rate=25.0, joint_names=NAMES, task="test") as writer:
        writer.add(episode(5, 10), seed=1)
        writer.add(episode(7, 20), seed=2)
    return tmp_path / "demos"


def test_what_was_written_is_read(folder: Path) -> None:
    episodes = Episodes(folder)
    assert len(episodes) == 2
    assert episodes.meta.lengths == (5, 7)
    assert episodes.meta.rate == 25
    np.testing.assert_array_equal(episodes.state[5:], episode(7, 20)["observation.state"])
    np.testing.assert_array_equal(episodes.images["observation.images.front"][0], np.full((4, 6, 3), 10))


def write_two_that_differ(folder: Path) -> None:
    with EpisodeWriter(folder, rate=25.0, joint_names=NAMES) as writer:
        writer.add(episode(5, 1), seed=1)
        writer.add(episode(5, 1) | {"action": np.zeros((5, 3), np.float32)}, seed=2)


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the ones before had"):
        write_two_that_differ(tmp_path / "demos")
    assert list(tmp_path.iterdir()) == []


def write_many(folder: Path) -> None:
    with EpisodeWriter(folder, rate=25.0, joint_names=NAMES) as writer:
        for _ in range(2000):
            writer.add(episode(5, 1), seed=1)


def test_a_full_disk_is_said_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demos"
    # Every byte for this device fails with "no space left", and so does closing a file with bytes left in it.
    monkeypatch.setattr(Path, "open", lambda path, mode: open("/dev/full", mode))
    with pytest.raises(OSError, match="No space left"):
        write_many(folder)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(FileExistsError, match="choose another folder"):
        EpisodeWriter(folder, rate=25.0, joint_names=NAMES)


def test_another_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="robojax demo collect"):
        Episodes(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"format": "robojax-episodes-1"}', "[]", '{"format": NaN}'])
def test_a_broken_description_is_refused(folder: Path, text: str) -> None:
    (folder / "meta.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"meta\.json|format"):
        Episodes(folder)


def test_arrays_that_do_not_fit_their_description_are_refused(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"lengths": [5, 6]}))
    with pytest.raises(CheckpointError, match="speaks of 11 steps; action has 12"):
        Episodes(folder)


def test_an_array_of_objects_is_never_unpickled(folder: Path) -> None:
    np.save(folder / "action.npy", np.array([{}] * 12, object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects in dtype"):
        Episodes(folder)


def test_statistics_are_those_of_all_steps(folder: Path) -> None:
    stats = Episodes(folder).statistics()
    expected = np.concatenate((np.full(5, 10.0), np.full(7, 20.0)))
    np.testing.assert_allclose(stats["action"]["mean"][0], expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(stats["action"]["std"][0], expected.std(), rtol=1e-6)
    assert stats["observation.images.front"]["mean"].shape == (3, 1, 1)
    assert 10 / 255 <= stats["observation.images.front"]["mean"][0, 0, 0] <= 20 / 255


def test_a_batch_holds_the_actions_that_followed_and_marks_those_past_the_end(folder: Path) -> None:
    batch = Batches(Episodes(folder), chunk=4, size=64, seed=0).at(0)
    for state, actions, is_pad in zip(batch.state, batch.actions, batch.is_pad, strict=True):
        value, step = state
        last = 4 if value == 10 else 6
        wanted = np.minimum(step + np.arange(4), last)
        np.testing.assert_array_equal(actions, np.stack((np.full(4, value), wanted), axis=1))
        np.testing.assert_array_equal(is_pad, step + np.arange(4) > last)


def test_batches_depend_on_the_seed_and_the_step_alone(folder: Path) -> None:
    episodes = Episodes(folder)
    first, again = (Batches(episodes, chunk=4, size=8, seed=3).at(9) for _ in range(2))
    np.testing.assert_array_equal(first.actions, again.actions)
    other = Batches(episodes, chunk=4, size=8, seed=4).at(9)
    assert not np.array_equal(first.actions, other.actions)
