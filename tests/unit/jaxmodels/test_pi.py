"""pi0 and pi0.5: configs, prompts, weights, memory, and dependencies of a chunk."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmodels.errors import ConfigError, ObservationError, WeightsMismatch
from jaxmodels.policies import get_policy_type, lerobot_folder
from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import fit_into_square
from jaxmodels.policies.pi05.policy import Pi05Config
from jaxmodels.types import Language, Observation, Prefix
from jaxmodels.weights import blueprint_of

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("pi0", "pi05")
TINY_GEMMA = {"depth": 2, "mlp_dim": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
TINY = {
    "gemma_2b": {"width": 10, **TINY_GEMMA},
    "gemma_300m": {"width": 8, **TINY_GEMMA},
    "vocab_size": 30,
    "vision": {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"patch_size": 14},
}


def read_file(name: str, file: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"lerobot_{name.partition('_')[0]}" / name / file).read_text())


def read(name: str = "pi0_two_cameras", **changes: Any) -> Pi0Config:
    values = {**read_file(name, "config.json"), "architecture": read_file(name, "architecture.json"), **changes}
    return get_policy_type(values["type"]).config(values)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"n_obs_steps": 2}, "n_obs_steps is 2; pi0 reads 1 observation"),
        ({"n_action_steps": 11}, "n_action_steps is 11, more than chunk_size 10"),
        ({"paligemma_variant": "gemma_7b"}, "paligemma_variant is 'gemma_7b'; known: gemma_300m, gemma_2b"),
        ({"dtype": "float16"}, "dtype is 'float16'; known: bfloat16, float32"),
        ({"image_resolution": [56, 70]}, r"image_resolution is \[56, 70\]; PaliGemma reads squares"),
        ({"image_resolution": [13, 13]}, "wanted 14 or more, a patch"),
        ({"max_state_dim": 5}, "the state has 6 numbers; max_state_dim is 5, to which it is padded"),
        ({"max_action_dim": 5}, "the action has 6 numbers; max_action_dim is 5"),
        ({"min_period": 4.0}, "min_period is 4.0; wanted less than max_period 4.0"),
        ({"use_peft": True}, "merge the adapter"),
        ({"input_features": {"observation.state": {"type": "STATE", "shape": [6]}}}, "has no image; pi0 reads one"),
        ({"relative_exclude_joints": "gripper"}, "relative_exclude_joints is 'gripper'; wanted a list of strings"),
        ({"rtc_config": [1]}, r"rtc_config is \[1\]; wanted an object"),
        ({"sizes": {}}, "unknown fields sizes; they belong to architecture.json"),
        ({"lerobot": "0.3"}, "lerobot is '0.3'; known: 0.4, 0.6"),
        ({"architecture": {"gemma_7b": {}}}, "architecture.json: unknown fields gemma_7b; known: gemma_2b"),
        ({"architecture": {"vision": 5}}, "architecture.json: vision is 5; wanted an object of sizes"),
        ({"architecture": {"gemma_2b": {"width": 64}}}, "architecture.json: gemma_2b: lacks depth, head_dim"),
        ({"architecture": TINY | {"vocab_size": 0}}, "vocab_size is 0; wanted an integer of 1 or more"),
        ({"architecture": TINY | {"gemma_2b": {"width": 10, **TINY_GEMMA, "head_dim": 5}}}, "wanted an even number"),
        ({"architecture": TINY | {"gemma_2b": {"width": 10, **TINY_GEMMA, "depth": 3}}}, "depth of gemma_2b is 3 and"),
        ({"architecture": TINY | {"vision": {"hidden_size": 9}}}, "not a multiple of num_attention_heads 16"),
    ],
)
def test_invalid_config_is_refused_with_accepted_values(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read(**changes)


def test_tied_embeddings_and_names_without_a_root_are_read(golden_folder, tmp_path: Path) -> None:
    golden = golden_folder("pi05_relative_actions")
    folder = tmp_path / "policy"
    shutil.copytree(golden, folder)
    stored, (embedding,) = load_file(golden / "model.safetensors"), get_policy_type("pi05").tied
    head = get_policy_type("pi05").tied[embedding]
    tied = {name.removeprefix("model."): array for name, array in stored.items() if name != embedding}
    save_file(tied, folder / "model.safetensors")
    weights = lerobot_folder.read_checkpoint(folder).weights
    np.testing.assert_array_equal(weights["paligemma.embedding"], stored[head])
    np.testing.assert_array_equal(weights["action_in.kernel"], stored["model.action_in_proj.weight"].T)
    save_file({**tied, "model.action_in_proj.bias": tied["action_in_proj.bias"]}, folder / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"action_in_proj\.bias has two names in the file; remove one"):
        lerobot_folder.read_checkpoint(folder)
    other = np.zeros((7, 8), np.float32)
    save_file({**tied, "paligemma_with_expert.gemma_expert.lm_head.weight": other}, folder / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"gemma_expert.lm_head.weight: found \[7, 8\], wanted \[420, 32\]"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize(("lerobot", "darkest"), [("0.6", -1), ("0.4", -3)])
def test_images_are_padded_like_in_each_lerobot_version(lerobot: str, darkest: int) -> None:
    image = jnp.full((1, 28, 56, 3), 0.75)
    square = fit_into_square(read(lerobot=lerobot), image)[0]
    assert square.shape == (56, 56, 3)
    assert [float(square[row, 9, 0]) for row in (0, 13, 14, 41, 42, 55)] == [darkest] * 2 + [0.5] * 2 + [darkest] * 2


@pytest.mark.parametrize(("kind", "parameters"), [("pi0", 3_238_046_480), ("pi05", 3_353_431_824)])
def test_policies_of_full_size_have_their_published_parameters(kind: str, parameters: int) -> None:
    values = read_file(f"{kind}_two_cameras", "config.json") | {"image_resolution": [224, 224]}
    policy_type = get_policy_type(kind)
    assert blueprint_of(policy_type.model, policy_type.config(values)).count_parameters() == parameters


def test_prompt_of_pi0_ends_with_a_newline() -> None:
    assert [read().format_prompt(task) for task in ("push", "push\n")] == ["push\n"] * 2


@pytest.mark.parametrize(("lerobot", "padding"), [("0.6", ""), ("0.4", " 128" * 26)])
def test_prompt_of_pi05_includes_the_normalised_state(lerobot: str, padding: str) -> None:
    config = read("pi05_two_cameras", lerobot=lerobot)
    assert isinstance(config, Pi05Config)
    state = np.array([-1.01, -1, 0, 127 / 128, 5, -0.5], np.float32)
    expected = f"Task: push the block, State: -1 0 128 255 255 64{padding};\nAction: "
    assert config.format_prompt(" push_the\nblock ", state) == expected


@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        ({}, (True,) * 6 + (False,)),
        ({"relative_exclude_joints": []}, (True,) * 7),
        ({"relative_exclude_joints": ["J1", "j7", ""]}, (False, *(True,) * 6)),
        ({"action_feature_names": None}, (True,) * 7),
        ({"action_feature_names": ["gripper"]}, (False, *(True,) * 6)),
        ({"use_relative_actions": False}, None),
    ],
)
def test_actions_are_relative_except_for_excluded_names(changes: dict[str, Any], mask: Any) -> None:
    assert read("pi05_relative_actions", **changes).relative_action_mask == mask


def test_relative_actions_need_a_state_of_equal_length() -> None:
    short = read_file("pi05_relative_actions", "config.json")["input_features"]
    short["observation.state"]["shape"] = [6]
    with pytest.raises(ConfigError, match="the state has 6 numbers for 7 of an action"):
        read("pi05_relative_actions", input_features=short)


@lru_cache
def tiny(kind: str, **more: Any) -> Any:
    """Return `act` of a policy that compiles quickly."""
    config, policy, weights = tiny_parts(kind, **more)
    return jax.jit(lambda observation: policy.act(config, weights, observation))


@lru_cache
def tiny_parts(kind: str, **more: Any) -> Any:
    """Return config, type and weights of a policy that compiles quickly."""
    changes = {"architecture": TINY, "image_resolution": [28, 28], "chunk_size": 4, "n_action_steps": 4}
    changes |= {"num_inference_steps": 2, "tokenizer_max_length": 5, "max_action_dim": 8, **more}
    config, policy = read(f"{kind}_two_cameras", **changes), get_policy_type(kind)
    shapes = blueprint_of(policy.model, config).shapes
    random = np.random.default_rng(0)
    weights = {name: np.float32(random.normal(size=entry.shape, scale=0.4)) for name, entry in shapes.items()}
    weights = jax.device_put(weights)
    weights["action_out.kernel"] /= 8  # Two steps can follow this flow.
    return config, policy, weights


def observe(**changes: Any) -> Observation:
    random = np.random.default_rng(3)
    images = tuple(random.random((2, *size, 3), np.float32) for size in ((20, 28), (28, 28)))
    state = random.normal(size=(2, 6)).astype(np.float32)
    language = Language(np.arange(10, dtype=np.int32).reshape(2, 5), np.arange(5) < np.array([[3], [5]]))
    plan = Prefix(random.normal(size=(2, 4, 6)).astype(np.float32), *np.zeros((2, 2), np.int32))
    masks = np.ones((2, 2), bool)
    return Observation(images, state, language=language, prefix=plan, image_masks=masks)._replace(**changes)


@pytest.mark.parametrize("kind", KINDS)
def test_chunk_depends_on_all_unmasked_inputs(kind: str) -> None:
    act = tiny(kind)
    seen = observe()
    chunk = np.asarray(act(seen))
    assert chunk.shape == (2, 4, 6)
    assert np.isfinite(chunk).all()

    def differs(**changes: Any) -> list[bool]:
        return (np.abs(np.asarray(act(seen._replace(**changes))) - chunk).max(axis=(1, 2)) > 1e-5).tolist()

    language: Any = seen.language
    behind = language._replace(tokens=language.tokens + np.array([[0, 0, 0, 7, 7]], np.int32))
    assert differs(language=behind) == [False, True]
    assert differs(language=language._replace(tokens=language.tokens + np.int32(1))) == [True, True]
    masks = np.array([[True, False], [True, True]])
    assert differs(image_masks=masks) == [True, False]
    masked = seen._replace(image_masks=masks)
    hidden = (seen.images[0], np.where(masks[:, 1][:, None, None, None], seen.images[1], np.float32(0)))
    np.testing.assert_array_equal(act(masked), act(masked._replace(images=hidden)))
    assert differs(state=-seen.state) == [kind == "pi0"] * 2  # pi0.5 reads the state in its prompt.
    assert differs(images=(1 - seen.images[0], seen.images[1])) == [True, True]


def test_absent_camera_equals_a_masked_camera() -> None:
    act = tiny("pi0")
    seen = observe()
    masked = act(seen._replace(image_masks=np.array([[True, False]] * 2)))
    absent = act(seen._replace(images=(seen.images[0], None)))
    np.testing.assert_allclose(absent, masked, atol=2e-5)
    with pytest.raises(ObservationError, match="all 2 cameras are absent"):
        act(seen._replace(images=(None, None)))


@pytest.mark.parametrize("kind", KINDS)
def test_plan_is_continued_without_guiding_padded_actions(kind: str) -> None:
    act = tiny(kind)
    seen = observe()
    plan: Any = seen.prefix
    plain = np.asarray(act(seen))
    none = np.asarray(act(seen._replace(prefix=None)))
    np.testing.assert_allclose(plain, none, atol=2e-5)
    delay, length = np.array([0, 2], np.int32), np.array([0, 4], np.int32)
    continued = np.asarray(act(seen._replace(prefix=plan._replace(delay=delay, length=length))))
    np.testing.assert_allclose(continued[0], plain[0], atol=2e-5)
    np.testing.assert_array_equal(continued[1, :2], plan.actions[1, :2])
    assert np.abs(continued[1, 2:] - plan.actions[1, 2:]).mean() < np.abs(plain[1, 2:] - plan.actions[1, 2:]).mean()


def test_pi05_trained_with_delays_begins_with_the_plan() -> None:
    act = tiny("pi05", rtc_training_max_delay=2)
    config, policy, weights = tiny_parts("pi05", rtc_training_max_delay=2)
    seen = observe()
    plan: Any = seen.prefix
    delay, length = np.array([3, 1], np.int32), np.array([4, 4], np.int32)
    chunk = np.asarray(act(seen._replace(prefix=plan._replace(delay=delay, length=length))))

    def lerobot(observation: Observation) -> jax.Array:
        """Insert the prefix before and after each step, with a time for each action, as in LeRobot's PR 4056."""
        model = blueprint_of(policy.model, config).assemble(weights)
        images = tuple(policy.fit(config, pixels) for pixels in observation.images)
        cache = model.encode(observation, model.embed_images(observation._replace(images=images)))
        noise = jax.random.normal(jax.random.key(0), (4, 8), jnp.float32)
        clean = jnp.pad(plan.actions, ((0, 0), (0, 0), (0, 2)))
        is_clean = (np.arange(4) < np.minimum(delay, 2)[:, None])[..., None]
        x = jnp.where(is_clean, clean, jnp.broadcast_to(noise, (2, 4, 8)))
        for time in (1.0, 0.5):
            rows = [model.prepare_steps(np.where(row[:, 0], 0, time)) for row in is_clean]
            x = x - model.denoise(cache, None, x, jax.tree.map(lambda *each: jnp.stack(each), *rows)) / 2
            x = jnp.where(is_clean, clean, x)
        return x[..., :6]

    expected = np.array(jax.jit(lerobot)(seen))
    expected[0, 2] = plan.actions[0, 2]  # Executed as well, beyond the trained delay.
    np.testing.assert_allclose(chunk, expected, atol=2e-5)
    unplanned = act(seen._replace(prefix=plan._replace(length=np.zeros(2, np.int32))))
    np.testing.assert_allclose(unplanned, tiny("pi05")(seen._replace(prefix=None)), atol=2e-5)
    with pytest.raises(ConfigError, match="rtc_training_max_delay is 4; wanted less than chunk_size 4"):
        tiny_parts("pi05", rtc_training_max_delay=4)
    assert "rtc_training_max_delay" not in read("pi05_two_cameras").to_json()


# Fields of pi0.5 after LeRobot 0.6.1 in a policy without memory.
NEWER = {"use_visual_memory": False, "use_proprioceptive_memory": False, "memory_frames": 6, "memory_stride": 30}
NEWER |= {"memory_temporal_attention_every": 4, "rtc_training_max_delay": 0}


def test_pi05_loads_newer_fields_that_are_off() -> None:
    config, before = read("pi05_two_cameras", **NEWER), read("pi05_two_cameras")
    assert config == before
    assert config.to_json() == before.to_json()  # LeRobot 0.6.1 reads the file.
    changed = read("pi05_two_cameras", **{**NEWER, "memory_frames": 8})
    assert changed.to_json() == {**before.to_json(), "memory_frames": 8}
    assert changed.architecture() == before.architecture()


@pytest.mark.parametrize("name", ["use_visual_memory", "use_proprioceptive_memory"])
def test_pi05_refuses_memory_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is true; .* run the policy with LeRobot"):
        read("pi05_two_cameras", **{**NEWER, name: True})
    with pytest.raises(ConfigError, match=f"unknown fields {name} = True; this reads the fields of LeRobot 0.6.1"):
        read("pi0_two_cameras", **{name: True})
