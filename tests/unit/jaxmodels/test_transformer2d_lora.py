"""Low-rank adapters: kinds of files, scaled calls, and parity with merged weights and peft."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxmodels import memory
from jaxmodels.errors import CheckpointError, ConfigError, InputError, WeightsMismatch
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel, lora
from jaxmodels.transformer2d import lora as files
from jaxmodels.weights import flatten
from tests.testing.peers import require_peers

CONFIG = Transformer2DConfig(2, 8, 32, num_layers=2, cross_attention_dim=12, attention_bias=True)
RANK, ALPHA = 3, 6.0
# Each kind of adapted layer: fused and single projections, feed-forwards, and a 1x1 convolution.
SIZES = {
    "transformer_blocks.0.attn1.to_q": (16, 16),
    "transformer_blocks.0.attn1.to_v": (16, 16),
    "transformer_blocks.1.attn1.to_k": (16, 16),
    "transformer_blocks.1.attn1.to_out.0": (16, 16),
    "transformer_blocks.0.attn2.to_q": (16, 16),
    "transformer_blocks.1.attn2.to_v": (16, 12),
    "transformer_blocks.0.ff.net.0.proj": (128, 16),
    "transformer_blocks.1.ff.net.2": (16, 64),
    "proj_in": (16, 32),
    "proj_out": (32, 16),
}
ATTENTIONS = {name: size for name, size in SIZES.items() if ".attn" in name}


Factors = dict[str, tuple[np.ndarray, np.ndarray]]


def factors_of(sizes: dict[str, tuple[int, int]], rank: int = RANK) -> Factors:
    """Return the down and up factors of each weight, as in files."""
    rng = np.random.default_rng(0)
    return {
        name: (
            (rng.standard_normal((rank, columns)) / columns**0.5).astype(np.float32),
            (rng.standard_normal((rows, rank)) / rank**0.5).astype(np.float32),
        )
        for name, (rows, columns) in sizes.items()
    }


# Kind of file: the names of the two factors of a layer.
NAMINGS = {
    "peft": ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"),
    "pipeline": ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight"),
    "adapter": ("{}.lora_A.default.weight", "{}.lora_B.default.weight"),
    "unet": ("unet.{}.lora_A.weight", "unet.{}.lora_B.weight"),
}


def rename(naming: str, factors: Factors) -> dict[str, np.ndarray]:
    """Return the tensors of a file of this kind; pipelines keep 1x1 convolutions as convolutions."""
    tensors = {}
    for name, pair in factors.items():
        for key, array in zip(NAMINGS[naming], pair, strict=True):
            is_convolution = naming == "pipeline" and name.startswith("proj")
            tensors[key.format(name)] = array[:, :, None, None] if is_convolution else array
    return tensors


def write(path: Path, naming: str, factors: Factors, **more: np.ndarray) -> Path:
    save_file(rename(naming, factors) | more, path)
    return path


@pytest.fixture
def model() -> Transformer2DModel:
    return Transformer2DModel.from_config(CONFIG)


@pytest.fixture
def call() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "hidden_states": rng.standard_normal((2, 32, 3, 5), np.float32),
        "encoder_hidden_states": rng.standard_normal((2, 7, 12), np.float32),
    }


def merged(model: Transformer2DModel, factors: Factors, scale: float) -> Any:
    """Return the model with ``W + scale up down`` computed by hand, in our layout."""
    weights = {name: np.array(array) for name, array in flatten(model).items()}
    for name, (down, up) in factors.items():
        delta = (scale * up @ down).T
        block, _, rest = name.removeprefix("transformer_blocks.").partition(".")
        match rest.split("."):
            case [attention, letter] if attention == "attn1":
                weights["transformer_blocks.attn1.to_qkv.kernel"][int(block), :, "qkv".index(letter[-1])] += delta
            case ["attn2", "to_v"]:
                weights["transformer_blocks.attn2.to_kv.kernel"][int(block), :, 1] += delta
            case ["attn2", "to_q"]:
                weights["transformer_blocks.attn2.to_q.kernel"][int(block)] += delta
            case [attention, "to_out", "0"]:
                weights[f"transformer_blocks.{attention}.to_out.kernel"][int(block)] += delta
            case ["ff", "net", *place]:
                side = "up" if place[0] == "0" else "down"
                weights[f"transformer_blocks.ff.{side}.kernel"][int(block)] += delta
            case _:
                weights[f"{name}.kernel"] += delta
    graph, state = nnx.split(model)
    leaves = jax.device_put(list(weights.values()))
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def sample(model: Any, call: dict[str, np.ndarray], scale: float | None = None, **more: Any) -> np.ndarray:
    options = {} if scale is None else {"cross_attention_kwargs": {"scale": scale}}
    return np.asarray(model(**call, **options, **more).sample)


@pytest.mark.parametrize("naming", NAMINGS)
def test_each_kind_of_file_equals_merged_weights(naming: str, model, call, tmp_path: Path) -> None:
    factors = factors_of(SIZES)
    wanted = {scale: sample(merged(model, factors, scale), call) for scale in (1.0, 0.25)}
    before = sample(model, call)
    lora.load(model, write(tmp_path / "adapter.safetensors", naming, factors))
    assert np.abs(wanted[1.0] - before).max() > 0.1
    np.testing.assert_allclose(sample(model, call), wanted[1.0], atol=2e-5)
    for scale, output in wanted.items():
        np.testing.assert_allclose(sample(model, call, scale), output, atol=2e-5)
    np.testing.assert_array_equal(sample(model, call, 0.0), before)


def test_prepared_and_compiled_calls_use_the_same_scale(model, call, tmp_path: Path) -> None:
    lora.load(model, write(tmp_path / "adapter.safetensors", "peft", factors_of(SIZES)))
    options = {"cross_attention_kwargs": {"scale": 0.5}}
    wanted = sample(model, call, 0.5)
    conditioning = model.prepare(call["encoder_hidden_states"], **options)
    prepared = model(call["hidden_states"], conditioning=conditioning, **options).sample
    np.testing.assert_allclose(np.asarray(prepared), wanted, atol=1e-6)
    compiled = model.compile(**call, **options)
    np.testing.assert_allclose(np.asarray(compiled(**call, **options)), wanted, atol=1e-6)
    other = compiled(**call, cross_attention_kwargs={"scale": 0.25})
    np.testing.assert_allclose(np.asarray(other), sample(model, call, 0.25), atol=1e-6)
    written_out = Transformer2DModel.from_config(CONFIG, scan_layers=False)
    lora.load(written_out, tmp_path / "adapter.safetensors")
    np.testing.assert_allclose(sample(written_out, call, 0.5), wanted, atol=1e-6)


def test_adapter_can_be_fused_or_detached(model, call, tmp_path: Path) -> None:
    factors = factors_of(SIZES)
    before, wanted = sample(model, call), sample(merged(model, factors, 0.5), call)
    path = write(tmp_path / "adapter.safetensors", "peft", factors)
    names = set(flatten(model))
    lora.load(model, path)
    with pytest.raises(ConfigError, match=r"has adapters.*lora\.fuse or lora\.detach"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="has an adapter already"):
        lora.load(model, path)
    fused = nnx.clone(model)
    lora.fuse(fused, scale=0.5)
    np.testing.assert_allclose(sample(fused, call), wanted, atol=2e-5)
    fused.save_pretrained(tmp_path / "model")
    again = Transformer2DModel.from_pretrained(tmp_path / "model")
    np.testing.assert_array_equal(sample(again, call), sample(fused, call))
    lora.detach(model)
    np.testing.assert_array_equal(sample(model, call), before)
    assert set(flatten(model)) == set(flatten(fused)) == names
    assert not lora.is_adapted(model)


def test_adapter_can_be_trained_alone(model, call, tmp_path: Path) -> None:
    lora.load(model, write(tmp_path / "adapter.safetensors", "peft", factors_of(SIZES)))
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(adapters: Any) -> jax.Array:
        return jnp.mean(nnx.merge(graph, adapters, rest)(**call).sample ** 2)

    gradients = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(jax.jit(jax.grad(loss))(adapters))}
    assert len(gradients) == 2 * 8  # The first attention stores q, k and v in one array, the second in two.
    assert all(name.endswith(("lora_down", "lora_up")) for name in gradients)
    assert all(float(jnp.abs(x.get_value()).max()) > 0 for x in gradients.values())


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.0),
        ({"lora_alpha": ALPHA, "r": RANK}, 2.0),
        ({"lora_alpha": ALPHA, "use_rslora": True}, ALPHA / RANK**0.5),
        ({"lora_alpha": 1.5, "alpha_pattern": dict.fromkeys(ATTENTIONS, 1.5)}, 0.5),
    ],
)
def test_settings_of_peft_are_read(settings, scale: float, model, call, tmp_path: Path) -> None:
    factors = factors_of(ATTENTIONS)
    wanted = sample(merged(model, factors, scale), call)
    write(tmp_path / "adapter_model.safetensors", "peft", factors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    inside = tmp_path / "inside.safetensors"
    metadata = {f"transformer.{key}": value for key, value in settings.items()}
    beside = nnx.clone(model)
    lora.load(beside, tmp_path)
    np.testing.assert_allclose(sample(beside, call), wanted, atol=1e-4)
    (tmp_path / "adapter_config.json").unlink()
    save_file(rename("pipeline", factors), inside, metadata={"lora_adapter_metadata": json.dumps(metadata)})
    lora.load(model, inside)
    np.testing.assert_allclose(sample(model, call), wanted, atol=1e-4)


def test_one_transformer_of_a_unet_adapter_is_read(tmp_path: Path) -> None:
    factors = factors_of(SIZES)
    places = ("mid_block", "up_blocks.1")
    unet = {f"{place}.attentions.0.{name}": pair for place in places for name, pair in factors.items()}
    others = {"text_encoder.layers.0.q.lora_A.weight": np.zeros((2, 2), np.float32)}
    path = write(tmp_path / "adapter.safetensors", "unet", unet, **others)
    found = files.read(path, CONFIG, prefix="mid_block.attentions.0")
    wanted = files.read(write(tmp_path / "alone.safetensors", "unet", factors), CONFIG)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert all(np.array_equal(*pair) for pair in zip(found[name], wanted[name], strict=True))
    with pytest.raises(CheckpointError, match=r"no low-rank factors under 'down_blocks\.0\.attentions\.0'"):
        files.read(path, CONFIG, prefix="down_blocks.0.attentions.0")


def test_ranks_may_differ_between_weights(model, call, tmp_path: Path) -> None:
    factors = factors_of({"transformer_blocks.0.attn1.to_q": (16, 16)}, rank=1)
    factors |= factors_of({"transformer_blocks.1.attn1.to_q": (16, 16)}, rank=5)
    wanted = sample(merged(model, factors, 1.0), call)
    path = write(tmp_path / "adapter.safetensors", "peft", factors)
    down, up = files.read(path, CONFIG)["transformer_blocks.attn1.to_qkv"]
    assert (down.shape, up.shape) == ((2, 16, 3, 5), (2, 5, 3, 16))
    lora.load(model, path)
    np.testing.assert_allclose(sample(model, call), wanted, atol=2e-5)


def test_adapters_that_exceed_memory_are_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of a large rank allocate zeros of that size for all layers in the same stack."""
    few = {"transformer_blocks.0.attn1.to_q": (16, 16)}
    path = write(tmp_path / "adapter.safetensors", "peft", factors_of(few, rank=64))
    size = sum(down.nbytes + up.nbytes for down, up in files.read(path, CONFIG).values())
    assert size > 2 * path.stat().st_size
    monkeypatch.setattr(memory, "SPARE", 0)
    monkeypatch.setattr(memory, "get_free_host_memory", lambda: size - 1)
    with pytest.raises(ConfigError, match=r"the adapters of adapter\.safetensors\); 0 MB are free"):
        files.read(path, CONFIG)
    monkeypatch.setattr(memory, "get_free_host_memory", lambda: size)
    assert files.read(path, CONFIG)


