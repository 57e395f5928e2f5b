"""ACT weights: LeRobot's tensor names and layouts, and their preparation for serving."""

from collections.abc import Iterable, Mapping
from typing import Any

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
from jaxmodels.layers.vision import RESNETS, plan_blocks
from jaxmodels.policies.act.config import ActConfig

# On a Zen 4 server, 60x80x128 (10 MB) is 1.6 times faster with Winograd, 120x160x64 (20 MB) 1.9 times slower.
WINOGRAD_BYTES = 12 << 20
WINOGRAD_CHANNELS = 64


def prepare(config: ActConfig, weights: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return the weights for serving, on a platform of JAX (``cpu``).

    The encoder of the VAE and the kernel of the latent, which is zeros in serving, are left out. On a CPU, 3x3 kernels
    whose planes fit into the cache are transformed for Winograd's convolution (jaxmodels/layers/vision.py).
    """
    serving = {
        name: array
        for name, array in weights.items()
        if not name.startswith("latent_encoder.") and name != "latent_in.kernel"
    }
    if platform != "cpu" or not config.cameras or config.vision_backbone not in RESNETS:
        return serving
    # All cameras share the kernels, so the largest camera decides.
    height, width = map(max, zip(*config.frames, strict=True))
    for block in plan_blocks(config.vision_backbone, config.replace_final_stride_with_dilation):
        for i, (inputs, size, stride, dilation) in enumerate(block.convolutions):
            rows, columns = -(-height // block.scale), -(-width // block.scale)
            fits = vision.count_winograd_bytes(rows, columns, inputs) <= WINOGRAD_BYTES
            if (size, stride, dilation) == (3, 1, 1) and inputs >= WINOGRAD_CHANNELS and fits:
                name = f"backbone.stages.{block.stage}.{block.position}.convolutions.{i}.kernel"
                serving[name] = vision.transform_winograd_kernel(serving[name])
    return serving


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
