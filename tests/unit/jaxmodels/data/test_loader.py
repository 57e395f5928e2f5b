import numpy as np
import pytest

from jaxmodels.data import Loader, open_dataset
from jaxmodels.data import frames as frame_cache
from jaxmodels.errors import DatasetError
from tests.unit.jaxmodels.data.demonstrations import ACTION, FRONT, ROWS, STATE, level, policy, write_video

SMALL = (16, 24)


@pytest.fixture
def dataset(written):
    return open_dataset(written["v3.0"])


def loader(dataset, **options):
    return Loader(dataset, policy(**options.pop("sees", {})), **{"batch_size": 5, "seed": 3, "cache": False} | options)


def same(one, two):
    pairs = zip((*one.images, *one[1:]), (*two.images, *two[1:]), strict=True)
    return all(a is b is None or np.array_equal(a, b) for a, b in pairs)


def rows_of(batch):
    """Return the rows of a batch; the first number of a state is its row."""
    return batch.state[:, 0].astype(int)


def test_batch_has_observations_and_the_following_actions(dataset):
    batch = loader(dataset, batch_size=64).at(0)
    rows = rows_of(batch)
    ends = np.repeat(dataset.ends, dataset.lengths)[rows][:, None]
    wanted = rows[:, None] + np.arange(4)
    np.testing.assert_array_equal(batch.state, STATE[rows])
    np.testing.assert_array_equal(batch.actions, ACTION[np.minimum(wanted, ends - 1)])
    np.testing.assert_array_equal(batch.is_pad, wanted >= ends)
    np.testing.assert_array_equal(batch.tasks, dataset.task_index[rows])
    assert np.abs(batch.images[0][:, 0, 0, 0].astype(int) - [level(row) for row in rows]).max() <= 3
    assert batch.environment_state is None


def test_batch_has_a_history_and_the_actions_since_its_start(dataset):
    """Use LeRobot's delta timestamps: observations -2 to 0, actions -2 to 2, repeated at the ends of an episode."""
    batch = loader(dataset, batch_size=64, sees={"looks": 3, "chunk": 5, "dropped": 2}).at(0)
    rows = batch.state[:, -1, 0].astype(int)
    (starts, ends) = (np.repeat(at, dataset.lengths)[rows][:, None] for at in (dataset.starts, dataset.ends))
    assert (rows[:, None] < ends - 2).all(), "the last two rows of each episode must be dropped"
    seen, wanted = rows[:, None] + np.arange(-2, 1), rows[:, None] + np.arange(-2, 3)
    np.testing.assert_array_equal(batch.state, STATE[np.maximum(seen, starts)])
    np.testing.assert_array_equal(batch.actions, ACTION[np.clip(wanted, starts, ends - 1)])
    np.testing.assert_array_equal(batch.is_pad, (wanted < starts) | (wanted >= ends))
    assert batch.is_pad.any()
    levels = [[level(row) for row in window] for window in np.maximum(seen, starts)]
    assert np.abs(batch.images[0][:, :, 0, 0, 0].astype(int) - levels).max() <= 3
    with pytest.raises(DatasetError, match=r"and the last 99 of each are left out; set --policy.drop_n_last_frames"):
        loader(dataset, sees={"dropped": 99})


def test_batches_depend_only_on_seed_and_step(dataset):
    one, again = loader(dataset), loader(dataset)
    for step in (9, 2, 0):  # In any order.
        assert same(one.at(step), again.at(step))
    assert not same(one.at(1), loader(dataset, seed=4).at(1))
    assert not same(one.at(1), one.at(2))


def test_each_row_occurs_once_per_epoch(dataset):
    one = loader(dataset)
    epochs = [np.concatenate([rows_of(one.at(step)) for step in range(start, start + 4)]) for start in (0, 4)]
    for seen in epochs:
        assert sorted(seen) == list(range(ROWS))
    assert epochs[0].tolist() != epochs[1].tolist()
    # A batch may be larger than the dataset.
    assert np.bincount(rows_of(loader(dataset, batch_size=2 * ROWS).at(1))).tolist() == [2] * ROWS


def test_prefetched_batches_are_the_same_and_in_order(dataset):
    one = loader(dataset, workers=3)
    found = list(one.batches(3, 10))
    assert len(found) == 7
    assert all(same(batch, one.at(step)) for step, batch in enumerate(found, 3))
    assert one.waited > 0


