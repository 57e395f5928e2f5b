"""Reader and writer of diffusers' config.json of 2D transformers.

Source: diffusers 0.42.1, models/transformers/dit_transformer_2d.py and pixart_transformer_2d.py,
models/unets/unet_2d_condition.py and unet_2d_blocks.py, models/controlnets/controlnet.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxmodels.errors import ConfigError
from jaxmodels.ranges import Range, is_number, shorten_value
from jaxmodels.transformer2d.config import Transformer2DConfig

GENERAL = "Transformer2DModel"
VERSION = "0.42.1"  # Version of diffusers that has these fields.
PATCHED = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": None,
    "num_layers": 28,
    "dropout": 0.0,
    "norm_num_groups": 32,
    "attention_bias": True,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "upcast_attention": False,
    "norm_elementwise_affine": False,
}
# Arguments and defaults of the classes that replaced Transformer2DModel; diffusers ignores other keys.
SPLIT: Mapping[str, Mapping[str, Any]] = {
    "DiTTransformer2DModel": {**PATCHED, "sample_size": 32, "norm_type": "ada_norm_zero", "norm_eps": 1e-5},
    "PixArtTransformer2DModel": {
        **PATCHED,
        "out_channels": 8,
        "cross_attention_dim": 1152,
        "sample_size": 128,
        "norm_type": "ada_norm_single",
        "norm_eps": 1e-6,
        "interpolation_scale": None,
        "use_additional_conditions": None,
        "caption_channels": None,
        "attention_type": "default",
    },
}
# DiT never scales positions, independently of its sample size.
FIXED: Mapping[str, Mapping[str, Any]] = {"DiTTransformer2DModel": {"interpolation_scale": 1.0}}
UNETS = ("UNet2DConditionModel", "ControlNetModel")
UNET_DEFAULTS: Mapping[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "only_cross_attention": False,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "cross_attention_dim": 1280,
    "transformer_layers_per_block": 1,
    "reverse_transformer_layers_per_block": None,
    "attention_head_dim": 8,
    "num_attention_heads": None,
    "dual_cross_attention": False,
    "use_linear_projection": False,
    "upcast_attention": False,
    "attention_type": "default",
}
STAGES = 16  # Stages of a UNet; published UNets have four.
LAYER_LIMIT = 64  # Attentions in one block of a UNet; published UNets have two or three.


def read_model_config(values: Mapping[str, Any]) -> Transformer2DConfig:
    """Return the config of a folder with one 2D transformer; raises ConfigError for other models or wrong values."""
    name = values.get("_class_name", GENERAL)
    if name in SPLIT:
        defaults = SPLIT[name]
        arguments = {key: values.get(key, default) for key, default in defaults.items()}
        if arguments["norm_type"] != defaults["norm_type"]:
            raise ConfigError(
                f"{name}: norm_type is {shorten_value(arguments['norm_type'])}; wanted {defaults['norm_type']!r}"
            )
        return Transformer2DConfig.from_json({**arguments, **FIXED.get(name, {})})
    if name in UNETS:
        available = ", ".join(block_arguments(values))
        raise ConfigError(
            f"config.json is of a {name}, which holds several 2D transformers; give prefix, one of: {available}"
        )
    if name != GENERAL:
        known = ", ".join((GENERAL, *SPLIT, *UNETS))
        raise ConfigError(f"config.json: _class_name is {shorten_value(name)}; known: {known}")
    return Transformer2DConfig.from_json(values)


def dump_model_config(config: Transformer2DConfig) -> dict[str, Any]:
    """Return a ``config.json`` like diffusers' ``save_config``: class, version, all constructor arguments, sorted."""
    values = {"_class_name": GENERAL, "_diffusers_version": VERSION, **config.to_json()}
    if config.kind == "patches" and config.norm_type == "ada_norm_single" and config.num_embeds_ada_norm is None:
        # diffusers reads this folder as its PixArtTransformer2DModel, which refuses null here.
        del values["num_embeds_ada_norm"]
    return dict(sorted(values.items()))


def read_block_config(values: Mapping[str, Any], prefix: str) -> Transformer2DConfig:
    """Return the config of a 2D transformer inside a UNet, e.g. ``mid_block.attentions.0``; raises ConfigError."""
    name = values.get("_class_name")
    if name not in UNETS:
        raise ConfigError(
            f"config.json: _class_name is {shorten_value(name)}, and the config of a part of it is not known; known: "
            f"{', '.join(UNETS)}; give config"
        )
    arguments = block_arguments(values)
    if prefix not in arguments:
        available = ", ".join(arguments) or "none"
        raise ConfigError(f"prefix {prefix!r}: no 2D transformer there; this {name} has: {available}")
    return Transformer2DConfig.from_json(arguments[prefix])


