"""The shipped policy: its requirements, and its success with cubes that are not in its training data."""

from pathlib import Path

import av
import numpy as np
import pytest

import jaxmodels
from robojax.cli.sim import FIRST_SEED, select_policy
from robojax.sim.arm import CAMERA, FRAME, JOINTS, RATE
from robojax.sim.evaluation import STRIP, evaluate
from robojax.sim.tasks import PICK, TWO_CUBES, Score
from tests.testing.models import compilation as compilation

CUBES = 5


@pytest.fixture(scope="module")
def shipped() -> jaxmodels.Policy:
    return jaxmodels.load_policy(select_policy(PICK, None))


def test_shipped_policy_matches_this_arm(shipped: jaxmodels.Policy):
    needs = shipped.requirements
    assert (needs.cameras, needs.joint_names, needs.rate) == ({CAMERA: (96, 96)}, JOINTS, RATE)
    assert (needs.state, needs.action) == (len(JOINTS), len(JOINTS))


@pytest.mark.usefixtures("can_draw")
def test_shipped_policy_lifts_unseen_cubes_despite_a_delay(shipped: jaxmodels.Policy):
    seeds = range(FIRST_SEED, FIRST_SEED + CUBES)
    score = Score()
    for outcome in evaluate(shipped, seeds, delay=2):
        score.outcomes.append(outcome)
        assert (outcome.number, outcome.seed) == (score.done, seeds[score.done - 1])
    assert score.done == CUBES
    assert score.lifted >= CUBES - 1, str(score)


def test_delay_of_a_whole_chunk_is_refused(shipped: jaxmodels.Policy):
    with pytest.raises(ValueError, match="exceed its 20 actions; give a shorter delay"):
        next(evaluate(shipped, [0], delay=16))


class StillPolicy:
    """Policy that keeps the arm still and records its instructions."""

    def __init__(self, language: bool) -> None:
        self.requirements = jaxmodels.Requirements("still", action=6, chunk=110, action_steps=110, language=language)
        self.instructions: list[np.ndarray] = []

    def act(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        self.instructions.append(observation["task"])
        return np.repeat(observation["observation.state"][:, None], 110, axis=1)


@pytest.mark.usefixtures("can_draw")
def test_instruction_names_the_cube_and_film_has_the_verdict(tmp_path: Path):
    policy = StillPolicy(language=True)
    outcomes = [*evaluate(policy, [4, 5], task=TWO_CUBES, films=tmp_path)]  # pyright: ignore[reportArgumentType]
    assert [texts.tolist() for texts in policy.instructions] == [["pick up the red cube"], ["pick up the blue cube"]]
    assert [outcome.verdict for outcome in outcomes] == ["missed", "missed"]
    films = sorted(file.name for file in tmp_path.iterdir())
    assert films == ["0001-seed-4-missed.mp4", "0002-seed-5-missed.mp4"]
    with av.open(str(tmp_path / films[0])) as container:
        stream = container.streams.video[0]
        assert (stream.height, stream.width, stream.average_rate) == (FRAME[0] + STRIP, FRAME[1], RATE)
        assert sum(1 for _ in container.decode(stream)) == 110


@pytest.mark.usefixtures("can_draw")
def test_policy_without_language_gets_no_instruction():
    with pytest.raises(KeyError, match="task"):
        [*evaluate(StillPolicy(language=False), [0], task=TWO_CUBES)]  # pyright: ignore[reportArgumentType]
