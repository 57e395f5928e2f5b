"""Live parity with diffusers over the arguments of a call: scales, masks, timesteps, labels, sizes, formats."""

from typing import Any

import numpy as np
import pytest

from jaxmodels.transformer2d import Transformer2DModelOutput
from tests.parity.transformer2d.conftest import inputs_for, live_tolerance, small, to_torch
from tests.testing.peers import skip_reason

torch = pytest.importorskip("torch", reason=skip_reason("torch"))

pytestmark = pytest.mark.needs_peers
TOLERANCE = live_tolerance()  # Largest absolute difference on outputs of order 1.
BATCH, HEADS, TOKENS, CONTEXT = 2, 2, 15, 7


def reals(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


TIMESTEPS = {
    "int64": np.array([3, 999]),
    "int32": np.array([3, 999], np.int32),
    "float32": np.array([0.25, 812.75], np.float32),
    "float64": np.array([0.25, 812.75]),
    "float16": np.array([0.25, 812.5], np.float16),
    "small": np.array([1e-3, 0.0], np.float32),
    "negative": np.array([-4.5, 1000.0], np.float32),
}
CROSS: dict[str, Any] = {"cross_attention_dim": 20}
CAPTIONS = {"cross_attention_dim": 24, "caption_channels": 18}
UNUSED = {"class_labels": np.array([1, 2]), "timestep": np.array(3), "added_cond_kwargs": {}}
ADA = {"norm_type": "ada_norm", "num_embeds_ada_norm": 9}
ZERO = {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 9}
SINGLE = {"norm_type": "ada_norm_single", "num_embeds_ada_norm": 9}
# Models of at least 128 x 128 pixels divide positions by 128 // 64.
LARGE = SINGLE | {"use_additional_conditions": False, "num_layers": 1, "sample_size": 128, "patch_size": 16}
SCALED = SINGLE | {"use_additional_conditions": False, "num_layers": 1}
# Kind, config fields, and replaced arguments.
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        ("patches", norm, {"hidden_states": np.float32(x) * reals(2, 3, 8, 8)})
        for x in (0.01, 100)
        for norm in (ZERO, SINGLE)
    ),
    *(("patches", norm, {"timestep": timestep}) for timestep in TIMESTEPS.values() for norm in (ZERO, SINGLE)),
    *(("patches", norm, {"hidden_states": reals(2, 3, 2, 2)}) for norm in (ZERO, SINGLE)),  # One patch.
    *((kind, {}, UNUSED) for kind in ("continuous", "discrete")),
    *(
        ("patches", SCALED | {"interpolation_scale": scale}, {"hidden_states": reals(2, 3, *size)})
        for size, scale in (((8, 8), 1), ((8, 8), 4), ((6, 10), 2.0), ((4, 4), 1.5), ((9, 9), 2.0))
    ),
    *(
        ("patches", LARGE, {"hidden_states": reals(2, 3, 8 * height, 8 * width)})
        for height, width in ((6, 10), (12, 12), (16, 2), (2, 2))
    ),
    *(("continuous", CROSS, {"batch": 3, "hidden_states": reals(3, 16, *size)}) for size in ((1, 1), (4, 9), (7, 1))),
    *(("discrete", CROSS, {"hidden_states": np.arange(2 * length).reshape(2, -1) % 11}) for length in (1, 16)),
    ("patches", SINGLE | CAPTIONS, {"encoder_hidden_states": reals(2, 1, 7, 18)}),
    ("continuous", {"out_channels": 1}, {}),
    ("continuous", CROSS | {"norm_eps": 0.3, "norm_type": "layer_norm"}, {}),
    ("discrete", CROSS | {"norm_eps": 0.3, **ADA}, {}),
    ("patches", CROSS | {"norm_eps": 0.3, "norm_type": "ada_norm_single"}, {}),
]


