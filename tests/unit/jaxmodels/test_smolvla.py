"""LeRobot's SmolVLA: its config, memory, tensors, cameras, and continued plans."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.policies.smolvla.model import read_aloha_actions, read_aloha_state, write_aloha_actions
from jaxmodels.policies.smolvla.policy import POLICY
from jaxmodels.types import Language, Observation, Prefix
from jaxmodels.weights import blueprint_of

GOLDEN = Path(__file__).parents[2] / "golden" / "lerobot_smolvla"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
TOKENS = {"<fake_token_around_image>": 4, "<global-img>": 6}


def fields(name: str = "smolvla_two_cameras", **changes: Any) -> dict[str, Any]:
    config, vlm = (json.loads((GOLDEN / name / file).read_text()) for file in ("config.json", "vlm/config.json"))
    return config | {"vlm": vlm, "vlm_tokens": TOKENS} | changes


def read(name: str = "smolvla_two_cameras", **changes: Any) -> SmolVlaConfig:
    return SmolVlaConfig.from_json(fields(name, **changes))


def vlm(part: str | None = None, **changes: Any) -> dict[str, Any]:
    whole = fields()["vlm"]
    return whole | (changes if part is None else {part: whole[part] | changes})


def features(**shapes: tuple[str, list[int]]) -> dict[str, Any]:
    return {f"observation.{name}": {"type": kind, "shape": shape} for name, (kind, shape) in shapes.items()}


@pytest.mark.parametrize("name", NAMES)
def test_config_survives_a_round_trip(name: str) -> None:
    config = read(name, rtc_config={"enabled": True, "max_guidance_weight": 7.5})
    written = json.loads(json.dumps(config.to_json()))
    vlm = config.dump_architecture()["vlm/config.json"]
    assert SmolVlaConfig.from_json(written | {"vlm": vlm, "vlm_tokens": TOKENS}) == config
    assert config.prefix_bound == 7.5
    other = read(name, rtc_config=written["rtc_config"], device="mps")
    assert hash(config.architecture()) == hash(other.architecture())


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"n_obs_steps": 2}, "n_obs_steps is 2; smolvla reads 1 observation"),
        ({"n_action_steps": 11}, "n_action_steps is 11, more than chunk_size 10"),
        ({"attention_mode": "cross"}, "attention_mode is 'cross'; known: cross_attn, self_attn"),
        ({"pad_language_to": "shortest"}, "pad_language_to is 'shortest'; known: longest, max_length"),
        ({"min_period": 4.0}, "min_period is 4.0; wanted less than max_period 4.0"),
        ({"use_delta_joint_actions_aloha": True}, "which LeRobot does not support either"),
        ({"use_cache": False}, "use_cache is false"),
        ({"use_peft": True}, "merge the adapter"),
        ({"num_expert_layers": 3}, "num_expert_layers is 3; wanted a divisor of 4"),
        ({"num_expert_layers": 2}, "keys made for the language model's"),
        ({"num_expert_layers": 2, "attention_mode": "self_attn"}, r"layers \[1, 3\] of the language model are to"),
        ({"expert_width_multiplier": 0.4}, "makes the action expert 19 wide"),
        ({"resize_imgs_with_padding": [64, 32]}, "images of 32x64 are 4 x 8 patches"),
        ({"resize_imgs_with_padding": [72, 72]}, "images of 72x72 are 9 x 9 patches"),
        ({"resize_imgs_with_padding": None}, "images of 48x72 are 6 x 9 patches"),
        ({"resize_imgs_with_padding": 64}, "resize_imgs_with_padding is 64; wanted two integers"),
        ({"max_state_dim": 5}, "the state has 6 numbers; max_state_dim is 5"),
        ({"max_action_dim": 5}, "the action has 6 numbers; max_action_dim is 5"),
        ({"adapt_to_pi_aloha": True}, "the state has 6 numbers; wanted 14 or more"),
        ({"input_features": features(state=("STATE", [6]))}, "input_features has no image"),
        ({"input_features": features(image=("VISUAL", [3, 64, 64]))}, "has no 'observation.state'"),
        ({"add_image_special_tokens": True, "vlm_tokens": {}}, "copy the model's tokenizer.json to vlm/tokenizer.json"),
        ({"add_image_special_tokens": True, "vlm_tokens": TOKENS | {"<global-img>": 352}}, "has a token 352"),
        ({"rtc_config": 3}, "rtc_config is 3; wanted an object"),
        ({"rtc_config": {"max_guidance_weight": -1}}, "max_guidance_weight is -1; wanted a number above 0"),
        ({"vlm": None, "vlm_model_name": "a/b"}, "known: HuggingFaceTB/.*; .*|Copy the model's config.json to a/b/"),
        ({"vlm": []}, r"config.json of the vision-language model is \[\]; wanted an object"),
        ({"vlm": {}}, "has no text_config and vision_config; wanted the config of a SmolVLM"),
        ({"vlm": vlm(model_type="llava")}, "model_type is 'llava'; wanted smolvlm or idefics3"),
        ({"vlm": vlm(scale_factor=0)}, "scale_factor is 0"),
        ({"vlm": vlm("text_config", hidden_act="gelu")}, "text_config.hidden_act is 'gelu'; wanted silu"),
        ({"vlm": vlm("text_config", hidden_size="48")}, "text_config.hidden_size is '48'; wanted an integer"),
        ({"vlm": vlm("text_config", num_key_value_heads=2)}, "3 heads are not a multiple of 2 heads of keys"),
        ({"vlm": vlm("text_config", head_dim=15)}, "head_dim is 15; wanted an even number"),
        ({"vlm": vlm("vision_config", hidden_size=33)}, "hidden_size 33 is not a multiple of 2 heads"),
        ({"vlm": vlm("vision_config", image_size=4)}, "image_size is 4, less than one patch"),
    ],
)
def test_invalid_config_is_refused_with_accepted_values(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read(**changes)


def test_common_base_model_is_found_by_name() -> None:
    values = fields() | {"vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"}
    values |= {"resize_imgs_with_padding": [512, 512], "num_vlm_layers": 16}
    del values["vlm"], values["vlm_tokens"]
    config = SmolVlaConfig.from_json(values)
    assert (config.vocabulary, config.vlm_layers, config.expert.width, config.expert.hidden) == (49_280, 16, 720, 2048)
    assert config.vlm.count_image_tokens(512, 512) == 64
    assert config.dump_architecture() == {}
    # 450 million without the head (47 million) and the unused part of the last layer.
    assert blueprint_of(POLICY.model, config).count_parameters() == pytest.approx(395e6, rel=0.01)


def test_prompt_ends_with_one_newline() -> None:
    config = read()
    assert config.format_prompt("push the block") == config.format_prompt("push the block\n") == "push the block\n"
    assert (config.prompt_length, config.vocabulary, config.noise) == (48, 352, (10, 32))


SMALL: dict[str, Any] = {
    "input_features": features(state=("STATE", [6]))
    | {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 8, 8]} for name in ("front", "wrist")},
    "resize_imgs_with_padding": [8, 8],
    "num_vlm_layers": 2,
    "chunk_size": 4,
    "n_action_steps": 4,
    "num_steps": 2,
    "max_state_dim": 8,
    "max_action_dim": 9,
    "expert_width_multiplier": 1.0,
    "vlm": vlm("vision_config", image_size=8, patch_size=4, num_hidden_layers=1)
    | {"text_config": fields()["vlm"]["text_config"] | {"hidden_size": 16, "head_dim": 8}},
}


@lru_cache
def small() -> tuple[SmolVlaConfig, dict[str, jax.Array]]:
    """Return a policy of two layers with random weights."""
    config, rng = read(**SMALL), np.random.default_rng(1)
    weights = {}
    for name, shape in blueprint_of(POLICY.model, config).shapes.items():
        x = rng.normal(size=shape.shape)
        x = x / np.sqrt(np.prod(shape.shape[:-1])) if x.ndim > 1 else 0.1 * x + name.endswith("scale")
        weights[name] = np.float32(x)
    weights["action_out.kernel"] /= 8  # Two steps can follow this flow.
    return config, jax.device_put(weights)


def observation(batch: int = 3) -> Observation:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    ids = jnp.asarray(rng.integers(0, 352, (batch, 5)), jnp.int32)
    mask = jnp.arange(5)[None] < jnp.asarray([2, 5, 3])[:batch, None]
    images = tuple(jnp.asarray(rng.random((batch, 8, 8, 3)), jnp.float32) for _ in range(2))
    return Observation(images, normal(batch, 6), language=Language(ids, mask), noise=normal(batch, 4, 9))


@lru_cache
def compiled() -> Any:
    config, weights = small()
    act = jax.jit(lambda weights, observation: POLICY.act(config, weights, observation))
    return lambda observation: np.asarray(act(weights, observation))


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() < 1e-5 * np.abs(expected).max())


def test_members_of_a_batch_are_independent_of_others_and_padding() -> None:
    act, seen = compiled(), observation()
    chunk = act(seen)
    assert chunk.shape == (3, 4, 6)
    assert seen.language is not None
    tokens = jnp.where(seen.language.mask, seen.language.tokens, 7)
    order = jnp.asarray([2, 0, 1])
    other = jax.tree.map(lambda x: x[order], seen._replace(language=seen.language._replace(tokens=tokens)))
    assert close(act(other), chunk[np.asarray(order)])
    for changes in ({"noise": seen.noise.at[..., 6:].add(1)}, {"state": seen.state + 1}, {"images": seen.images[::-1]}):
        assert not close(act(seen._replace(**changes)), chunk)


def test_absent_camera_equals_a_masked_camera() -> None:
    act, seen = compiled(), observation()
    masks = jnp.asarray([[True, True], [True, False], [True, False]])
    masked = act(seen._replace(image_masks=masks))
    alone = act(seen._replace(images=(seen.images[0], None)))
    assert close(masked[1:], alone[1:])
    assert close(masked[:1], act(seen)[:1])
    assert not close(masked[1:], act(seen)[1:])


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"images": (None, None)}, "has no image"),
        ({"language": None}, "has no language"),
        ({"images": (jnp.zeros((3, 12, 8, 3)), None)}, r"12x8, .* of its config, \[\(8, 8\), \(8, 8\)\]"),
    ],
)
def test_incomplete_or_missized_observations_are_refused(changes, wrong: str) -> None:
    config = read(**SMALL | {"resize_imgs_with_padding": None})
    with pytest.raises(InputError, match=wrong):
        jax.eval_shape(lambda: POLICY.act(config, small()[1], observation()._replace(**changes)))


def test_plan_is_continued_and_chunks_without_one_are_unchanged() -> None:
    act, seen = compiled(), observation()
    chunk = act(seen)
    plan = jnp.asarray(chunk) + jnp.linspace(0.5, 1, 6)
    prefix = Prefix(plan, jnp.full(3, 2, jnp.int32), jnp.zeros(3, jnp.int32))
    assert close(act(seen._replace(prefix=prefix)), chunk)
    guided = act(seen._replace(prefix=prefix._replace(length=jnp.asarray([4, 0, 4], jnp.int32))))
    assert close(guided[1:2], chunk[1:2])
    np.testing.assert_array_equal(guided[::2, :2], np.asarray(plan)[::2, :2])
    nearer, before = (np.abs(x - np.asarray(plan))[::2, 2:].mean() for x in (guided, chunk))
    assert nearer < before


def test_half_precision_is_close() -> None:
    config, weights = small()
    half = {name: array.astype(jnp.bfloat16) for name, array in weights.items()}
    found = jax.jit(lambda weights, observation: POLICY.act(config, weights, observation))(half, observation())
    assert found.dtype == jnp.float32
    expected = compiled()(observation())
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


def test_joints_and_grippers_of_aloha_are_mapped_both_ways() -> None:
    actions = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    seen = read_aloha_actions(actions)
    np.testing.assert_allclose(write_aloha_actions(seen), actions, rtol=1e-5, atol=1e-6)
    assert np.flatnonzero(np.abs(seen - actions).max((0, 1)) > 1e-6).tolist() == [1, 2, 6, 8, 9, 13]
    # Values of LeRobot's own functions: a gripper that is 30 % open, and an action of 0.3.
    assert float(read_aloha_state(jnp.full((1, 14), 0.3))[0, 6]) == pytest.approx(-0.2909, abs=1e-4)
    assert float(read_aloha_actions(jnp.full((1, 1, 14), 0.3))[0, 0, 6]) == pytest.approx(0.6397, abs=1e-4)
