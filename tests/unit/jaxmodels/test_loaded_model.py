import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import CheckpointError, ConfigError, HubError, InputError
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel, loaded_model
from jaxmodels.transformer2d.loaded_model import LoadedModel, forward_cost, is_model, load_model
from tests.testing.transformers import random_transformer

PATCHES = {"in_channels": 4, "patch_size": 2}
CONFIGS = {
    "continuous": {"in_channels": 32, "cross_attention_dim": 24},
    "discrete": {"num_vector_embeds": 12, "sample_size": 4, "num_embeds_ada_norm": 10},
    "patches": {**PATCHES, "sample_size": 8, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 7}
    | {"activation_fn": "gelu-approximate"},
    "captions": {**PATCHES, "sample_size": 16, "norm_type": "ada_norm_single", "use_additional_conditions": True}
    | {"num_attention_heads": 3, "out_channels": 8, "caption_channels": 20, "cross_attention_dim": 48},
    "gated": {"in_channels": 32, "cross_attention_dim": 32, "attention_type": "gated"},
}


def small_transformer(name: str) -> Transformer2DModel:
    return random_transformer(3, **{"num_attention_heads": 2, "attention_head_dim": 16, **CONFIGS[name]})


@pytest.fixture(scope="module")
def loaded() -> dict[str, LoadedModel]:
    return {name: LoadedModel(small_transformer(name)) for name in CONFIGS}


@pytest.mark.parametrize("name", ["discrete", "captions"])
def test_forward_by_names_equals_the_call_of_the_model(name, loaded):
    inputs = loaded[name].example(batch=2, seed=1)
    sample = loaded[name].forward(inputs)["sample"]
    call = {key: value for key, value in inputs.items() if "." not in key}
    conditions = {key.split(".")[1]: value for key, value in inputs.items() if key.startswith("added")}
    expected = small_transformer(name)(**call, added_cond_kwargs=conditions or None).sample
    np.testing.assert_allclose(sample, expected, atol=2e-5)
    assert sample.dtype == np.float32
    assert set(loaded[name].timings) == {"to_device", "compute", "to_host"}


@pytest.mark.parametrize("name", CONFIGS)
def test_description_is_json_with_inputs_and_outputs(name, loaded):
    model = loaded[name]
    description = json.loads(json.dumps(dict(model.description)))
    assert (description["class"], description["kind"]) == ("Transformer2DModel", model._config.kind)
    assert Transformer2DConfig.from_json(description["config"]) == small_transformer(name).config
    assert description["bytes"] == 4 * description["parameters"] > 0
    assert (description["dtype"], description["device"][:3]) == ("float32", "cpu")
    required = {entry["name"] for entry in description["inputs"] if entry["required"]}
    assert required <= set(model.example()) <= {entry["name"] for entry in description["inputs"]}
    sizes = {"batch": 1, "height": 32, "width": 32, "latent_pixels": 16, "context": 77}
    sizes |= {"height": model._config.sample_size or 32, "width": model._config.sample_size or 32}
    [output] = description["outputs"]
    shape = tuple(sizes.get(size, size) for size in output["shape"])
    assert model.forward(model.example())["sample"].shape == shape


@pytest.mark.parametrize("name", CONFIGS)
def test_missing_required_input_is_named(name, loaded):
    model = loaded[name]
    for entry in model.inputs:
        if entry.is_required:
            inputs = {key: value for key, value in model.example().items() if key != entry.name}
            with pytest.raises(InputError, match=rf"lacks {entry.name}"):
                model.forward(inputs)


