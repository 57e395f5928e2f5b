"""Diffusion Policy, as LeRobot defines it: a U-Net over time denoises a chunk of actions.

Sources: https://arxiv.org/abs/2303.04137; lerobot/policies/diffusion (https://github.com/huggingface/lerobot, 0.6.1).
"""

from jaxmodels.policies import PolicyType
from jaxmodels.policies.diffusion import memory, serving, weights
from jaxmodels.policies.diffusion.config import DiffusionConfig
from jaxmodels.policies.diffusion.model import DiffusionPolicyModel

POLICY = PolicyType(
    config=DiffusionConfig.from_json,
    model=DiffusionPolicyModel,
    tensors=weights.tensors,
    architecture=DiffusionConfig.architecture,
    prepare=weights.prepare,
    act=serving.act,
    sizes=memory.compute_sizes,
    stages=serving.STAGES,
    parts={"encoder": "vision", "": "denoiser"},
)

__all__ = ["POLICY", "DiffusionConfig", "DiffusionPolicyModel"]
