"""ACT weights: LeRobot's tensor names and layouts, and their folding for serving.

Everything that does not depend on the observation is computed once per checkpoint, in float32:

- frozen batch norms become part of the convolutions before them;
- query, key and value matrices become one matrix; positions times the matrix become a table, so that
  ``(x + positions) W`` is ``x W + table``; the scale of the scores becomes part of the queries;
- the latent is zero at inference, so its token is a bias;
- the first decoder layer starts from zeros, so the result of its self-attention is one constant vector, and the
  queries of its cross-attention are constants;
- on a CPU, 3x3 convolutions whose intermediates fit the cache use Winograd's kernels (jaxmodels/layers/vision.py).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxmodels.checkpoints.backbones import backbone_tensor
from jaxmodels.checkpoints.tensor_layouts import (
    JOINT_LINEAR,
    JOINT_VECTOR,
    POINTWISE,
    SAME,
    Tensor,
    module_tensor,
)
from jaxmodels.layers import vision
from jaxmodels.layers.embeddings import sinusoidal_2d
from jaxmodels.layers.norm import EPSILON
from jaxmodels.layers.vision import RESNETS, plan_blocks
from jaxmodels.policies.act.config import ActConfig

Arrays = Mapping[str, np.ndarray]

# On a Zen 4 server, 60x80x128 (10 MB) is 1.6 times faster with Winograd, 120x160x64 (20 MB) 1.9 times slower.
WINOGRAD_BYTES = 12 << 20
WINOGRAD_CHANNELS = 64


def fold(config: ActConfig, weights: Arrays, platform: str) -> dict[str, np.ndarray]:
    """Return serving weights by name, with constant parts folded, for JAX's name of a platform (``cpu``)."""
    folded: dict[str, np.ndarray] = {}
    if config.cameras:
        folded |= _backbone(config, weights, platform)
    folded |= _select_weights(weights, "image_in", "state_in", "environment_in", "action_out", "decoder.norm")
    folded["latent"] = weights["latent_in.bias"]
    dilated, width = config.replace_final_stride_with_dilation, config.dim_model
    maps = [vision.measure_feature_map(config.vision_backbone, frame, dilated) for frame in config.frames]
    tables = [sinusoidal_2d(rows, columns, width).reshape(-1, width) for rows, columns in maps]
    positions = np.concatenate((weights["vector_positions"], *tables))
    for i in range(config.n_encoder_layers):
        layer = f"encoder.layers.{i}"
        folded |= _joint_projection(config, weights, f"{layer}.attention", positions)
        parts = ("attention.out", "feed_forward", "norm1", "norm2")
        folded |= _select_weights(weights, *(f"{layer}.{part}" for part in parts))
    if config.pre_norm:
        folded |= _select_weights(weights, "encoder.norm")
    for i in range(config.n_decoder_layers):
        folded |= _decoder_layer(config, weights, f"decoder.layers.{i}", positions, is_first=i == 0)
    return folded


def _select_weights(weights: Arrays, *modules: str) -> dict[str, np.ndarray]:
    """Return the weights of these modules as they are."""
    prefixes = tuple(f"{module}." for module in modules)
    return {name: array for name, array in weights.items() if name.startswith(prefixes)}