def test_unknown_input_is_refused_with_the_known_names(loaded):
    inputs = loaded["gated"].example()
    inputs["cross_attention_kwargs.gligen.objs"] = np.ones((1, 3, 32), np.float32)
    assert loaded["gated"].forward(inputs)["sample"].shape == (1, 32, 32, 32)
    inputs = loaded["continuous"].example() | {"images": np.zeros(3, np.float32)}
    with pytest.raises(InputError, match=r"has 'images', .*wanted hidden_states, encoder_.*attention_mask"):
        loaded["continuous"].forward(inputs)


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("continuous", {"hidden_states": np.zeros((1, 31, 8, 8), np.float32)}, r"wants \(batch, 32, height, width\)"),
        ("continuous", {"hidden_states": np.zeros((1, 32, 8, 8), np.int64)}, "floating-point"),
        ("continuous", {"hidden_states": np.full((1, 32, 8, 8), np.nan, np.float32)}, "NaN"),
        ("continuous", {"hidden_states": np.full((1, 32, 8, 8), 1e300)}, "more than float32"),
        ("continuous", {"hidden_states": np.zeros((1, 32, 8, 8), np.complex64)}, "complex64"),
        ("continuous", {"hidden_states": np.array(["x"])}, "wanted floating-point numbers"),
        ("continuous", {"encoder_hidden_states": np.zeros((2, 77, 24), np.float32)}, r"wanted \(1, tokens, 24\)"),
        ("continuous", {"attention_mask": np.ones((1, 5), np.float32)}, "wanted a mask"),
        ("discrete", {"hidden_states": np.array([[12]])}, "0 to 11"),
        ("discrete", {"hidden_states": np.array([[2**32 + 1]])}, "beyond 32 bits"),
        ("discrete", {"hidden_states": np.zeros((1, 17), np.int32)}, "at most 16"),
        ("discrete", {"timestep": np.array(10)}, "0 to 9"),
        ("discrete", {"timestep": np.array(1.5)}, "wanted integers"),
        ("patches", {"class_labels": np.array([8])}, "0 to 7"),
        ("captions", {"added_cond_kwargs.resolution": np.zeros((1, 3), np.float32)}, r"wanted \(1, 2\)"),
    ],
)
def test_invalid_arrays_are_refused_before_compiling(name, wrong, text, loaded):
    model = loaded[name]
    kept = model.compiled_shapes
    for method in (model.cost, model.forward):
        with pytest.raises(InputError, match=text):
            method(model.example() | wrong)
    assert model.compiled_shapes == kept


def test_other_dtypes_of_the_same_numbers_are_not_recompiled(loaded):
    model = loaded["patches"]
    inputs = model.example()
    first = model.forward(inputs)["sample"]
    kept = model.compiled_shapes
    others = {
        "hidden_states": inputs["hidden_states"].astype(np.float64),
        "timestep": np.array(0, np.int64) + np.round(inputs["timestep"]).astype(np.int64),
        "class_labels": inputs["class_labels"].astype(np.uint8)[0],
    }
    again = model.forward({**others, "timestep": np.float64(inputs["timestep"][0])})["sample"]
    np.testing.assert_array_equal(first, again)
    model.forward(others)
    assert model.compiled_shapes == kept
    assert model.is_compiled(others)


def test_only_recently_used_shapes_are_kept():
    model = LoadedModel(small_transformer("discrete"), shapes_kept=2)
    inputs = {batch: model.example(batch) for batch in (1, 2, 3)}
    samples = {batch: model.forward(inputs[batch])["sample"] for batch in (1, 2)}
    assert model.compile(inputs[1]) == 0.0
    samples[3] = model.forward(inputs[3])["sample"]
    assert model.compiled_shapes == 2
    assert [model.is_compiled(inputs[batch]) for batch in (1, 2, 3)] == [True, False, True]
    assert model.compile(inputs[2]) > 0.0
    for batch, sample in samples.items():
        np.testing.assert_array_equal(model.forward(inputs[batch])["sample"], sample)


def test_endless_new_shapes_do_not_change_results(loaded, monkeypatch):
    monkeypatch.setattr(loaded_model, "CLEAR_AFTER", 2)
    model = LoadedModel(small_transformer("discrete"), shapes_kept=1)
    inputs = model.example() | {"hidden_states": np.array([[1, 2, 3]], np.int32)}
    first = model.forward(inputs)["sample"]
    for count in (4, 5, 6):
        model.forward(inputs | {"hidden_states": np.ones((1, count), np.int32)})
    np.testing.assert_array_equal(model.forward(inputs)["sample"], first)
    assert model.compiled_shapes == 1