def test_all_misfits_are_in_one_error(model, tmp_path: Path) -> None:
    tensors = rename("peft", factors_of(SIZES))
    start = "base_model.model.transformer_blocks"
    del tensors[f"{start}.0.attn1.to_q.lora_B.weight"]
    tensors[f"{start}.1.attn2.to_v.lora_A.weight"] = np.zeros((3, 13), np.float32)
    tensors[f"{start}.7.attn2.to_v.lora_A.weight"] = np.zeros((3, 12), np.float32)
    tensors[f"{start}.0.attn1.to_q.lora_magnitude_vector"] = np.zeros(16, np.float32)
    save_file(tensors, tmp_path / "adapter.safetensors")
    with pytest.raises(WeightsMismatch) as caught:
        lora.load(model, tmp_path / "adapter.safetensors")
    text = str(caught.value)
    assert "transformer_blocks.0.attn1.to_q: has no up (lora_B) factor" in text
    assert "transformer_blocks.1.attn2.to_v: factors [3, 13] and [16, 3]; wanted [rank, 12] and [16, rank]" in text
    assert "transformer_blocks.7.attn2.to_v.lora_A.weight [3, 12]: the model has no such weight" in text
    assert "lora_magnitude_vector [16]: the model has no such weight" in text
    assert not lora.is_adapted(model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_alpha": "8"}, "holds no number"),
        ({"alpha_pattern": [1]}, "holds no number"),
        ({"alpha_pattern": {"blocks.*": 2}}, r"alpha_pattern has blocks\.\*"),
    ],
)
def test_unknown_settings_are_refused(settings, words: str, tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors", "peft", factors_of(ATTENTIONS))
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=words):
        files.read(tmp_path, CONFIG)