def _joint_projection(config: ActConfig, weights: Arrays, name: str, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Return query, key and value in one matrix, and a table of positions and biases for all three."""
    scale = _score_scale(config)
    kernels = [weights[f"{name}.{part}.kernel"] for part in ("query", "key", "value")]
    biases = [weights[f"{name}.{part}.bias"] for part in ("query", "key", "value")]
    query = (positions @ kernels[0] + biases[0]) * scale
    key = positions @ kernels[1] + biases[1]
    value = np.broadcast_to(biases[2], query.shape)
    return {
        f"{name}.joint.kernel": np.concatenate((kernels[0] * scale, *kernels[1:]), axis=1),
        f"{name}.joint.table": np.concatenate((query, key, value), axis=1),
    }


def _decoder_layer(
    config: ActConfig, weights: Arrays, layer: str, positions: np.ndarray, *, is_first: bool
) -> dict[str, np.ndarray]:
    queries = weights["action_queries"]
    cross = f"{layer}.cross_attention"
    scale = _score_scale(config)
    query = {"kernel": weights[f"{cross}.query.kernel"] * scale}
    query["table"] = queries @ query["kernel"] + weights[f"{cross}.query.bias"] * scale
    folded = {
        f"{cross}.memory.kernel": np.concatenate(
            (weights[f"{cross}.key.kernel"], weights[f"{cross}.value.kernel"]), axis=1
        ),
        f"{cross}.memory.table": np.concatenate(
            (
                positions @ weights[f"{cross}.key.kernel"] + weights[f"{cross}.key.bias"],
                np.broadcast_to(weights[f"{cross}.value.bias"], positions.shape),
            ),
            axis=1,
        ),
        **_select_weights(weights, f"{cross}.out", f"{layer}.feed_forward", f"{layer}.norm2", f"{layer}.norm3"),
    }
    if is_first:
        start = _first_self_attention(config, weights, layer)
        normed = _layer_norm(start, weights, f"{layer}.norm2") if config.pre_norm else start
        return {**folded, "start": start, f"{cross}.query.table": normed @ query["kernel"] + query["table"]}
    return {
        **folded,
        **{f"{cross}.query.{part}": array for part, array in query.items()},
        **_joint_projection(config, weights, f"{layer}.self_attention", queries),
        **_select_weights(weights, f"{layer}.self_attention.out", f"{layer}.norm1"),
    }


def _first_self_attention(config: ActConfig, weights: Arrays, layer: str) -> np.ndarray:
    """Return the output of the first layer's self-attention and norm for zeros: one row, (d,)."""
    attention = f"{layer}.self_attention"
    value = weights[f"{attention}.value.bias"]
    if config.pre_norm:  # The norm of zeros is its bias.
        value = weights[f"{layer}.norm1.bias"] @ weights[f"{attention}.value.kernel"] + value
    out = value @ weights[f"{attention}.out.kernel"] + weights[f"{attention}.out.bias"]
    return out if config.pre_norm else _layer_norm(out, weights, f"{layer}.norm1")


def _layer_norm(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
    return centred / deviation * weights[f"{name}.scale"] + weights[f"{name}.bias"]


def _score_scale(config: ActConfig) -> np.float32:
    return np.float32(1 / math.sqrt(config.dim_model // config.n_heads))


def _backbone(config: ActConfig, weights: Arrays, platform: str) -> dict[str, np.ndarray]:
    if config.vision_backbone not in RESNETS:
        return _select_weights(weights, "backbone")
    folded = _fold_norm(weights, "backbone.stem", "backbone.stem_norm")
    # All cameras share the kernels, so the largest camera decides.
    height, width = map(max, zip(*config.frames, strict=True))
    for block in plan_blocks(config.vision_backbone, config.replace_final_stride_with_dilation):
        name = f"backbone.stages.{block.stage}.{block.position}"
        for i, (inputs, size, stride, dilation) in enumerate(block.convolutions):
            entry = _fold_norm(weights, f"{name}.convolutions.{i}", f"{name}.norms.{i}")
            rows, columns = -(-height // block.scale), -(-width // block.scale)
            fits = vision.count_winograd_bytes(rows, columns, inputs) <= WINOGRAD_BYTES
            is_plain = (size, stride, dilation) == (3, 1, 1) and inputs >= WINOGRAD_CHANNELS
            if platform == "cpu" and is_plain and fits:
                key = f"{name}.convolutions.{i}.kernel"
                entry[key] = vision.transform_winograd_kernel(entry[key])
            folded |= entry
        if block.projects:
            folded |= _fold_norm(weights, f"{name}.skip", f"{name}.skip_norm")
    return folded


def _fold_norm(weights: Arrays, convolution: str, norm: str) -> dict[str, np.ndarray]:
    parts: dict[str, Any] = {part: weights[f"{norm}.{part}"] for part in ("scale", "bias", "mean", "variance")}
    factor = parts["scale"] / np.sqrt(parts["variance"] + np.float32(EPSILON))
    return {
        f"{convolution}.kernel": weights[f"{convolution}.kernel"] * factor,
        f"{convolution}.bias": parts["bias"] - parts["mean"] * factor,
    }


# Our prefix to theirs, for linear layers outside the transformer.
LINEARS = {
    "latent_in": "encoder_latent_input_proj",
    "state_in": "encoder_robot_state_input_proj",
    "environment_in": "encoder_env_state_input_proj",
    "action_out": "action_head",
    "latent_encoder.state_in": "vae_encoder_robot_state_input_proj",
    "latent_encoder.action_in": "vae_encoder_action_input_proj",
    "latent_encoder.latent_out": "vae_encoder_latent_output_proj",
}
SINGLE = {
    "vector_positions": "encoder_1d_feature_pos_embed.weight",
    "action_queries": "decoder_pos_embed.weight",
    "latent_encoder.class_token": "vae_encoder_cls_embed.weight",
    "latent_encoder.positions": "vae_encoder_pos_enc",
}
STACKS = {"encoder": "encoder", "decoder": "decoder", "latent_encoder.encoder": "vae_encoder"}
ATTENTIONS = {"attention": "self_attn", "self_attention": "self_attn", "cross_attention": "multihead_attn"}
# LeRobot's tensor of query, key and value is listed under the query.
SECONDARY = ("key.kernel", "key.bias", "value.kernel", "value.bias")


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """Return LeRobot's tensors for our weights of one config."""
    return tuple(_tensor(name) for name in names if not name.endswith(SECONDARY))


def _tensor(name: str) -> Tensor:
    prefix = name.rpartition(".")[0]
    if name in SINGLE:
        return Tensor(f"model.{SINGLE[name]}", (name,), SAME)
    if prefix == "image_in":
        return module_tensor("model.encoder_img_feat_input_proj", name, POINTWISE)
    if prefix in LINEARS:
        return module_tensor(f"model.{LINEARS[prefix]}", name)
    if name.startswith("backbone."):
        prefix = "backbone."
        return backbone_tensor(name.removeprefix(prefix), ours=prefix, theirs=f"model.{prefix}")
    stack = next(ours for ours in sorted(STACKS, key=len, reverse=True) if name.startswith(ours + "."))
    return _transformer(STACKS[stack], name, name.removeprefix(stack + "."))


def _transformer(stack: str, name: str, rest: str) -> Tensor:
    parts = rest.split(".")
    last = parts[-1]
    if parts[0] == "norm":
        return module_tensor(f"model.{stack}.norm", name)
    layer = f"model.{stack}.layers.{parts[1]}"
    part = parts[2]
    if part.startswith("norm"):
        return module_tensor(f"{layer}.{part}", name)
    if part == "feed_forward":
        return module_tensor(f"{layer}.{'linear1' if parts[3] == 'up' else 'linear2'}", name)
    attention = f"{layer}.{ATTENTIONS[part]}"
    if parts[3] == "out":
        return module_tensor(f"{attention}.out_proj", name)
    base = name.removesuffix(f"query.{last}")
    ours = tuple(f"{base}{which}.{last}" for which in ("query", "key", "value"))
    if last == "kernel":
        return Tensor(f"{attention}.in_proj_weight", ours, JOINT_LINEAR)
    return Tensor(f"{attention}.in_proj_bias", ours, JOINT_VECTOR)
