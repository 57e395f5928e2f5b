"""The policy that is shipped: it loads, says what it needs, and lifts cubes it never saw."""

import pytest

import jaxmodels
from service.cli.demo import FIRST_SEED, POLICY
from service.demo.arm import RATE
from service.demo.collect import CAMERA, SEEN
from service.demo.evaluate import evaluate
from service.demo.units import JOINTS

CUBES = 5


def test_the_shipped_policy_is_for_this_arm():
    requirements = jaxmodels.load_policy(POLICY).requirements
    assert requirements.cameras == {CAMERA: SEEN}
    assert requirements.joint_names == JOINTS
    assert requirements.rate == RATE
    assert (requirements.state, requirements.action) == (len(JOINTS), len(JOINTS))


@pytest.mark.usefixtures("can_draw")
@pytest.mark.parametrize("delay", [0, 2])
def test_the_shipped_policy_lifts_cubes_it_never_saw(delay: int):
    seeds = range(FIRST_SEED, FIRST_SEED + CUBES)
    told = []
    score = evaluate(POLICY, seeds, delay=delay, on_outcome=lambda outcome, score: told.append(score.done))
    assert told == [*range(1, CUBES + 1)]
    assert [outcome.seed for outcome in score.outcomes] == [*seeds]
    assert score.lifted >= CUBES - 1, str(score)
