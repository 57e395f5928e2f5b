"""A chunk of actions by flow matching or diffusion, on the 2D transformer; continues a plan that is being executed.

Sources: https://arxiv.org/abs/2303.04137 (diffusion policy), https://arxiv.org/abs/2310.00426 (the transformer's
modulation), https://arxiv.org/abs/2506.07339 and https://arxiv.org/abs/2512.05964 (real-time chunking, without and
with training).
"""

from types import MappingProxyType

from jaxmodels.policies import PolicyType
from jaxmodels.policies.diffusion2d import serving
from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.model import Diffusion2d

# About 1.3 M parameters: for one 96x96 camera, and a CPU.
SMALL = MappingProxyType(
    {
        "chunk_size": 20,
        "n_action_steps": 5,
        "vision_backbone": "small_cnn",
        "dim_model": 128,
        "n_heads": 4,
        "n_encoder_layers": 1,
        "n_layers": 4,
        "optimizer_lr": 1e-3,
        "optimizer_lr_backbone": 1e-3,
        "optimizer_weight_decay": 1e-4,
        "scheduler_warmup_steps": 200,
    }
)

POLICY = PolicyType(
    config=Diffusion2dConfig.from_json,
    model=Diffusion2d,
    tensors=serving.tensors,
    architecture=Diffusion2dConfig.architecture,
    prepare=serving.prepare,
    act=serving.act,
    takes_prefix=True,
    read=serving.read,
    small=SMALL,
)

__all__ = ["POLICY", "Diffusion2d", "Diffusion2dConfig"]
