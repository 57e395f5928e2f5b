"""Outcomes: in words, in numbers, and how sure those are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robojax.sim.tasks import Outcome, Score, wilson

RED, BLUE = "pick up the red cube", "pick up the blue cube"


def outcome(number: int, instruction: str = RED, lifted: bool = True, wrong: str | None = None) -> Outcome:
    return Outcome(number, 5000 + number, instruction, lifted, wrong, 110)


def test_an_episode_is_lifted_missed_or_wrong():
    assert outcome(1).verdict == "lifted"
    assert outcome(1, lifted=False).verdict == "missed"
    assert outcome(1, lifted=False, wrong="blue").verdict == "wrong, lifted the blue cube"


def test_a_score_counts_each_instruction_for_itself():
    score = Score([outcome(1), outcome(2, BLUE, False, "red"), outcome(3, RED, False), outcome(4, BLUE)])
    assert str(score) == "2 of 4 cubes lifted, 1 times a wrong one"
    rows = score.by_instruction()
    assert [*rows] == [RED, BLUE]
    assert {name: (each.lifted, each.wrong, each.done) for name, each in rows.items()} == {
        RED: (1, 0, 2),
        BLUE: (1, 1, 2),
    }


def test_before_the_first_episode_nothing_is_known():
    assert Score().interval == (0.0, 1.0)
    assert str(Score()) == "0 of 0 cubes lifted"


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (17, 20), (36, 40), (40, 40), (0, 40), (96, 100)])
def test_the_interval_is_wilsons(successes: int, trials: int):
    from scipy.stats import binomtest

    expected = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.integers(1, 500).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_an_interval_holds_its_share_and_stays_a_share(counts: tuple[int, int]):
    successes, trials = counts
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high
