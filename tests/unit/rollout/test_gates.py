"""Gates for new policies: verdicts and their reasons."""

import json
from typing import Any

import numpy as np
import pytest

from service.control.joints import SO100, Joint, JointTable
from service.rollout.gates import GateLimits, Trial, judge_trial

TABLE = JointTable(SO100)
OLD = np.tile(np.array([10, 20, 30, 40, 50, 60], np.float32), (20, 1))


def trial(chunk: np.ndarray, *, seconds: float = 0.01, **changes: object) -> Trial:
    made = {"chunks": [OLD, chunk], "references": [OLD, OLD], "seconds": [seconds] * 5, "executed": 10, "budget": 0.5}
    return Trial(**(made | changes))  # type: ignore[arg-type]


def changed(step: int, joint: int, value: float) -> np.ndarray:
    chunk = OLD.copy()
    chunk[step, joint] = value
    return chunk


def test_figures_are_finite_even_for_the_largest_numbers() -> None:
    verdict = judge_trial(trial(OLD), TABLE, GateLimits())
    assert (verdict.reason, verdict.figures["difference"]) == (None, 0)
    assert verdict.figures["compared"] == 2
    json.dumps(dict(verdict.figures), allow_nan=False)
    table = JointTable([Joint("lift", 0)])
    old, wild = np.full((20, 1), -3e38, np.float32), np.full((20, 1), 3e38, np.float32)
    verdict = judge_trial(trial(wild, chunks=[wild], references=[old]), table, GateLimits())
    assert verdict.reason == "differs"
    json.dumps(dict(verdict.figures), allow_nan=False)


UNCOMPARED = {"references": [None, None]}


@pytest.mark.parametrize(
    ("chunk", "changes", "reason", "message"),
    [
        (changed(19, 2, np.nan), {}, "not_finite", "1 of 240 values"),
        (changed(0, 0, -np.inf), {}, "not_finite", "not finite"),
        (changed(3, 1, 121), {}, "out_of_range", "'Pitch'"),
        (changed(3, 5, -11), {}, "out_of_range", "'Jaw'"),
        (changed(9, 0, 61), {}, "differs", "'Rotation'"),
        (changed(10, 0, 1000), {}, None, ""),  # The action is never executed.
        # A slow policy is refused unless the running policy is as slow.
        (OLD, {"seconds": 0.24}, None, ""),
        (OLD, {"seconds": 0.26}, "slow", ""),
        (OLD, {"seconds": 0.26, "usual": 0.25}, None, ""),
        (OLD, {"seconds": 0.31, "usual": 0.25}, "slow", ""),
        # The other gates also work without a policy to compare with.
        (changed(0, 0, 100), UNCOMPARED, None, "not compared"),
        (changed(0, 0, np.nan), UNCOMPARED, "not_finite", ""),
        (changed(0, 0, 130), UNCOMPARED, "out_of_range", ""),
    ],
)
def test_a_refusal_names_the_reason_and_the_joint(
    chunk: np.ndarray, changes: Any, reason: str | None, message: str
) -> None:
    verdict = judge_trial(trial(chunk, **changes), TABLE, GateLimits())
    assert verdict.reason == reason
    assert message in verdict.text


MOVING = np.linspace(0, 2, 20, dtype=np.float32)[:, None]
RESTING = np.tile(np.array([1.5, 0.0], np.float32), (20, 1))


@pytest.mark.parametrize(("old", "passes", "fails"), [(MOVING, 0.4, 0.6), (RESTING, 0.02, 0.06)])
def test_a_joint_without_a_range_is_judged_by_the_running_policy(old: np.ndarray, passes: float, fails: float) -> None:
    table = JointTable([Joint("lift", 0), Joint("turn", 1)][: old.shape[1]])
    for offset, reason in ((passes, None), (fails, "differs")):
        tried = Trial(chunks=[old + offset], references=[old], seconds=[0.01], executed=20, budget=1.0)
        assert judge_trial(tried, table, GateLimits()).reason == reason