def test_files_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter; wanted a safetensors file, or a folder with"):
        files.read(tmp_path, CONFIG)
    factors = factors_of(ATTENTIONS)
    factors["transformer_blocks.0.attn1.to_q"][0][1, 1] = np.nan
    with pytest.raises(CheckpointError, match=r"NaN or an infinity: transformer_blocks\.0\.attn1\.to_q"):
        files.read(write(tmp_path / "x.safetensors", "peft", factors), CONFIG)
    tensors = rename("peft", {"proj_in": factors_of(SIZES)["proj_in"]})
    for text in ("{", "[]", "[" * 100_000):
        save_file(tensors, tmp_path / "x.safetensors", metadata={"lora_adapter_metadata": text})
        with pytest.raises(CheckpointError, match="lora_adapter_metadata is"):
            files.read(tmp_path / "x.safetensors", CONFIG)


def test_scale_without_an_adapter_is_refused(model, call) -> None:
    for options, words in (
        ({"scale": 0.5}, r"'scale', but the model has no adapter; lora\.load puts one in"),
        ({"ip_adapter_masks": 1}, "'ip_adapter_masks'; known: 'gligen', 'scale'"),
        ({"scale": np.ones(2)}, "wanted one number"),
        ({"scale": True}, "wanted one number"),
        ({"scale": "half"}, "wanted an array of numbers"),
    ):
        with pytest.raises(InputError, match=words):
            model(**call, cross_attention_kwargs=options)


