"""The config of a small ACT that a CPU can train: 0.6 M parameters for one 96x96 camera."""

from jaxmodels.data.episodes import Episodes
from jaxmodels.features import ACTION, STATE, Feature
from jaxmodels.policies.act.config import SMALL_CNN, ActConfig


def small_act(episodes: Episodes, *, chunk: int = 20, action_steps: int = 5) -> ActConfig:
    """A config for these demonstrations' cameras and joints."""
    cameras = tuple(
        Feature(name, "VISUAL", (3, *frames.shape[1:3])) for name, frames in sorted(episodes.images.items())
    )
    return ActConfig(
        input_features=(Feature(STATE, "STATE", episodes.state.shape[1:]), *cameras),
        output_features=(Feature(ACTION, "ACTION", episodes.action.shape[1:]),),
        chunk_size=chunk,
        n_action_steps=action_steps,
        vision_backbone=SMALL_CNN,
        pretrained_backbone_weights=None,
        pre_norm=True,
        dim_model=128,
        n_heads=4,
        dim_feedforward=256,
        feedforward_activation="gelu",
        n_encoder_layers=2,
        n_decoder_layers=1,
        use_vae=False,
        dropout=0.0,
        optimizer_lr=1e-3,
        optimizer_lr_backbone=1e-3,
        push_to_hub=False,
    )