def block_arguments(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of all 2D transformers inside a UNet, by prefix."""
    values = {key: values.get(key, default) for key, default in UNET_DEFAULTS.items()}
    channels = values["block_out_channels"]
    if not isinstance(channels, list | tuple) or not 1 <= len(channels) <= STAGES or not all(map(_is_count, channels)):
        raise ConfigError(
            f"config.json: block_out_channels is {shorten_value(channels)}; wanted a list of integers, one for "
            f"each of 1 to {STAGES} blocks"
        )
    stages = len(channels)
    # A UNet's attention_head_dim is the number of heads: https://github.com/huggingface/diffusers/issues/2011
    heads_name = "num_attention_heads" if values["num_attention_heads"] else "attention_head_dim"
    heads = _per_stage(values, heads_name, stages)
    contexts = _per_stage(values, "cross_attention_dim", stages)
    layers = _per_stage(values, "layers_per_block", stages)
    only_context = _per_stage(values, "only_cross_attention", stages, kind=bool)
    depths = _per_stage(values, "transformer_layers_per_block", stages, may_nest=True)
    up_depths = depths[::-1]
    if values["reverse_transformer_layers_per_block"] is not None:
        up_depths = _per_stage(values, "reverse_transformer_layers_per_block", stages, may_nest=True)
    if too_many := [count for count in layers if count > LAYER_LIMIT]:
        raise ConfigError(f"config.json: layers_per_block has {too_many[0]}; wanted at most {LAYER_LIMIT}")

    def attentions(
        block: str, kind: Any, block_type: str, count: int, stage: int, depth: Any
    ) -> Iterator[tuple[str, Any]]:
        if not isinstance(kind, str) or kind.removeprefix("UNetRes") != block_type:
            return
        is_context_only = only_context[stage] and block != "mid_block"
        for number in range(count):
            arguments = {
                "num_attention_heads": heads[stage],
                "attention_head_dim": channels[stage] // heads[stage],
                "in_channels": channels[stage],
                "num_layers": 1,
                "cross_attention_dim": contexts[stage],
                "norm_num_groups": values["norm_num_groups"],
            }
            name = f"{block}.attentions.{number}"
            if values["dual_cross_attention"]:
                yield f"{name}.transformers.0", arguments
                yield f"{name}.transformers.1", arguments
                continue
            here = depth if isinstance(depth, int) else depth[number] if number < len(depth) else None
            if here is None:
                raise ConfigError(
                    f"config.json: transformer_layers_per_block has {shorten_value(depth)} for {count} attentions"
                )
            arguments |= {
                name: values[name] for name in ("use_linear_projection", "upcast_attention", "attention_type")
            }
            yield name, {**arguments, "num_layers": here, "only_cross_attention": is_context_only}

    arguments_by_prefix: dict[str, dict[str, Any]] = {}
    for stage, kind in enumerate(_kinds(values, "down_block_types", stages)):
        arguments_by_prefix |= attentions(
            f"down_blocks.{stage}", kind, "CrossAttnDownBlock2D", layers[stage], stage, depths[stage]
        )
    last = stages - 1
    arguments_by_prefix |= attentions(
        "mid_block", values["mid_block_type"], "UNetMidBlock2DCrossAttn", 1, last, depths[last]
    )
    for index, kind in enumerate(_kinds(values, "up_block_types", stages)):
        stage = last - index
        arguments_by_prefix |= attentions(
            f"up_blocks.{index}", kind, "CrossAttnUpBlock2D", layers[stage] + 1, stage, up_depths[index]
        )
    return arguments_by_prefix


def _per_stage(
    values: Mapping[str, Any], name: str, stages: int, *, kind: type = int, may_nest: bool = False
) -> list[Any]:
    """Return one value for each block of the way down; a single value is repeated.

    Args:
        kind: type of a value, int or bool.
        may_nest: whether a block may have a list of values.
    """
    value = values[name]
    per_stage = list(value) if isinstance(value, list | tuple) else [value] * stages
    flat = [entry for part in per_stage for entry in (part if may_nest and isinstance(part, list | tuple) else [part])]
    if len(per_stage) != stages or not all(isinstance(x, bool) if kind is bool else _is_count(x) for x in flat):
        expected = "true or false" if kind is bool else "a positive integer"
        nested = " (or of a list of them)" if may_nest else ""
        raise ConfigError(
            f"config.json: {name} is {shorten_value(value)}; wanted {expected}, or a list of one{nested} for each "
            f"of {stages} blocks"
        )
    return per_stage


def _kinds(values: Mapping[str, Any], name: str, stages: int) -> list[Any]:
    kinds = values[name]
    if not isinstance(kinds, list | tuple) or len(kinds) != stages:
        raise ConfigError(f"config.json: {name} is {shorten_value(kinds)}; wanted a list of {stages} names")
    return list(kinds)


def _is_count(value: Any) -> bool:
    return is_number(value, _COUNT, integer=True)


_COUNT = Range(1, 1 << 62)  # Channels, heads or layers, which `Transformer2DConfig` limits further.
