"""The iterative policy: a chunk out of always the same noise, which continues the plan in the observation."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import ConfigError, ObservationError
from jaxmodels.normalization import from_stats
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.diffusion2d import Diffusion2d, Diffusion2dConfig
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.text import TextConfig
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, Feature
from jaxmodels.weights import blueprint

CHUNK, ACTION = 8, 3
CONFIG = Diffusion2dConfig(
    input_features=(Feature("observation.state", "STATE", (4,)),),
    output_features=(Feature("action", "ACTION", (ACTION,)),),
    chunk_size=CHUNK,
    n_action_steps=4,
    dim_model=16,
    n_heads=2,
    n_encoder_layers=0,
    n_layers=1,
    num_inference_steps=5,
)


def checkpoint(config: Diffusion2dConfig = CONFIG, seed: int = 0) -> Checkpoint:
    draw = np.random.default_rng(seed)
    shapes = blueprint(lambda rngs: Diffusion2d(config, rngs=rngs)).shapes
    weights = {name: (draw.normal(size=wanted.shape) * 0.15).astype(np.float32) for name, wanted in shapes.items()}
    # the second joint never moved in the data
    stats = {
        "observation.state": {"min": np.full(4, -2, np.float32), "max": np.full(4, 2, np.float32)},
        "action": {"min": np.array([-50, 7, 0], np.float32), "max": np.array([50, 7, 100], np.float32)},
    }
    cameras = {
        f.name: {"mean": np.full((3, 1, 1), 0.5, np.float32), "std": np.ones((3, 1, 1), np.float32)}
        for f in config.cameras
    }
    normalization = from_stats(
        config.input_features, config.output_features, config.normalization_mapping, stats | cameras
    )
    return Checkpoint(config, weights, normalization, Sidecar(rate=20.0))


@pytest.fixture(scope="module")
def policy() -> jaxmodels.Policy:
    return jaxmodels.Policy(checkpoint())


def seen(batch: int = 3, seed: int = 1) -> dict[str, np.ndarray]:
    return {"observation.state": np.random.default_rng(seed).uniform(-2, 2, (batch, 4)).astype(np.float32)}


def plan(delay: list[int], length: list[int], seed: int = 2) -> dict[str, np.ndarray]:
    """A plan as sessions send it: in units of the robot, filled up with zeros."""
    actions = np.random.default_rng(seed).uniform([-50, 7, 0], [50, 7, 100], (len(delay), CHUNK, ACTION))
    actions[np.arange(CHUNK)[None] >= np.array(length)[:, None]] = 0
    return {
        PREFIX_ACTIONS: actions.astype(np.float32),
        PREFIX_DELAY: np.array(delay, np.int32),
        PREFIX_LENGTH: np.array(length, np.int32),
    }


def test_a_folder_is_read_as_it_was_written_and_says_that_it_takes_a_plan(policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy")
    needs = jaxmodels.read_requirements(tmp_path / "policy")
    assert (needs.policy_type, needs.chunk, needs.action_steps, needs.action) == ("diffusion2d", CHUNK, 4, ACTION)
    assert needs.takes_prefix
    read = lerobot_folder.read(tmp_path / "policy")
    assert read.config == CONFIG
    for name, array in checkpoint().weights.items():
        np.testing.assert_array_equal(read.weights[name], array)
    again = jaxmodels.load_policy(tmp_path / "policy", like=policy)
    np.testing.assert_array_equal(again.act(seen()), policy.act(seen()))


def test_the_same_observation_has_the_same_answer_at_any_place_and_in_any_company(policy) -> None:
    observation = {**seen(), **plan([0, 3, 2], [0, 8, 5])}
    answer = policy.act(observation)
    np.testing.assert_array_equal(policy.act(observation), answer)
    for member in range(3):
        others = {**seen(seed=7), **plan([1, 1, 1], [8, 8, 8], seed=8)}
        for name, array in others.items():
            array[(member + 1) % 3] = observation[name][member]
        np.testing.assert_allclose(policy.act(others)[(member + 1) % 3], answer[member], atol=1e-3)  # of 100


def test_without_a_plan_the_answer_is_that_of_a_policy_that_was_never_given_one(policy) -> None:
    observation = seen()
    plain = policy.act(observation)
    np.testing.assert_array_equal(policy.act({**observation, **plan([0, 0, 0], [0, 0, 0])}), plain)
    mixed = policy.act({**observation, **plan([0, 4, 0], [0, 8, 0])})
    np.testing.assert_allclose(mixed[::2], plain[::2], atol=1e-4)
    assert np.abs(mixed[1] - plain[1]).max() > 1


def test_a_chunk_begins_with_what_will_have_been_executed_and_stays_near_the_plan(policy) -> None:
    observation, going_on = seen(), plan([0, 3, 8], [8, 6, 8])
    plain, chunk = policy.act(observation), policy.act({**observation, **going_on})
    np.testing.assert_allclose(chunk[1, :3], going_on[PREFIX_ACTIONS][1, :3], atol=1e-4)
    np.testing.assert_allclose(chunk[2], going_on[PREFIX_ACTIONS][2], atol=1e-4)
    away, before = (np.abs(answer - going_on[PREFIX_ACTIONS])[0, :3, ::2].mean() for answer in (chunk, plain))
    assert away < before


def test_every_delay_runs_in_one_program(policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.compile(3)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jaxmodels.program.Programs, "_compile", refuse)
    for delay in range(CHUNK):
        assert np.isfinite(policy.act({**seen(), **plan([delay] * 3, [CHUNK] * 3)})).all()


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_bfloat16_is_near(solver: str) -> None:
    made = checkpoint(dataclasses.replace(CONFIG, flow_solver=solver))
    wanted, found = (jaxmodels.Policy(made, dtype=dtype).act(seen()) for dtype in ("float32", "bfloat16"))
    assert found.dtype == np.float32
    assert not np.array_equal(found, wanted)
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()


def test_cameras_are_looked_at_and_a_diffusion_continues_a_plan_too() -> None:
    cameras = tuple(Feature(f"observation.images.{name}", "VISUAL", (3, 32, 32)) for name in ("front", "wrist"))
    config = dataclasses.replace(CONFIG, input_features=cameras, objective="diffusion", prefix_through_model=False)
    policy = jaxmodels.Policy(checkpoint(config))
    pictures = np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32, 3), np.uint8)
    front, wrist = (feature.name for feature in cameras)
    going_on = plan([2], [6])
    answer = policy.act({front: pictures[0], wrist: pictures[1], **going_on})
    np.testing.assert_allclose(answer[0, :2], going_on[PREFIX_ACTIONS][0, :2], atol=1e-4)
    assert np.isfinite(answer).all()
    assert np.abs(policy.act({front: pictures[1], wrist: pictures[0], **going_on}) - answer).max() > 1e-3


def test_a_policy_with_cameras_does_as_it_is_told_and_says_the_same_once_saved(tmp_path: Path) -> None:
    camera = Feature("observation.images.front", "VISUAL", (3, 32, 32))
    text = dataclasses.replace(TextConfig.small(), length=24, width=8, n_heads=2, n_layers=1, hidden=16)
    config = dataclasses.replace(
        CONFIG, input_features=(*CONFIG.input_features, camera), text_encoder=text, n_encoder_layers=1
    )
    policy = jaxmodels.Policy(checkpoint(config))
    assert policy.requirements.language
    pictures = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    observation = {**seen(1), camera.name: pictures, **plan([0], [0])}
    red, blue = (
        policy.act({**observation, "task": np.array([f"lift the {colour} cube"])}) for colour in ("red", "blue")
    )
    assert np.abs(red - blue).max() > 1e-3
    both = {name: np.repeat(array, 2, axis=0) for name, array in observation.items()}
    together = policy.act({**both, "task": np.array(["lift the blue cube", "lift the red cube"])})
    np.testing.assert_allclose(together, np.concatenate((blue, red)), atol=1e-3)  # of 100
    policy.save(tmp_path / "policy")
    again = jaxmodels.load_policy(tmp_path / "policy", like=policy)
    np.testing.assert_array_equal(again.act({**observation, "task": np.array(["lift the red cube"])}), red)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({PREFIX_DELAY: None}, "prefix.delay missing beside prefix.actions, prefix.length"),
        ({PREFIX_LENGTH: np.array([9], np.int32)}, "prefix.length is 9; wanted 0 to 8, the actions of a chunk"),
        ({PREFIX_DELAY: np.array([-1], np.int32)}, "prefix.delay is -1; wanted 0 to 8"),
        ({PREFIX_DELAY: np.array([7], np.int32)}, "prefix.delay is 7 for member 0, and prefix.length 6"),
        ({PREFIX_DELAY: np.array([2.0])}, "prefix.delay is float64; wanted int32"),
        ({PREFIX_DELAY: np.array([1, 2])}, r"prefix.delay has shape \(2,\); wanted \(1,\)"),
        ({PREFIX_ACTIONS: np.zeros((1, 7, 3), np.float32)}, r"shape \(1, 7, 3\); wanted \(1, 8, 3\), filled up"),
        ({PREFIX_ACTIONS: np.zeros((1, 8, 3), np.int32)}, "prefix.actions is int32; wanted float32"),
        ({PREFIX_ACTIONS: np.full((1, 8, 3), np.nan, np.float32)}, r"prefix.actions holds nan at \[0, 0, 0\]"),
    ],
)
def test_a_plan_that_makes_no_sense_says_why(policy, change: dict[str, Any], words: str) -> None:
    observation = {**seen(1), **plan([2], [6]), **change}
    with pytest.raises(ObservationError, match=words):
        policy.act({name: array for name, array in observation.items() if array is not None})


def test_a_policy_that_continues_no_plan_refuses_one(small_of, checkpoint_for, observation_of) -> None:
    config = small_of(cameras=("front",))
    policy = jaxmodels.Policy(checkpoint_for(config))
    assert not policy.requirements.takes_prefix
    with pytest.raises(ObservationError, match=r"prefix\.length in the observation of a policy"):
        policy.act({**observation_of(config), **plan([2], [6])})


def test_all_complaints_about_a_config_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(CONFIG, n_action_steps=9, objective="score", optimizer_eps=0.0, input_features=())
    for words in ("n_action_steps is 9", "objective is 'score'", "optimizer_eps is 0.0", "nothing to look at"):
        assert words in str(caught.value)


def test_a_config_is_read_as_it_was_written() -> None:
    config = dataclasses.replace(
        CONFIG, text_encoder=TextConfig.small(), optimizer_betas=(0.8, 0.9), trained_prefix=3, scheduler_name="constant"
    )
    written = json.loads(json.dumps(config.to_json()))
    assert Diffusion2dConfig.from_json(written) == config
    with pytest.raises(ConfigError, match="diffusion2d config: unknown fields colour"):
        Diffusion2dConfig.from_json({**written, "colour": "red"})


def test_how_a_policy_was_trained_makes_no_other_program() -> None:
    other = dataclasses.replace(
        CONFIG, optimizer_lr=1.0, scheduler_name="constant", dropout=0.2, n_action_steps=2, device="cpu"
    )
    assert other.architecture() == CONFIG.architecture()
    assert dataclasses.replace(CONFIG, trained_prefix=2).architecture() != CONFIG.architecture()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_action_steps": 9}, "n_action_steps is 9, more than chunk_size 8"),
        ({"dim_model": 20}, "dim_model 20 is not a multiple of 4 n_heads"),
        ({"objective": "score"}, "objective is 'score'; known: flow, diffusion"),
        ({"input_features": ()}, "nothing to look at"),
        ({"prefix_bound": 0.0}, "prefix_bound is 0.0"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0; wanted an integer of 1 or more, at most 1000"),
        ({"num_train_timesteps": True}, "num_train_timesteps is True; wanted an integer of 1 or more"),
        ({"n_encoder_layers": -1}, "n_encoder_layers is -1; wanted an integer of 0 or more"),
        ({"prediction_type": "noise"}, "prediction_type is 'noise'; known: epsilon, sample, v_prediction"),
        ({"timestep_sampling_strategy": "normal"}, "known: uniform, beta"),
        ({"trained_prefix": 8}, "trained_prefix is 8; wanted 0 \\(none\\) to 7"),
        ({"trained_prefix": 2, "objective": "diffusion"}, "trained_prefix is for objective 'flow'"),
        (
            {"objective": "diffusion", "normalization_mapping": (("ACTION", "MEAN_STD"),)},
            r"epsilon wants actions in \[-1, 1\]",
        ),
        ({"optimizer_lr": 0.0}, "optimizer_lr is 0.0; wanted a number above 0"),
        ({"optimizer_betas": (0.9, 1.0)}, "optimizer_betas is .*; wanted two numbers of 0 or more, below 1"),
        ({"scheduler_name": "linear"}, "scheduler_name is 'linear'; known: constant, cosine"),
    ],
)
def test_a_config_that_makes_no_sense_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(CONFIG, **changes)
