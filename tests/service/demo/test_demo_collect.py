import numpy as np
import pytest

from jaxmodels.data import Episodes, resize_frames
from service.demo import collect
from service.demo.arm import RATE, Arm
from service.demo.units import JOINTS

pytestmark = pytest.mark.usefixtures("can_draw")


@pytest.fixture(scope="module")
def recording() -> dict[str, np.ndarray]:
    arrays = collect.record(0)
    assert arrays is not None
    return arrays


def test_a_recording_holds_what_the_policy_sees_and_what_the_expert_wanted(recording):
    steps = len(recording["action"])
    assert recording["observation.state"].shape == (steps, 6)
    assert recording["observation.images.front"].shape == (steps, *collect.SEEN, 3)
    assert {name: array.dtype.str for name, array in recording.items()} == {
        "observation.state": "<f4",
        "action": "<f4",
        "observation.images.front": "|u1",
    }


def test_a_recording_is_in_units_of_the_wire(recording):
    assert np.abs(recording["action"][:, :5]).max() <= 100
    assert recording["action"][:, 5].min() >= 0
    assert recording["action"][:, 5].max() > 50, "the jaw opens"


def test_actions_are_the_experts_and_not_the_pushed_ones(recording):
    # A push is noise of about one wire unit per tick; what the expert wants is smooth.
    bends = np.abs(np.diff(recording["action"][:, :5], n=2, axis=0))
    assert bends.max() < 1.0
    assert np.abs(np.diff(recording["observation.state"][:38, :5], n=2, axis=0)).max() > 0.2


def test_a_seed_gives_the_same_recording_again(recording):
    again = collect.record(0)
    assert again is not None
    for name, array in recording.items():
        np.testing.assert_array_equal(array, again[name])


def test_frames_are_stored_as_the_serving_program_resizes_them(arm: Arm, recording):
    arm.reset(0)
    seen = resize_frames(arm.picture("front", *collect.FRAME)[None], collect.SEEN)[0]
    np.testing.assert_array_equal(seen, recording["observation.images.front"][0])


def test_demonstrations_land_in_a_folder_that_training_reads(tmp_path):
    with collect.demonstrations(tmp_path / "pick", episodes=2, seed=0) as recorded:
        seeds = [*recorded]
        assert not (tmp_path / "pick").exists(), "half a data set must not look like one"
    episodes = Episodes(tmp_path / "pick")
    assert list(episodes.meta.seeds) == seeds
    assert (episodes.meta.rate, episodes.meta.joint_names) == (RATE, JOINTS)
    assert len(set(seeds)) == 2


def test_an_existing_folder_is_never_written_over(tmp_path):
    with pytest.raises(FileExistsError, match="remove it first"), collect.demonstrations(tmp_path, episodes=1):
        pass
