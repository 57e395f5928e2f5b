"""Entry of ACT in the registry of policy types."""

from jaxmodels.policies import PolicyType, as_stages
from jaxmodels.policies.act import weights
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act, act
from jaxmodels.policies.config import SMALL_CNN

POLICY = PolicyType(
    config=ActConfig.from_json,
    model=Act,
    tensors=weights.tensors,
    prepare=weights.prepare,
    stages=as_stages(act),
    parts={"backbone.": "vision", "latent_encoder.": "latent encoder", "": "transformer"},
    small={
        "chunk_size": 20,
        "n_action_steps": 5,
        "vision_backbone": SMALL_CNN,
        "pretrained_backbone_weights": None,
        "pre_norm": True,
        "dim_model": 128,
        "n_heads": 4,
        "dim_feedforward": 256,
        "feedforward_activation": "gelu",
        "n_encoder_layers": 2,
        "use_vae": False,
        "dropout": 0.0,
        "optimizer_lr": 1e-3,
        "optimizer_lr_backbone": 1e-3,
    },
)