@pytest.mark.parametrize(("kind", "fields", "arguments"), CALLS)
def test_calls_give_the_numbers_of_diffusers(kind: str, fields, arguments, pair_of) -> None:
    config = small(kind, **fields)
    assert pair_of(config).error(**inputs_for(config, **arguments)) <= TOLERANCE


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("is_linear", [False, True])
def test_continuous_inputs_of_any_scale_are_normalised_equally(scale: float, is_linear: bool, pair_of) -> None:
    # A wrong epsilon of the group norm is visible at 0.01. The output includes the input itself.
    config = small("continuous", **CROSS, use_linear_projection=is_linear)
    inputs = inputs_for(config, hidden_states=reals(2, 16, 3, 5) * np.float32(scale))
    assert pair_of(config).error(**inputs) <= TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("form", [int, np.int32, np.asarray, lambda value: np.array([value])])
@pytest.mark.parametrize(
    ("kind", "fields", "value", "theirs"),
    [
        ("continuous", ADA, 8, np.asarray(8)),
        ("discrete", ADA, 8, np.asarray(8)),
        ("patches", ZERO | {"num_layers": 1}, 417, np.array([417, 417])),
        ("patches", SINGLE | {"num_layers": 1}, 417, np.array([417, 417])),
    ],
)
def test_one_timestep_is_for_the_whole_batch(kind: str, fields, value: int, theirs, form: Any, pair_of) -> None:
    config = small(kind, **fields)
    pair = pair_of(config)
    inputs = inputs_for(config, timestep=theirs)
    found = pair.find(**inputs | {"timestep": form(value)})
    assert np.abs(found - pair.want(**inputs)).max() <= TOLERANCE


@pytest.mark.parametrize("is_linear", [False, True])
def test_inputs_far_from_zero_are_as_exact_as_in_diffusers(is_linear: bool, pair_of) -> None:
    # A variance computed as E[x^2] - E[x]^2 loses bits. Double precision gives the exact output.
    config = small("continuous", cross_attention_dim=20, use_linear_projection=is_linear)
    inputs = inputs_for(config)
    inputs["hidden_states"] += np.float32(50)
    pair = pair_of(config)
    found, theirs = pair.find(**inputs), pair.want(**inputs)
    pair.theirs.double()
    exact = pair.want(**{name: value.astype(np.float64) for name, value in inputs.items()})
    assert np.abs(found - exact).max() <= max(TOLERANCE, np.abs(theirs - exact).max())


def masks(form: str, keys: int, queries: int) -> np.ndarray:
    rng = np.random.default_rng(keys)
    keep = rng.random((BATCH, keys)) < 0.6
    keep[:, 1] = True

    def bias(*shape: int) -> np.ndarray:
        return (2 * rng.standard_normal(shape)).astype(np.float32)

    match form:
        case "bool" | "int64" | "int32" | "uint8" | "float32":
            return keep.astype(form)
        case "fractional":  # Slightly below one, so that the biases are of the order of the scores.
            return np.float32(1) - (rng.random((BATCH, keys)) * 3e-4).astype(np.float32)
        case "halves":
            return np.where(keep, 1, 0.5).astype(np.float32)
        case "bias per key":
            return bias(BATCH, 1, keys)
        case "bias per query and key":
            return bias(BATCH, queries, keys)
        case "bias per head":
            return bias(BATCH * HEADS, queries, keys)
        case "bias per head and key":
            return bias(BATCH * HEADS, 1, keys)
        case "keep per key":
            return keep[:, None]
        case "keep per query and key":
            several = rng.random((BATCH, queries, keys)) < 0.6
            several[..., 1] = True
            return several
        case "four dimensions":
            return bias(BATCH, 1, 1, keys)
        case "four dimensions with queries":
            return bias(BATCH, 1, queries, keys)
    raise AssertionError(form)


