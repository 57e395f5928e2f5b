"""Invalid configs and arguments are refused before compilation, with the found and the accepted values."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxmodels.errors import ConfigError, JaxModelsError
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
from tests.parity.transformer2d.conftest import model_of

CHANNELS: dict[str, Any] = {"in_channels": 32}
VECTORS: dict[str, Any] = {"num_vector_embeds": 5, "sample_size": 4}
PATCHES: dict[str, Any] = {"in_channels": 4, "patch_size": 2, "sample_size": 8}
ADA: dict[str, Any] = {"norm_type": "ada_norm", "num_embeds_ada_norm": 9}
SINGLE_NORM = {"norm_type": "ada_norm_single"}
ZERO_NORM = {"norm_type": "ada_norm_zero"}
ONE_HEAD = {**PATCHES, **SINGLE_NORM, "num_attention_heads": 1}
# Name: constructor arguments, words of the message in any case, whether diffusers refuses them too.
CONFIGS: Mapping[str, tuple[dict[str, Any], str, bool]] = {
    "nothing": ({}, "in_channels num_vector_embeds patch_size", True),
    "patches without channels": ({**SINGLE_NORM, "patch_size": 2, "sample_size": 8}, "in_channels patches", True),
    "continuous and discrete": ({**CHANNELS, **VECTORS}, "in_channels num_vector_embeds continuous discrete", True),
    "patches and discrete": ({**PATCHES, **VECTORS, **SINGLE_NORM}, "num_vector_embeds patches discrete", True),
    "patches with layer norm": (PATCHES, "patches layer_norm ada_norm_zero", True),
    "patches with ada norm": ({**PATCHES, **ADA}, "patches ada_norm", False),
    "patches without classes": ({**PATCHES, **ZERO_NORM}, "patches num_embeds_ada_norm", True),
    "ada norm without timesteps": ({**CHANNELS, "norm_type": "ada_norm"}, "continuous num_embeds_ada_norm", True),
    "discrete without classes": ({**VECTORS, **ZERO_NORM}, "discrete num_embeds_ada_norm", True),
    "discrete without size": ({"num_vector_embeds": 5}, "discrete sample_size", True),
    "patches without size": ({**SINGLE_NORM, "in_channels": 4, "patch_size": 2}, "patches sample_size", True),
    "channels that groups do not divide": ({"in_channels": 33}, "continuous 33 32 norm_num_groups", True),
    "other output channels": ({**CHANNELS, "out_channels": 16}, "continuous out_channels 16 32", False),
    "one output channel of a linear projection": (
        {**CHANNELS, "out_channels": 1, "use_linear_projection": True},
        "continuous out_channels",
        False,
    ),
    "ada norm continuous": ({**CHANNELS, **ADA, "norm_type": "ada_norm_continuous"}, "ada_norm_continuous", True),
    "i2vgen": ({**CHANNELS, "norm_type": "layer_norm_i2vgen"}, "continuous layer_norm_i2vgen", False),
    "unknown norm": ({**CHANNELS, "norm_type": "rms_norm"}, "continuous rms_norm layer_norm", False),
    "unknown activation": ({**CHANNELS, "activation_fn": "relu"}, "continuous relu geglu", True),
    "activation in capitals": ({**CHANNELS, "activation_fn": "GEGLU"}, "GEGLU geglu", True),
    "gated without cross": ({**CHANNELS, "attention_type": "gated"}, "continuous gated cross_attention_dim", True),
    "unknown attention": ({**CHANNELS, "attention_type": "fast"}, "continuous fast gated", False),
    "positions need four": ({**ONE_HEAD, "attention_head_dim": 6}, "patches inner_dim 6 4", False),
    "conditions need three": (
        {**ONE_HEAD, "sample_size": 128, "attention_head_dim": 8},
        "patches inner_dim 8 3",
        False,
    ),
    "no heads": ({**CHANNELS, "num_attention_heads": 0}, "num_attention_heads 0", False),
    "no layers": ({**CHANNELS, "num_layers": 0}, "num_layers 0", False),
    "dropout above one": ({**CHANNELS, "dropout": 1.5}, "dropout 1.5", True),
    "one class": ({**VECTORS, "num_vector_embeds": 1}, "discrete num_vector_embeds", False),
    "image smaller than a patch": ({**PATCHES, **SINGLE_NORM, "patch_size": 16}, "patches sample_size 8 16", False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_invalid_config_is_refused(name: str) -> None:
    arguments, words, _ = CONFIGS[name]
    for build in (
        lambda: Transformer2DConfig(**arguments),
        lambda: Transformer2DConfig.from_json(arguments),
        lambda: Transformer2DModel(**arguments, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ConfigError) as refusal:
            build()
        for part in words.split():
            assert part.lower() in str(refusal.value).lower()


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name][2]])
def test_configs_marked_as_refused_are_refused_by_diffusers(name: str, theirs_of) -> None:
    theirs_of({"in_channels": 32})  # Skips without diffusers; a valid config builds.
    with pytest.raises(Exception, match=r".") as refusal:
        theirs_of(CONFIGS[name][0])
    errors = (NotImplementedError, ValueError, AssertionError, TypeError, UnboundLocalError, RuntimeError)
    assert isinstance(refusal.value, errors)


def ids(*shape: int, low: int = 0, high: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(low, high, shape)


def reals(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
IMAGES = {"in_channels": 3, "patch_size": 2, "sample_size": 8}
SINGLE = {**IMAGES, "norm_type": "ada_norm_single"}
CONTINUOUS = {"in_channels": 16, "norm_num_groups": 4}
DISCRETE = {"num_vector_embeds": 11, "sample_size": 4}
MODELS: Mapping[str, dict[str, Any]] = {
    "continuous": {**CONTINUOUS, "cross_attention_dim": 20},
    "continuous ada": {**CONTINUOUS, **ADA},
    "discrete": {**DISCRETE, "cross_attention_dim": 20},
    "discrete ada": {**DISCRETE, **ADA},
    "zero": {**IMAGES, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 9},
    "single": SINGLE,
    "conditions": {**SINGLE, "use_additional_conditions": True, "cross_attention_dim": 24, "caption_channels": 18},
}
CALLS: Mapping[str, dict[str, Any]] = {
    "continuous": {"hidden_states": reals(2, 16, 3, 5), "encoder_hidden_states": reals(2, 7, 20)},
    "continuous ada": {"hidden_states": reals(2, 16, 3, 5), "timestep": np.array([0, 8])},
    "discrete": {"hidden_states": ids(2, 13), "encoder_hidden_states": reals(2, 7, 20)},
    "discrete ada": {"hidden_states": ids(2, 13), "timestep": np.array(3)},
    "zero": {"hidden_states": reals(2, 3, 8, 8), "timestep": np.array([5, 6]), "class_labels": np.array([0, 9])},
    "single": {"hidden_states": reals(2, 3, 8, 8), "timestep": np.array([5, 6])},
    "conditions": {
        "hidden_states": reals(2, 3, 8, 8),
        "timestep": np.array([5, 6]),
        "encoder_hidden_states": reals(2, 7, 18),
        "added_cond_kwargs": {"resolution": reals(2, 2), "aspect_ratio": reals(2, 1)},
    },
}
# Name: model, replaced arguments (None removes one), words of the message.
WRONG: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "lists": ("continuous", {"hidden_states": [[1.0, 2.0]]}, "hidden_states"),
    "nothing": ("continuous", {"hidden_states": None}, "hidden_states"),
    "an image without its batch": ("continuous", {"hidden_states": reals(16, 3, 5)}, "hidden_states|16, 3, 5"),
    "other channels": ("continuous", {"hidden_states": reals(2, 15, 3, 5)}, "hidden_states|15|16"),
    "channels last": ("continuous", {"hidden_states": reals(2, 3, 5, 16)}, "hidden_states|3|16"),
    "whole numbers for an image": ("continuous", {"hidden_states": ids(2, 16, 3, 5)}, "hidden_states|int"),
    "reals for ids": ("discrete", {"hidden_states": reals(2, 13)}, "hidden_states|float"),
    "an id too large": ("discrete", {"hidden_states": ids(2, 13, high=9) + 3}, "hidden_states|11"),
    "a negative id": ("discrete", {"hidden_states": ids(2, 13) - 1}, "hidden_states|-1"),
    "too many ids": ("discrete", {"hidden_states": ids(2, 17)}, "hidden_states|17|16"),
    "ids as an image": ("discrete", {"hidden_states": ids(2, 4, 4)}, "hidden_states|4, 4"),
    "encoder width": ("continuous", {"encoder_hidden_states": reals(2, 7, 21)}, "encoder_hidden_states|21|20"),
    "encoder batch": ("continuous", {"encoder_hidden_states": reals(1, 7, 20)}, "encoder_hidden_states|1|2"),
    "an encoder without tokens": ("continuous", {"encoder_hidden_states": reals(2, 0, 20)}, "encoder_hidden_states"),
    "encoder rank": ("continuous", {"encoder_hidden_states": reals(2, 20)}, "encoder_hidden_states|2, 20"),
    "no encoder where widths differ": ("continuous", {"encoder_hidden_states": None}, "encoder_hidden_states|20"),
    "attention mask length": ("continuous", {"attention_mask": np.ones((2, 14))}, "attention_mask|14|15"),
    "attention mask batch": ("continuous", {"attention_mask": np.ones((3, 15))}, "attention_mask|3|2"),
    "encoder mask length": ("continuous", {"encoder_attention_mask": np.ones((2, 8))}, "encoder_attention_mask|8|7"),
    "encoder mask rank": ("continuous", {"encoder_attention_mask": np.ones(7)}, "encoder_attention_mask|7"),
    "attention mask of other heads": ("continuous", {"attention_mask": reals(6, 15, 15)}, "attention_mask|6"),
    "discrete mask length": ("discrete", {"attention_mask": np.ones((2, 16))}, "attention_mask|16|13"),
    "no timestep": ("continuous ada", {"timestep": None}, "timestep|ada_norm"),
    "a timestep too late": ("continuous ada", {"timestep": np.array([0, 9])}, "timestep|9|8"),
    "one timestep too late": ("discrete ada", {"timestep": 100}, "timestep|100|9"),
    "a negative timestep": ("continuous ada", {"timestep": np.array(-1)}, "timestep|-1"),
    "a timestep between two": ("continuous ada", {"timestep": np.array([0.5, 1.0])}, "timestep|float"),
    "timesteps of another batch": ("continuous ada", {"timestep": np.array([1, 2, 3])}, "timestep|3|2"),
    "text for a timestep": ("continuous ada", {"timestep": "3"}, "timestep"),
    "no timestep for classes": ("zero", {"timestep": None}, "timestep"),
    "no labels": ("zero", {"class_labels": None}, "class_labels"),
    "a class too many": ("zero", {"class_labels": np.array([0, 10])}, "class_labels|10|9"),
    "a negative class": ("zero", {"class_labels": np.array([0, -2])}, "class_labels|-2"),
    "labels as one-hot rows": ("zero", {"class_labels": np.eye(10)[:2]}, "class_labels"),
    "real labels": ("zero", {"class_labels": np.array([0.0, 1.0])}, "class_labels|float"),
    "labels of another batch": ("zero", {"class_labels": np.array([0, 1, 2])}, "class_labels|3|2"),
    "no timestep for patches": ("single", {"timestep": None}, "timestep"),
    "timesteps of another batch for patches": ("single", {"timestep": np.array([1, 2, 3])}, "timestep|3|2"),
    "an image below one patch": ("single", {"hidden_states": reals(2, 3, 8, 1)}, "hidden_states|1|2"),
    "other channels of patches": ("single", {"hidden_states": reals(2, 4, 8, 8)}, "hidden_states|4|3"),
    "no conditions": ("conditions", {"added_cond_kwargs": None}, "added_cond_kwargs|resolution"),
    "half the conditions": (
        "conditions",
        {"added_cond_kwargs": {"resolution": reals(2, 2)}},
        "added_cond_kwargs|aspect_ratio",
    ),
    "no captions": ("conditions", {"encoder_hidden_states": None}, "encoder_hidden_states"),
    "caption width": ("conditions", {"encoder_hidden_states": reals(2, 7, 24)}, "encoder_hidden_states|24|18"),
    "unknown keyword arguments": (
        "continuous",
        {"cross_attention_kwargs": {"temperature": 1.0, "ip_adapter_masks": None}},
        "cross_attention_kwargs|temperature|ip_adapter_masks",
    ),
    "a mask in the keyword arguments": (
        "continuous",
        {"cross_attention_kwargs": {"attention_mask": np.ones((2, 15))}},
        "cross_attention_kwargs|attention_mask",
    ),
    "objects without a fuser": (
        "continuous",
        {"cross_attention_kwargs": {"gligen": {"objs": reals(2, 3, 20)}}},
        "gligen|attention_type",
    ),
    "text for an image": ("continuous", {"hidden_states": "image"}, "hidden_states"),
}


@pytest.fixture(scope="module")
def models() -> Callable[[str], Transformer2DModel]:
    return cache(lambda name: model_of(HEADS | MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_valid_arguments_are_accepted(name: str, models) -> None:
    assert np.isfinite(np.asarray(models(name)(**CALLS[name]).sample)).all()


@pytest.mark.parametrize("name", WRONG)
def test_invalid_argument_is_refused_by_name(name: str, models) -> None:
    which, wrong, words = WRONG[name]
    with pytest.raises(ValueError, match=r".") as refusal:
        models(which)(**CALLS[which] | wrong)
    assert isinstance(refusal.value, JaxModelsError)  # Not an error of NumPy or XLA.
    for part in words.split("|"):
        assert re.search(rf"(?<![0-9]){re.escape(part)}", str(refusal.value)), str(refusal.value)


PREPARED = [
    name
    for name, (_, wrong, _) in WRONG.items()
    if not {"hidden_states", "attention_mask", "encoder_attention_mask", "cross_attention_kwargs"} & wrong.keys()
    # Preparation reads the batch size from its arguments.
    and "batch" not in name
    # A later call compares the widths.
    and name != "no encoder where widths differ"
]


@pytest.mark.parametrize("name", PREPARED)
def test_invalid_argument_is_refused_by_prepare(name: str, models) -> None:
    which, wrong, words = WRONG[name]
    steady = ("encoder_hidden_states", "timestep", "added_cond_kwargs", "class_labels")
    arguments = {key: value for key, value in (CALLS[which] | wrong).items() if key in steady}
    with pytest.raises(ValueError, match=words.split("|")[0]) as refusal:
        models(which).prepare(**arguments)
    assert isinstance(refusal.value, JaxModelsError)


def test_prepared_arguments_must_not_be_repeated(models) -> None:
    call = CALLS["continuous"]
    conditioning = models("continuous").prepare(encoder_hidden_states=call["encoder_hidden_states"])
    with pytest.raises(JaxModelsError, match="encoder_hidden_states"):
        models("continuous")(**call, conditioning=conditioning)


def test_conditioning_without_the_inputs_of_the_norms_is_refused(models) -> None:
    # Without its modulations, an ada_norm model would use unmodulated norms.
    other = models("continuous").prepare(encoder_hidden_states=CALLS["continuous"]["encoder_hidden_states"])
    for name in ("continuous ada", "single", "zero"):
        with pytest.raises(JaxModelsError, match=r"timestep|modulations"):
            models(name)(CALLS[name]["hidden_states"], conditioning=other)