def test_adapters_of_timesteps_captions_and_narrow_models(tmp_path: Path) -> None:
    patches = {"patch_size": 2, "sample_size": 8, "norm_type": "ada_norm_single"}
    config = Transformer2DConfig(2, 8, 4, 4, 2, **patches, cross_attention_dim=16, caption_channels=9)
    model = Transformer2DModel.from_config(config, dtype=jnp.bfloat16)
    sizes = {"adaln_single.linear": (96, 16), "caption_projection.linear_1": (16, 9)}
    lora.load(model, write(tmp_path / "adapter.safetensors", "pipeline", factors_of(sizes)))
    assert {x.dtype for name, x in flatten(model).items() if ".lora_" in name} == {jnp.dtype(jnp.bfloat16)}
    rng = np.random.default_rng(0)
    call = {"hidden_states": rng.standard_normal((1, 4, 8, 8), np.float32), "timestep": np.array([3])}
    call["encoder_hidden_states"] = rng.standard_normal((1, 5, 9), np.float32)
    outputs = [sample(model, call, scale) for scale in (0.0, 1.0)]
    assert all(output.dtype == jnp.bfloat16 for output in outputs)
    assert np.abs(outputs[0].astype(np.float32) - outputs[1].astype(np.float32)).max() > 0.01


@pytest.mark.needs_peers
def test_outputs_equal_peft(model, call, tmp_path: Path) -> None:
    require_peers("torch", "diffusers", "peft")
    import diffusers
    import peft
    import torch

    model.save_pretrained(tmp_path / "model")
    theirs = diffusers.Transformer2DModel.from_pretrained(tmp_path / "model", low_cpu_mem_usage=False).eval()
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
    settings = peft.LoraConfig(r=4, lora_alpha=10, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(theirs, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        tensors = {name: torch.from_numpy(array) for name, array in call.items()}
        wanted = adapted(**tensors, return_dict=False)[0].numpy()
    before = sample(model, call)
    lora.load(model, tmp_path / "adapter")
    assert np.abs(sample(model, call) - before).max() > 0.01
    np.testing.assert_allclose(sample(model, call), wanted, atol=1e-5)