FORMS = (
    *("bool", "int64", "int32", "uint8", "float32", "fractional", "halves"),
    *("bias per key", "bias per query and key", "bias per head", "bias per head and key"),
    *("keep per key", "keep per query and key", "four dimensions", "four dimensions with queries"),
)


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_each_form_equal_diffusers(form: str, pair_of) -> None:
    config = small("continuous", cross_attention_dim=20, num_layers=1)
    inputs = inputs_for(config)
    pair = pair_of(config)
    given = {"attention_mask": masks(form, TOKENS, TOKENS), "encoder_attention_mask": masks(form, CONTEXT, TOKENS)}
    expected = pair.want(**inputs, **given)
    for name in given:  # Each argument must change the output.
        assert np.abs(pair.want(**inputs, **{name: given[name]}) - pair.want(**inputs)).max() > 1e-3
    assert np.abs(pair.find(**inputs, **given) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("kind", ["discrete", "patches"])
def test_masks_of_other_input_kinds_equal_diffusers(kind: str, pair_of) -> None:
    config = small(kind, cross_attention_dim=20, num_layers=1, norm_type="layer_norm")
    if kind == "patches":
        config |= {"norm_type": "ada_norm_single"}
    inputs = inputs_for(config)
    tokens = 13 if kind == "discrete" else 15
    for form in ("float32", "bias per key", "keep per query and key"):
        inputs["attention_mask"] = masks(form, tokens, tokens)
        inputs["encoder_attention_mask"] = masks(form, CONTEXT, tokens)
        assert pair_of(config).error(**inputs) <= TOLERANCE


@pytest.mark.parametrize("form", ["none", "bool", "bias per query and key", "bias per head", "keep per query and key"])
@pytest.mark.parametrize("size", [(17, 19), (37, 29)])
def test_many_tokens_give_the_numbers_of_diffusers(size: tuple[int, int], form: str, pair_of) -> None:
    # More scores take other paths of attention: head by head, then in blocks that do not divide these sizes.
    config = small("continuous", cross_attention_dim=20, num_layers=1)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 16, *size)).astype(np.float32)
    text = rng.standard_normal((BATCH, 301, 20)).astype(np.float32)
    inputs = inputs_for(config, hidden_states=images, encoder_hidden_states=text)
    tokens = size[0] * size[1]
    if form != "none":
        inputs["attention_mask"] = masks(form, tokens, tokens)
        inputs["encoder_attention_mask"] = masks(form, 301, tokens)
    assert pair_of(config).error(**inputs) <= TOLERANCE


@pytest.mark.parametrize("name", ["attention_mask", "encoder_attention_mask"])
def test_fully_masked_row_equals_an_unmasked_row(name: str, pair_of) -> None:
    config = small("continuous", cross_attention_dim=20, num_layers=1)
    inputs = inputs_for(config)
    pair = pair_of(config)
    keep = np.ones((BATCH, TOKENS if name == "attention_mask" else CONTEXT), np.int64)
    keep[1] = 0
    found, expected = pair.find(**inputs, **{name: keep}), pair.want(**inputs, **{name: keep})
    assert np.abs(found[0] - expected[0]).max() <= TOLERANCE
    # Float32 values near -10000 are 1e-3 apart: scores are rounded to that, and the last bit may round differently.
    assert np.abs(found[1] - expected[1]).max() <= 1e-3
    assert np.abs(found[1] - pair.find(**inputs)[1]).max() <= 1e-3


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_ada_norm_accepts_a_timestep_per_element(kind: str, pair_of) -> None:
    # diffusers takes one timestep, so it is called once per element.
    config = small(kind, norm_type="ada_norm", num_embeds_ada_norm=9, cross_attention_dim=20)
    pair = pair_of(config)
    inputs = inputs_for(config, timestep=np.array([0, 8, 3]), batch=3)
    each = [{name: value[i : i + 1] for name, value in inputs.items() if name != "timestep"} for i in range(3)]
    expected = [pair.want(**each[i], timestep=inputs["timestep"][i]) for i in range(3)]
    assert np.abs(pair.find(**inputs) - np.concatenate(expected)).max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_null_class_is_the_row_after_the_last_class(dtype: type, pair_of) -> None:
    config = small("patches", norm_type="ada_norm_zero", num_embeds_ada_norm=9)
    inputs = inputs_for(config, class_labels=np.array([9, 0], dtype))
    pair = pair_of(config)
    assert np.abs(pair.find(**inputs) - pair.want(**inputs)).max() <= TOLERANCE
    one = inputs | {"class_labels": inputs["class_labels"][:1], "timestep": inputs["timestep"][:1]}
    assert np.abs(pair.find(**one) - pair.want(**one)).max() <= TOLERANCE  # One label and timestep for both.


