"""Checkpoints of openpi: trees, statistics and transforms of robots, compared with openpi's arithmetic."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import CheckpointError, ConfigError, JaxModelsError
from jaxmodels.layers.images import resize_as_pillow
from jaxmodels.policies import get_policy_type, lerobot_folder
from jaxmodels.policies.openpi_configs import CONFIGS, read_openpi_config
from jaxmodels.policies.pi0.config import AlohaJoints
from jaxmodels.policies.pi0.openpi import merge_update
from jaxmodels.text import PromptTokenizer
from jaxmodels.types import Language, Observation
from jaxmodels.weights import blueprint_of
from tests.unit.jaxmodels.test_pi import GOLDEN, TINY, TINY_GEMMA

TOKENIZER = GOLDEN / "lerobot_pi0" / "pi0_two_cameras" / "google" / "paligemma-3b-pt-224" / "tokenizer.json"
SIZES = TINY | {"vocab_size": 420}
SMALL = {"action_dim": 16, "image_size": 28, "action_horizon": 4, "max_token_len": 60}
DROID = {"config": "pi05_droid", **SMALL}


def list_arrays(kind: str, weights: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """Return the arrays of an openpi tree, with separate axes for layers and heads."""
    layers = range(TINY_GEMMA["depth"])
    tree: dict[str, np.ndarray] = {}

    def stack(names: Any) -> np.ndarray:
        return np.stack([weights[name] for name in names])

    for ours, end, sizes in (("paligemma", "", config.vlm), ("expert", "_1", config.expert)):
        width, heads, head = sizes.width, sizes.num_heads, sizes.head_dim

        def of(part: str, ours: str = ours) -> np.ndarray:
            array = stack(f"{ours}.layers.{i}.{part}" for i in layers)
            return array.swapaxes(1, 2) if part.endswith("weight") else array

        place = "PaliGemma/llm/layers"
        query = of("attention.query.weight").reshape(-1, width, heads, head)
        keys = np.stack([of(f"attention.{which}.weight") for which in ("key", "value")], axis=1)
        tree[f"{place}/attn/q_einsum{end}/w"] = query.swapaxes(1, 2)
        tree[f"{place}/attn/kv_einsum{end}/w"] = keys[:, :, None]
        tree[f"{place}/attn/attn_vec_einsum{end}/w"] = of("attention.out.weight").reshape(-1, heads, head, width)
        gates = [of(f"feed_forward.{which}.weight") for which in ("gate", "up")]
        tree[f"{place}/mlp{end}/gating_einsum"] = np.stack(gates, axis=1)
        tree[f"{place}/mlp{end}/linear"] = of("feed_forward.down.weight")
        for norm, name in (("attention_norm", "pre_attention_norm"), ("feed_forward_norm", "pre_ffw_norm")):
            if kind == "pi05" and end:
                tree[f"{place}/{name}_1/Dense_0/kernel"] = of(f"{norm}.dense.kernel")
                tree[f"{place}/{name}_1/Dense_0/bias"] = of(f"{norm}.dense.bias")
            else:
                tree[f"{place}/{name}{end}/scale"] = of(f"{norm}.scale")
    for leaf in ("Dense_0/kernel", "Dense_0/bias") if kind == "pi05" else ("scale",):
        tree[f"PaliGemma/llm/final_norm_1/{leaf}"] = weights[f"expert.norm.{leaf.replace('Dense_0/', 'dense.')}"]
    tree["PaliGemma/llm/final_norm/scale"] = np.zeros(config.vlm.width, np.float32)
    tree["PaliGemma/llm/embedder/input_embedding"] = weights["paligemma.embedding"]
    vision, image = "paligemma.vision", "PaliGemma/img"
    block, first = f"{image}/Transformer/encoderblock", f"{vision}.layers.0"
    for leaf in ("kernel", "bias"):
        tree[f"{image}/embedding/{leaf}"] = weights[f"{vision}.{leaf}"]
        tree[f"{image}/head/{leaf}"] = weights[f"paligemma.projector.{leaf}"]
        for number, part in enumerate(("up", "down")):
            tree[f"{block}/MlpBlock_0/Dense_{number}/{leaf}"] = stack([f"{first}.feed_forward.{part}.{leaf}"])
        for part in ("query", "key", "value", "out"):
            array = stack([f"{first}.attention.{part}.{leaf}"])
            is_out = part == "out"
            shapes = {"kernel": (1, 2, 4, 8) if is_out else (1, 8, 2, 4), "bias": (1, -1) if is_out else (1, 2, 4)}
            tree[f"{block}/MultiHeadDotProductAttention_0/{part}/{leaf}"] = array.reshape(shapes[leaf])
    for leaf in ("scale", "bias"):
        tree[f"{image}/Transformer/encoder_norm/{leaf}"] = weights[f"{vision}.norm.{leaf}"]
        for number, part in enumerate(("attention_norm", "feed_forward_norm")):
            tree[f"{block}/LayerNorm_{number}/{leaf}"] = stack([f"{first}.{part}.{leaf}"])
    tree[f"{image}/pos_embedding"] = weights[f"{vision}.positions"][None]
    time = "time_mlp" if kind == "pi05" else "action_time_mlp"
    places = {"action_in": "action_in_proj", "action_out": "action_out_proj", "state_in": "state_proj"}
    for ours, theirs in {**places, "time_in": f"{time}_in", "time_out": f"{time}_out"}.items():
        found = {leaf: weights.get(f"{ours}.{leaf}") for leaf in ("kernel", "bias")}
        tree |= {f"{theirs}/{leaf}": array for leaf, array in found.items() if array is not None}
    return tree


def write_openpi(
    folder: Path,
    openpi: Any,
    *,
    statistics: int = 16,
    value: bool = True,
    is_ocdbt: bool = True,
    changes: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a checkpoint as openpi does, and return its random weights by our names."""
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

    spec = read_openpi_config(openpi)
    values = spec.build_values() | {"architecture": SIZES}
    policy = get_policy_type(spec.model)
    config = policy.config(values)
    random = np.random.default_rng(0)
    shapes = blueprint_of(policy.model, config).shapes
    weights = {name: random.normal(size=x.shape, scale=0.4).astype(np.float32) for name, x in shapes.items()}
    nested: dict[str, Any] = {}
    for path, array in (list_arrays(spec.model, weights, config) | (changes or {})).items():
        *above, last = ["params", *path.split("/"), *(["value"] if value else [])]
        branch = nested
        for name in above:
            branch = branch.setdefault(name, {})
        branch[last] = array
    with Checkpointer(PyTreeCheckpointHandler(use_ocdbt=is_ocdbt)) as checkpointer:
        checkpointer.save(folder.resolve() / "params", nested)
    stats: dict[str, Any] = {}
    for name in ("state", "actions"):
        mean, std = random.normal(size=statistics), 0.5 + random.random(statistics)
        arrays = {"mean": mean, "std": std, "q01": mean - 2 * std, "q99": mean + 2 * std}
        stats[name] = {key: array.tolist() for key, array in arrays.items()}
    assets = folder / "assets" / (spec.asset_id or "my/robot")
    assets.mkdir(parents=True)
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    (folder / "robojax.json").write_text(json.dumps({"openpi": openpi}))
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return weights


