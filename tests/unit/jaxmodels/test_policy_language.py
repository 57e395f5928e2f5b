"""Policies that read instructions encode each text once, outside of the inference program."""

import dataclasses

import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import ObservationError
from jaxmodels.text import TextConfig
from jaxmodels.types import TASK
from tests.unit.jaxmodels.small_policies import CONFIGS, make_checkpoint

TEXT_ENCODER = TextConfig(length=24, width=16, n_layers=1, n_heads=2, hidden=32)
CONFIG = dataclasses.replace(CONFIGS["diffusion2d"], num_inference_steps=1, text_encoder=TEXT_ENCODER)
RED, BLUE = "pick up the red cube", "pick up the blue cube"


@pytest.fixture(scope="module")
def policy() -> jaxmodels.Policy:
    policy = jaxmodels.Policy(make_checkpoint(CONFIG))
    policy.compile()
    return policy


def seen(*tasks: str) -> dict[str, np.ndarray]:
    return {"observation.state": np.full((len(tasks), 4), 0.5, np.float32), TASK: np.array(tasks, "<U512")}


def counted(policy: jaxmodels.Policy, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    encoded: list[int] = []
    encode = policy._instructions._encode  # pyright: ignore[reportOptionalMemberAccess]
    monkeypatch.setattr(policy._instructions, "_encode", lambda *tokens: encoded.append(1) or encode(*tokens))
    return encoded


def test_text_is_encoded_once(policy, monkeypatch) -> None:
    encoded = counted(policy, monkeypatch)
    policy.act(seen("one"))
    policy.act(seen("one"))
    policy.act(seen("one", "two", "one"))
    policy.act(seen("two", "one", "two"))
    assert len(encoded) == 2
    policy.prepare_task("put it down")
    assert len(encoded) == 3
    policy.act(seen("put it down"))
    assert len(encoded) == 3


def test_other_weights_encode_a_text_again(policy) -> None:
    before = policy.act(seen(RED))
    other = policy.with_weights(make_checkpoint(CONFIG, seed=1))
    assert np.abs(other.act(seen(RED)) - before).max() > 1e-3
    np.testing.assert_array_equal(policy.act(seen(RED)), before)


def test_compile_includes_the_text_program(policy, monkeypatch) -> None:
    assert policy.is_compiled()
    monkeypatch.setattr(policy._programs, "_compile", lambda *arguments: pytest.fail("compiled again"))
    policy.act(seen("never seen before"))
    assert policy.profile() > 0


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (None, "task is missing, and this policy reads an instruction; wanted 1 text, e.g. 'task'"),
        (RED, "task is one text without a batch axis"),
        ([RED, BLUE], "task has 2 texts and the other features 1 members"),
        (["  "], "task is blank for member 0"),
        ([3], r"task is \[3\]; wanted 1 text"),
        (np.zeros((1, 2)), r"task is array\(\[\[0\., 0\.\]\]\); wanted 1 text"),
        (["x" * 24], "24 bytes; this policy reads 23"),
    ],
)
def test_invalid_instruction_is_refused(policy, tasks, words: str) -> None:
    observation = seen(RED)
    del observation[TASK]
    if tasks is not None:
        observation[TASK] = tasks
    with pytest.raises(ObservationError, match=words):
        policy.act(observation)


def test_bfloat16_text_encoding_is_close(policy) -> None:
    half = jaxmodels.Policy(make_checkpoint(CONFIG), dtype="bfloat16")
    wanted = policy.act(seen(RED))
    assert np.abs(half.act(seen(RED)) - wanted).max() <= 0.02 * np.abs(wanted).max()
