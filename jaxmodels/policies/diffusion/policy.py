"""Entry of Diffusion Policy in the registry of policy types."""

from jaxmodels.policies import PolicyType
from jaxmodels.policies.diffusion import model
from jaxmodels.policies.diffusion.config import DiffusionConfig

POLICY = PolicyType(
    config=DiffusionConfig.from_json,
    model=model.DiffusionPolicyModel,
    tensors=model.tensors,
    stages=model.STAGES,
    parts={"encoder": "vision", "": "denoiser"},
    small={
        "horizon": 16,
        "n_action_steps": 8,
        "pretrained_backbone_weights": None,
        "use_group_norm": True,
        "use_separate_rgb_encoder_per_camera": False,
        "spatial_softmax_num_keypoints": 16,
        "down_dims": (64, 128),
        "diffusion_step_embed_dim": 32,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 10,
        "optimizer_lr": 1e-3,
    },
)