def normalize(values: np.ndarray, stats: dict[str, Any], *, by_quantiles: bool, inverse: bool = False) -> np.ndarray:
    """Apply Normalize or Unnormalize of openpi/transforms.py."""
    arrays = {key: np.array(numbers)[: values.shape[-1]] for key, numbers in stats.items()}
    span = (arrays["q99"] - arrays["q01"] if by_quantiles else arrays["std"]) + 1e-6
    if by_quantiles:
        return (values + 1) / 2 * span + arrays["q01"] if inverse else (values - arrays["q01"]) / span * 2 - 1
    return values * span + arrays["mean"] if inverse else (values - arrays["mean"]) / span


FLIP = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])


def decode_aloha(state: np.ndarray) -> np.ndarray:
    """Decode a state like _decode_state in openpi/policies/aloha_policy.py."""
    decoded = FLIP * state
    fingers = decoded[..., [6, 13]] * (0.05800 - 0.01844) + 0.01844
    sine = (0.022**2 + fingers**2 - 0.036**2) / (2 * 0.022 * fingers)
    decoded[..., [6, 13]] = (np.arcsin(np.clip(sine, -1, 1)) - 0.5476) / (1.6296 - 0.5476)
    return decoded


def encode_aloha(actions: np.ndarray) -> np.ndarray:
    """Encode actions like _encode_actions in openpi/policies/aloha_policy.py."""
    encoded = FLIP * actions
    encoded[..., [6, 13]] = (encoded[..., [6, 13]] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    return encoded


# Config, widths of state and action, prompt of "push_the block" with a place for the state's numbers.
CASES = {
    "pi0_aloha": (14, 14, "push the block\n"),
    "pi05_aloha": (14, 14, "Task: push the block, State: {};\nAction: "),
    "pi0_libero": (8, 7, "push the block\n"),
    "pi05_libero": (8, 7, "push the block\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_openpi_checkpoint_acts_like_the_transforms_of_openpi(name: str, tmp_path: Path) -> None:
    width, actions, prompt = CASES[name]
    weights = write_openpi(tmp_path, {"config": name, **SMALL})
    policy, spec = jaxmodels.load_policy(tmp_path), CONFIGS[name]
    config: Any = policy.checkpoint.config
    needs = policy.requirements
    # Statistics of ALOHA's joints belong to mapped joints, which robots do not report.
    assert (needs.state_statistics is None) is ("aloha" in name)
    assert (needs.policy_type, needs.state, needs.action, needs.chunk) == (spec.model, width, actions, 4)
    assert needs.controls_joints == ("libero" not in name)
    random = np.random.default_rng(3)
    state = random.uniform(0.1, 0.9, size=(2, width)).astype(np.float32)
    frames = {camera: random.integers(0, 256, (2, 20, 36, 3), dtype=np.uint8) for camera in needs.cameras}
    noise = random.normal(size=(2, 4, 16)).astype(np.float32)
    observation: dict[str, Any] = {f"observation.images.{camera}": frame for camera, frame in frames.items()}
    observation |= {"observation.state": state, "task": ["push_the block"] * 2}
    chunk = policy.act(observation, noise=noise)

    stats = json.loads((tmp_path / "assets" / (spec.asset_id or "") / "norm_stats.json").read_text())["norm_stats"]
    by_quantiles, is_aloha = spec.model == "pi05", "aloha" in name
    own = decode_aloha(state.astype(np.float64)) if is_aloha else state.astype(np.float64)
    normal = normalize(own, stats["state"], by_quantiles=by_quantiles)
    bins = np.digitize(normal, np.linspace(-1, 1, 257)[:-1]) - 1
    tokenizer = PromptTokenizer(TOKENIZER.read_bytes(), 60, 420)
    texts = [tokenizer(prompt.format(" ".join(map(str, row)))) for row in bins]
    language = Language(*(np.stack([text[part] for text in texts]) for part in (0, 1)))
    images = tuple(frames[camera].astype(np.float32) / 255 for camera in needs.cameras)
    seen = Observation(images, normal.astype(np.float32), language=language, noise=noise)
    act = jax.jit(lambda weights, seen: get_policy_type(spec.model).act(config, weights, seen))
    raw = act(weights, seen)
    expected = normalize(np.asarray(raw, np.float64), stats["actions"], by_quantiles=by_quantiles, inverse=True)
    deltas = {"pi0_aloha": 14, "pi05_aloha": 14, "pi0_libero": 6}.get(name, 0)
    is_delta = (np.arange(actions) < deltas) & ~(is_aloha & np.isin(np.arange(actions), (6, 13)))
    expected = expected + np.where(is_delta, own[:, :actions], 0)[:, None]
    expected = encode_aloha(expected) if is_aloha else expected
    np.testing.assert_allclose(chunk, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "cameras", "deltas", "controls_joints", "chunk"),
    [
        ("pi0_aloha_sim", ["cam_high"], None, True, 50),
        ("pi05_droid", ["exterior_image_1_left", "wrist_image_left"], None, False, 15),
        ("pi05_full_droid_finetune", ["exterior_image_1_left", "wrist_image_left"], 7, True, 16),
    ],
)
def test_openpi_configs_name_cameras_and_kinds_of_actions(
    name: str, cameras: list[str], deltas: int | None, controls_joints: bool, chunk: int
) -> None:
    spec = CONFIGS[name]
    config = get_policy_type(spec.model).config(spec.build_values() | {"openpi": spec})
    assert [camera for camera, _ in spec.views] == cameras
    assert config.relative_action_mask == (None if deltas is None else (*[True] * deltas, False))
    assert (config.controls_joints, config.chunk_size) == (controls_joints, chunk)


@pytest.mark.parametrize(("value", "is_ocdbt"), [(True, False), (False, True)])
def test_trees_of_either_format_are_read_and_saved(value: bool, is_ocdbt: bool, tmp_path: Path) -> None:
    weights = write_openpi(tmp_path / "openpi", {"config": "pi0_aloha", **SMALL}, value=value, is_ocdbt=is_ocdbt)
    policy = jaxmodels.load_policy(tmp_path / "openpi")
    assert policy.checkpoint.weights.keys() == weights.keys()
    assert all(np.array_equal(policy.checkpoint.weights[name], weights[name]) for name in weights)
    assert jaxmodels.read_requirements(tmp_path / "openpi") == policy.requirements
    assert policy.requirements.rate == 50
    assert (policy.requirements.joint_names or ())[6:8] == ("left_gripper", "right_waist")
    policy.save(tmp_path / "saved")
    saved = jaxmodels.load_policy(tmp_path / "saved", like=policy)
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert saved.requirements == policy.requirements
    assert saved.checkpoint.config == policy.checkpoint.config
    for part in ("inputs", "outputs"):
        mine, theirs = (getattr(found.checkpoint.normalization, part) for found in (saved, policy))
        for feature in mine.features:
            pairs = zip(mine.get_affine(feature, inverse=True), theirs.get_affine(feature, inverse=True), strict=True)
            assert all(np.array_equal(*pair) for pair in pairs)
    assert saved.fits(policy.checkpoint)


@lru_cache
def write_lora(rank: int) -> dict[str, np.ndarray]:
    random, base = np.random.default_rng(1), "PaliGemma/llm/layers"
    heads, head, width, hidden = 2, 4, 8, 12  # Sizes of the expert.
    shapes = {
        f"{base}/attn/q_einsum_1/lora_a": (2, heads, width, rank),
        f"{base}/attn/q_einsum_1/lora_b": (2, heads, rank, head),
        f"{base}/attn/attn_vec_einsum_1/lora_a": (2, heads, head, rank),
        f"{base}/attn/attn_vec_einsum_1/lora_b": (2, heads, rank, width),
        f"{base}/mlp_1/linear_lora_a": (2, hidden, rank),
        f"{base}/mlp_1/linear_lora_b": (2, rank, width),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_low_rank_updates_of_openpi_are_added(tmp_path: Path) -> None:
    spec = {"config": "pi0_libero_low_mem_finetune", **SMALL}
    updates = write_lora(32)
    weights = write_openpi(tmp_path / "lora", spec, changes=updates)
    found = jaxmodels.load_policy(tmp_path / "lora").checkpoint.weights
    base = "PaliGemma/llm/layers"
    down, up = (updates[f"{base}/attn/q_einsum_1/{factor}"][1] for factor in ("lora_a", "lora_b"))
    query = np.einsum("ndl,nlh->nhd", down, up).reshape(8, 8)
    name = "expert.layers.1.attention.query.weight"
    np.testing.assert_allclose(found[name], weights[name] + query, atol=1e-4)
    changed = {name for name in weights if not np.array_equal(weights[name], found[name])}
    parts = {f"{part}.weight" for part in ("attention.query", "attention.out", "feed_forward.down")}
    assert {name.split(".", 3)[3] for name in changed} == parts
    write_openpi(tmp_path / "other", spec, changes=write_lora(4))
    with pytest.raises(CheckpointError, match=r'is of rank 4.*write "lora_scale": alpha / rank'):
        jaxmodels.load_policy(tmp_path / "other")
    (tmp_path / "other" / "robojax.json").write_text(json.dumps({"openpi": {**spec, "lora_scale": 0.5}}))
    jaxmodels.load_policy(tmp_path / "other")


def test_updates_of_attention_outputs_are_summed_over_heads() -> None:
    random = np.random.default_rng(2)
    x, down, up = (random.normal(size=shape) for shape in ((1, 3, 2, 4), (2, 4, 5), (2, 5, 8)))
    ours = np.einsum("bthd,hde->bte", x, merge_update("layers/attn/attn_vec_einsum/w", down, up, 0.5))
    theirs = np.einsum("btl,nld->btd", np.einsum("btnh,nhl->btl", x, down), up) * 0.5
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_images_are_resized_like_in_openpi_clients() -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for height, width in ((48, 64), (30, 17), (28, 20)):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        ratio = max(width / 28, height / 28)
        inside = int(width / ratio), int(height / ratio)
        canvas = image.new("RGB", (28, 28), 0)
        small = image.fromarray(pixels).resize(inside, resample=image.Resampling.BILINEAR)
        canvas.paste(small, (int((28 - inside[0]) / 2), int((28 - inside[1]) / 2)))
        ours = resize_as_pillow(jnp.asarray(pixels[None], jnp.float32) / 255, (28, 28))[0] * 255
        np.testing.assert_array_equal(np.round(np.asarray(ours)), np.asarray(canvas))


def test_joints_of_aloha_are_mapped_back_for_a_continued_plan() -> None:
    random = np.random.default_rng(4)
    state, actions = random.uniform(0, 1, (3, 14)), random.uniform(-1, 1, (3, 4, 14))
    np.testing.assert_allclose(AlohaJoints.read_state(state), decode_aloha(state.copy()), atol=1e-6)
    np.testing.assert_allclose(AlohaJoints.write_actions(actions), encode_aloha(actions.copy()), atol=1e-6)
    np.testing.assert_allclose(AlohaJoints.write_actions(AlohaJoints.read_actions(actions)), actions, atol=1e-6)


@pytest.mark.parametrize(
    ("openpi", "wrong"),
    [
        ("pi05_droit", "is 'pi05_droit'; known: pi0_aloha, "),
        ("pi0_fast_droid", "pi0-FAST is another type of policy, which is not served"),
        ({"robot": "droid"}, "model and action_horizon missing"),
        ({"config": "pi05_droid", "horizon": 3}, "unknown fields horizon; known: model, action_horizon"),
        ({"model": "pi05", "action_horizon": 8}, 'has no robot .*"cameras": {"front": "base_0_rgb"}, "state": 7'),
        ({"config": "pi05_droid", "delta_actions": [6.5]}, r"delta_actions is \[6.5\]; wanted a list like \[6, -1\]"),
        ({"config": "pi05_droid", "cameras": {"a": "left_wrist_0_rgb"}}, "no camera gives base_0_rgb"),
        ({"config": "pi05_droid", "cameras": {"a": "top"}}, "cameras give top; wanted each of base_0_rgb"),
        ({"config": "pi05_droid", "adapt_to_pi": True}, "only ALOHA's 14 joints can be, found 8 and 8"),
        ({"config": "pi05_droid", "action_horizon": 0}, "action_horizon is 0; wanted an integer of 1"),
        ({"config": "pi05_droid", "use_quantile_norm": 1}, "use_quantile_norm is 1; wanted true or false"),
    ],
)
def test_invalid_openpi_configs_are_refused(openpi: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read_openpi_config(openpi)


def test_openpi_folders_of_another_config_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pi05_droid"
    write_openpi(folder, DROID)

    def refused(openpi: Any, wrong: str, error: type[JaxModelsError] = CheckpointError) -> None:
        (folder / "robojax.json").write_text(json.dumps({} if openpi is None else {"openpi": openpi}))
        with pytest.raises(error, match=wrong):
            jaxmodels.load_policy(folder)

    refused(None, r'write a file robojax.json next to params with {"openpi": "pi05_droid"}')
    refused("pi05_droid", "params: does not fit the config .* action_dim 16, wanted 32; image_size 28, wanted 224")
    refused({"config": "pi0_droid", **SMALL}, "found model pi05, wanted pi0")
    refused({"config": "pi05_libero", **SMALL}, "norm_stats.json of droid; wanted 'physical-intelligence/libero'")
    wide = {"model": "pi05", "robot": "aloha", "asset_id": "droid", **SMALL}
    stats = folder / "assets" / "droid" / "norm_stats.json"
    numbers = {name: {"mean": [0.0] * 8, "std": [1.0] * 8} for name in ("state", "actions")}
    stats.write_text(json.dumps({"norm_stats": numbers}))
    refused(wide, "statistics of 8 numbers for state, of which this robot has 14")
    refused(DROID, "mode QUANTILES.* has no statistic q01 and q99; found mean, std")
    (folder / "architecture.json").write_text(json.dumps(SIZES | {"vocab_size": 421}))
    refused(DROID, "wanted architecture.json's")
    with pytest.raises(CheckpointError, match="wanted architecture"):
        lerobot_folder.read_checkpoint(folder)
    assert set(CONFIGS) >= {"pi0_aloha_sim", "pi0_droid", "pi05_droid", "pi0_libero", "pi05_libero"}


def test_missing_openpi_statistics_are_refused_without_loading(tmp_path: Path) -> None:
    folder = tmp_path / "pi05_droid"
    openpi = {"openpi": DROID}
    write_openpi(folder, DROID)
    stats = folder / "assets" / "droid" / "norm_stats.json"
    whole = json.loads(stats.read_text())["norm_stats"]
    spreads = {name: {key: numbers[key] for key in ("mean", "std")} for name, numbers in whole.items()}
    cases = [
        ({"norm_stats": {"state": whole["state"]}}, "norm_stats.json: has no mean and std of 'actions'; found 'state'"),
        ({"norm_stats": spreads}, "norm_stats.json: feature 'observation.state' .* has no statistic q01 and q99"),
        (None, "assets has norm_stats.json of nothing; wanted 'droid'"),
    ]
    for content, wrong in cases:
        (folder / "robojax.json").write_text(json.dumps(openpi))
        stats.unlink() if content is None else stats.write_text(json.dumps(content))
        for read in (lerobot_folder.read_checkpoint, jaxmodels.read_requirements):
            with pytest.raises(CheckpointError, match=wrong):
                read(folder)
        (folder / "robojax.json").write_text(json.dumps({**openpi, "normalization": "identity"}))
        checkpoint = lerobot_folder.read_checkpoint(folder)
        assert checkpoint.normalization.outputs.unnormalized == {"action"}
        assert jaxmodels.read_requirements(folder).policy_type == "pi05"