def test_parts_of_a_batch_form_the_whole_batch(dataset):
    whole = loader(dataset, batch_size=6).at(5)
    parts = [loader(dataset, batch_size=6, shard=(index, 3)).at(5) for index in range(3)]
    np.testing.assert_array_equal(np.concatenate([part.actions for part in parts]), whole.actions)
    np.testing.assert_array_equal(np.concatenate([part.images[0] for part in parts]), whole.images[0])
    for shard, size in (((0, 4), 6), ((3, 3), 6), ((0, 0), 6), ((0, 1), 0)):
        with pytest.raises(DatasetError, match="parts of equal size"):
            loader(dataset, batch_size=size, shard=shard)


def test_all_missing_features_are_reported_at_once(dataset):
    with pytest.raises(DatasetError) as refused:
        loader(dataset, sees={"camera": "observation.images.wrist", "width": 3})
    assert "no observation.images.wrist" in str(refused.value)
    assert "action is ACTION [2]; the policy has ACTION [3]" in str(refused.value)


def test_cached_frames_are_the_resized_decoded_frames(folder, tmp_path):
    dataset = open_dataset(folder)
    progress = []
    sees = {"size": SMALL}
    cached = loader(dataset, sees=sees, cache=str(tmp_path), on_progress=lambda *at: progress.append(at))
    fresh = loader(dataset, sees=sees)
    assert (cached.is_cached, fresh.is_cached) == (True, False)
    assert progress[-1] == (ROWS, ROWS)
    for step in range(4):
        assert same(cached.at(step), fresh.at(step))
        assert fresh.at(step).images[0].shape == (5, *SMALL, 3)


def test_frames_are_decoded_into_the_cache_once(copy, tmp_path):
    folder = copy("v2.1")
    progress = []
    first = loader(open_dataset(folder), cache=tmp_path / "cache").at(0)
    again = loader(open_dataset(folder), cache=tmp_path / "cache", on_progress=lambda *at: progress.append(at))
    assert progress == []
    assert same(again.at(0), first)
    # A changed file makes another dataset.
    write_video(folder / f"videos/chunk-000/{FRONT}/episode_000000.mp4", range(6, 12))
    changed = loader(open_dataset(folder), cache=tmp_path / "cache")
    assert changed.at(0).images[0].max() > 0
    assert len(list((tmp_path / "cache").glob("*.frames"))) == 2


def test_frames_beyond_the_cache_size_are_decoded_each_time(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(frame_cache, "LIMIT", 1000)
    one = loader(dataset, cache=tmp_path)
    assert not one.is_cached
    assert list(tmp_path.glob("*.frames")) == []
    assert same(one.at(0), loader(dataset).at(0))


def test_least_recently_used_frames_are_evicted(written, tmp_path, monkeypatch):
    monkeypatch.setattr(frame_cache, "LIMIT", 2 * ROWS * 32 * 48 * 3)
    for name in ("v3.0", "v2.1", "v2.1 with pictures"):
        assert loader(open_dataset(written[name]), cache=tmp_path).is_cached
    assert len(list(tmp_path.glob("*.frames"))) == 2


def test_unwritable_cache_folder_costs_only_time(dataset, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    assert not loader(dataset, cache=tmp_path / "file").is_cached
    assert frame_cache.VARIABLE in caplog.text


def test_failed_cache_leaves_no_files(copy, tmp_path):
    folder = copy("v2.1")
    write_video(folder / f"videos/chunk-000/{FRONT}/episode_000001.mp4", range(6, 9))
    with pytest.raises(DatasetError, match="shorter than its rows"):
        loader(open_dataset(folder), cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_unreadable_frame_stops_the_batches(copy):
    folder = copy("v2.1")
    one = loader(open_dataset(folder), workers=2)
    (folder / f"videos/chunk-000/{FRONT}/episode_000001.mp4").unlink()
    with pytest.raises(DatasetError, match="is missing"):
        list(one.batches(0, 8))
    with pytest.raises(DatasetError, match="is missing"):
        loader(open_dataset(folder), cache=folder / "cache")


def test_environment_selects_the_cache_folder(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv(frame_cache.VARIABLE, str(tmp_path / "here"))
    assert loader(dataset, cache=True).is_cached
    assert list((tmp_path / "here").glob("*.frames"))
    monkeypatch.setenv(frame_cache.VARIABLE, "off")
    assert not loader(dataset, cache=True).is_cached
