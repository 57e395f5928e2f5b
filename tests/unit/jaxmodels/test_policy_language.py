"""A policy that is told what to do: each text is encoded once, beside the program that acts."""

import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import ObservationError
from jaxmodels.normalization import build_normalization
from jaxmodels.policies.diffusion2d import Diffusion2d, Diffusion2dConfig
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.text import TextConfig
from jaxmodels.types import TASK, Feature
from jaxmodels.weights import blueprint_of

CONFIG = Diffusion2dConfig(
    input_features=(Feature("observation.state", "STATE", (2,)),),
    output_features=(Feature("action", "ACTION", (2,)),),
    normalization_mapping=(("STATE", "IDENTITY"), ("ACTION", "IDENTITY")),
    chunk_size=4,
    n_action_steps=2,
    dim_model=16,
    n_heads=2,
    n_encoder_layers=0,
    n_layers=1,
    num_inference_steps=1,
    text_encoder=TextConfig(length=24, width=16, n_layers=1, n_heads=2, hidden=32),
)
TEXT = "pick up the red cube"  # the first of the golden file
RED, BLUE = TEXT, "pick up the blue cube"


def checkpoint(seed: int = 0, config: Diffusion2dConfig = CONFIG) -> Checkpoint:
    draw = np.random.default_rng(seed)
    shapes = blueprint_of(Diffusion2d, config).shapes
    weights = {name: (draw.normal(size=wanted.shape) * 0.3).astype(np.float32) for name, wanted in shapes.items()}
    normalization = build_normalization(CONFIG.input_features, CONFIG.output_features, CONFIG.normalization_mapping, {})
    return Checkpoint(config, weights, normalization)


@pytest.fixture(scope="module")
def policy() -> jaxmodels.Policy:
    policy = jaxmodels.Policy(checkpoint())
    policy.compile()
    return policy


def seen(*tasks: str) -> dict[str, np.ndarray]:
    return {"observation.state": np.full((len(tasks), 2), 0.5, np.float32), TASK: np.array(tasks, "<U512")}


def counted(policy: jaxmodels.Policy, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    encoded: list[int] = []
    encode = policy._instructions._encode  # pyright: ignore[reportOptionalMemberAccess]
    monkeypatch.setattr(policy._instructions, "_encode", lambda *tokens: encoded.append(1) or encode(*tokens))
    return encoded


def test_a_text_is_encoded_once(policy, monkeypatch) -> None:
    encoded = counted(policy, monkeypatch)
    policy.act(seen("one"))
    policy.act(seen("one"))
    policy.act(seen("one", "two", "one"))
    policy.act(seen("two", "one", "two"))
    assert len(encoded) == 2


def test_a_text_that_was_prepared_is_not_encoded_when_it_is_acted_on(policy, monkeypatch) -> None:
    encoded = counted(policy, monkeypatch)
    policy.prepare_task("put it down")
    assert len(encoded) == 1
    policy.act(seen("put it down"))
    assert len(encoded) == 1


def test_other_weights_read_a_text_anew(policy) -> None:
    before = policy.act(seen(RED))
    other = policy.with_weights(checkpoint(seed=1))
    assert np.abs(other.act(seen(RED)) - before).max() > 1e-3
    np.testing.assert_array_equal(policy.act(seen(RED)), before)


def test_compiling_makes_the_program_that_reads_too(policy, monkeypatch) -> None:
    assert policy.is_compiled()
    monkeypatch.setattr(
        policy._programs,
        "_compile",
        lambda *arguments: pytest.fail("something was compiled while a robot waits"),
    )
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
def test_what_is_no_instruction_is_refused(policy, tasks, words: str) -> None:
    observation = seen(RED)
    del observation[TASK]
    if tasks is not None:
        observation[TASK] = tasks
    with pytest.raises(ObservationError, match=words):
        policy.act(observation)


def test_bfloat16_reads_nearly_the_same(policy) -> None:
    half = jaxmodels.Policy(checkpoint(), dtype="bfloat16")
    np.testing.assert_allclose(half.act(seen(RED)), policy.act(seen(RED)), atol=0.1)
