"""LeRobot's name and layout for every weight of an ACT policy.

Our own small backbone has no counterpart there; its tensors keep our names under ``model.backbone``.
"""

from collections.abc import Iterable

from jaxmodels.checkpoints.backbone_names import backbone_tensor
from jaxmodels.checkpoints.layouts import (
    JOINT_LINEAR,
    JOINT_VECTOR,
    LINEAR,
    POINTWISE,
    SAME,
    Tensor,
)

# our prefix -> theirs, for linear layers outside the transformer
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
    "image_in.bias": "encoder_img_feat_input_proj.bias",
}
STACKS = {"encoder": "encoder", "decoder": "decoder", "latent_encoder.encoder": "vae_encoder"}
ATTENTIONS = {"attention": "self_attn", "self_attention": "self_attn", "cross_attention": "multihead_attn"}
# Query, key and value lie in one tensor of theirs, which is listed under the query.
SECONDARY = ("key.kernel", "key.bias", "value.kernel", "value.bias")


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """The table for the weights of one config, given our names of them."""
    return tuple(_tensor(name) for name in names if not name.endswith(SECONDARY))


def _tensor(name: str) -> Tensor:
    prefix, _, last = name.rpartition(".")
    if name in SINGLE:
        return Tensor(f"model.{SINGLE[name]}", (name,), SAME)
    if name == "image_in.kernel":
        return Tensor("model.encoder_img_feat_input_proj.weight", (name,), POINTWISE)
    if prefix in LINEARS:
        return _linear(LINEARS[prefix], name, last)
    if name.startswith("backbone."):
        prefix = "backbone."
        return backbone_tensor(name.removeprefix(prefix), ours=prefix, theirs=f"model.{prefix}")
    stack = next(ours for ours in sorted(STACKS, key=len, reverse=True) if name.startswith(ours + "."))
    return _transformer(STACKS[stack], name, name.removeprefix(stack + "."))


def _linear(theirs: str, name: str, last: str) -> Tensor:
    return (
        Tensor(f"model.{theirs}.weight", (name,), LINEAR)
        if last == "kernel"
        else Tensor(f"model.{theirs}.bias", (name,), SAME)
    )


def _transformer(stack: str, name: str, rest: str) -> Tensor:
    parts = rest.split(".")
    last = parts[-1]
    if parts[0] == "norm":
        return Tensor(f"model.{stack}.norm.{'weight' if last == 'scale' else 'bias'}", (name,), SAME)
    layer = f"{stack}.layers.{parts[1]}"
    part = parts[2]
    if part.startswith("norm"):
        return Tensor(f"model.{layer}.{part}.{'weight' if last == 'scale' else 'bias'}", (name,), SAME)
    if part == "feed_forward":
        return _linear(f"{layer}.{'linear1' if parts[3] == 'up' else 'linear2'}", name, last)
    attention = f"{layer}.{ATTENTIONS[part]}"
    if parts[3] == "out":
        return _linear(f"{attention}.out_proj", name, last)
    base = name.removesuffix(f"query.{last}")
    ours = tuple(f"{base}{which}.{last}" for which in ("query", "key", "value"))
    if last == "kernel":
        return Tensor(f"model.{attention}.in_proj_weight", ours, JOINT_LINEAR)
    return Tensor(f"model.{attention}.in_proj_bias", ours, JOINT_VECTOR)