def test_positions_of_large_models_are_not_divided(pair_of) -> None:
    # diffusers' DiTTransformer2DModel, into which its own from_pretrained turns such files, does not divide positions.
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    config = small("patches", norm_type="ada_norm_zero", num_embeds_ada_norm=9, sample_size=128, patch_size=16)
    config |= {"attention_bias": True, "activation_fn": "gelu-approximate", "norm_elementwise_affine": False}
    images = reals(2, 3, 128, 128)
    inputs = inputs_for(config, hidden_states=images)
    pair = pair_of(config)
    assert pair.error(**inputs) <= TOLERANCE
    other = DiTTransformer2DModel(**config).eval()
    other.load_state_dict(pair.theirs.state_dict())
    with torch.no_grad():
        different = other(**to_torch(inputs), return_dict=False)[0].numpy()
    assert np.abs(different - pair.want(**inputs)).max() > 1e-2


@pytest.mark.parametrize("size", [(6, 10), (4, 8)])
def test_images_of_ada_norm_zero_need_not_be_square(size: tuple[int, int], pair_of) -> None:
    # diffusers arranges the patches of any image as a square; its own layers in the right order give the reference.
    config = small("patches", norm_type="ada_norm_zero", num_embeds_ada_norm=9)
    images = reals(2, 3, *size)
    inputs = inputs_for(config, hidden_states=images)
    pair = pair_of(config)
    model, rows, columns = pair.theirs, size[0] // 2, size[1] // 2

    def into_an_image(hidden_states: Any, timestep: Any, class_labels: Any, **_: Any) -> Any:
        conditioning = model.transformer_blocks[0].norm1.emb(timestep, class_labels, hidden_dtype=torch.float32)
        shift, scale = model.proj_out_1(torch.nn.functional.silu(conditioning)).chunk(2, dim=1)
        tokens = model.proj_out_2(model.norm_out(hidden_states) * (1 + scale[:, None]) + shift[:, None])
        patches = tokens.reshape(2, rows, columns, 2, 2, 5)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(2, 5, 2 * rows, 2 * columns)

    model._get_output_for_patched_inputs = into_an_image
    assert pair.error(**inputs) <= TOLERANCE


@pytest.mark.parametrize("kind", ["gated", "gated-text-image"])
def test_gligen_fuser_has_no_effect_without_objects(kind: str, pair_of) -> None:
    config = small("continuous", cross_attention_dim=20, attention_type=kind)
    pair = pair_of(config)
    inputs = inputs_for(config)
    assert pair.error(**inputs) <= TOLERANCE
    objects = {"gligen": {"objs": reals(2, 5, 20)}}
    assert pair.error(**inputs, cross_attention_kwargs=objects) <= TOLERANCE
    assert np.abs(pair.find(**inputs, cross_attention_kwargs=objects) - pair.find(**inputs)).max() > 1e-3


@pytest.mark.parametrize("kind", ["continuous", "discrete", "patches"])
def test_arrays_of_other_dtypes_are_converted(kind: str, pair_of) -> None:
    config = small(kind, cross_attention_dim=20, norm_type="ada_norm_zero", num_embeds_ada_norm=9)
    inputs = inputs_for(config)
    expected = pair_of(config).find(**inputs)
    wide = {name: value.astype(np.float64) for name, value in inputs.items() if value.dtype == np.float32}
    narrow = {name: value.astype(np.int32) for name, value in inputs.items() if value.dtype == np.int64}
    np.testing.assert_array_equal(pair_of(config).find(**inputs | wide | narrow), expected)


def test_output_is_an_object_or_a_tuple(pair_of) -> None:
    config = small("continuous")
    inputs = inputs_for(config)
    model = pair_of(config).ours
    output = model(**inputs)
    assert isinstance(output, Transformer2DModelOutput)
    assert output["sample"] is output.sample
    assert output[0] is output.sample
    (sample,) = model(**inputs, return_dict=False)
    np.testing.assert_array_equal(np.asarray(sample), np.asarray(output.sample))


def test_arguments_may_be_positional(pair_of) -> None:
    config = small("continuous", cross_attention_dim=20, norm_type="ada_norm", num_embeds_ada_norm=9)
    inputs = inputs_for(config)
    model = pair_of(config).ours
    keep = np.array([[1] * 15, [1] * 8 + [0] * 7])
    named = model(**inputs, attention_mask=keep).sample
    in_order = (inputs["hidden_states"], inputs["encoder_hidden_states"], inputs["timestep"], None, None, None, keep)
    np.testing.assert_array_equal(np.asarray(model(*in_order).sample), np.asarray(named))