def test_cost_grows_with_the_inputs_and_includes_the_output(loaded):
    model = loaded["patches"]
    small, large = model.example(1), model.example(1) | {"hidden_states": np.zeros((1, 4, 256, 256), np.float32)}
    model.forward(small)
    seconds, memory, answer = model.cost(small)
    assert (0 < seconds < 1, answer) == (True, model.forward(small)["sample"].nbytes)
    more = model.cost(large)
    assert more[0] > 100 * seconds
    assert more[1] > 100 * memory
    assert more[2] == 1024 * answer
    assert not model.is_compiled(large)


@pytest.mark.parametrize(("heads", "layers", "published"), [(6, 12, 6.06e9), (16, 28, 118.64e9)], ids=["S/2", "XL/2"])
def test_operations_are_estimated_like_published_for_dit(heads, layers, published):
    width = {6: 64, 16: 72}[heads]
    config = Transformer2DConfig(heads, width, num_layers=layers, **{**CONFIGS["patches"], "sample_size": 32})
    matrices = layers * 12 * config.inner_dim**2
    # https://arxiv.org/abs/2212.09748, table 9, counts a multiplication and an addition as one operation.
    cost = forward_cost(config, matrices, {"hidden_states": (1, 4, 32, 32)})
    assert cost.operations == pytest.approx(2 * published, rel=0.1)


def test_memory_estimate_is_near_the_compilers(loaded):
    for name, size in (("continuous", (4, 32, 48, 48)), ("patches", (16, 4, 64, 64))):
        model = loaded[name]
        inputs = model.example(size[0]) | {"hidden_states": np.zeros(size, np.float32)}
        model.compile(inputs)
        newest = list(model._compiled._executables.values())[-1]
        found = newest.memory_analysis().temp_size_in_bytes
        assert found / 2 < model.cost(inputs)[1] < found * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pipeline") / "transformer"
    small_transformer("patches").save_pretrained(place)
    return place


def test_loaded_folder_gives_the_same_numbers(folder, loaded):
    words: list[str] = []
    model = load_model(folder, on_progress=words.append)
    inputs = model.example(2)
    np.testing.assert_array_equal(model.forward(inputs)["sample"], loaded["patches"].forward(inputs)["sample"])
    assert words == ["reading", "ready"]
    again = jaxmodels.load_model(str(folder.parent), subfolder="transformer")
    assert again.description == model.description


def test_model_in_bfloat16_returns_float32(folder, loaded):
    model = load_model(folder, dtype="bfloat16")
    inputs = model.example()
    sample = model.forward(inputs)["sample"]
    assert (sample.dtype, model.dtype, model.description["dtype"]) == (np.float32, "bfloat16", "bfloat16")
    np.testing.assert_allclose(sample, loaded["patches"].forward(inputs)["sample"], atol=0.1)
    inputs["hidden_states"] = np.asarray(jnp.asarray(inputs["hidden_states"], jnp.bfloat16))
    assert model.forward(inputs)["sample"].shape == sample.shape


def test_unloadable_model_is_refused_with_the_reason(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):  # Not a subfolder of a repo.
        is_model(f"{folder.parent.name}/{folder.name}/mistyped")
    for error, words, path, options in (
        (HubError, "neither a folder here nor a repo id", tmp_path / "nothing", {}),
        (CheckpointError, "unet: no such folder", folder.parent, {"subfolder": "unet"}),
        (CheckpointError, r"config\.json", tmp_path, {}),
        (ConfigError, "revision", folder, {"revision": "main"}),
        (ConfigError, "dtype", folder, {"dtype": "int8"}),
        (ConfigError, "device", folder, {"device": "abacus"}),
    ):
        with pytest.raises(error, match=words):
            load_model(path, **options)


def test_folder_of_diffusers_is_distinguished_from_a_policy(folder, tmp_path):
    assert is_model(folder)
    assert is_model("owner/name/transformer")
    assert is_model("owner/name", subfolder="transformer")
    (tmp_path / "model_index.json").write_text("{}")
    assert is_model(tmp_path)
    (tmp_path / "config.json").write_text('{"type": "act"}')
    assert not is_model(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model_index.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        is_model(tmp_path)
    with pytest.raises(HubError, match="neither"):
        is_model(tmp_path / "nothing")
