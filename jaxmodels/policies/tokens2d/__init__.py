"""A chunk of actions as tokens, decoded by confidence on the 2D transformer; continues a plan that is being executed.

Sources: https://arxiv.org/abs/2202.04200 (masked prediction and decoding by confidence),
https://arxiv.org/abs/2508.20072 (the same for actions), https://arxiv.org/abs/2403.03950 (bins with a spread).
"""

from types import MappingProxyType

from jaxmodels.policies import PolicyType
from jaxmodels.policies.tokens2d import serving
from jaxmodels.policies.tokens2d.config import Tokens2dConfig
from jaxmodels.policies.tokens2d.model import Tokens2d
from jaxmodels.policies.tokens2d.serving import Decoded, decode

# About 1.4 M parameters: for one 96x96 camera, and a CPU.
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
    config=Tokens2dConfig.from_json,
    model=Tokens2d,
    tensors=serving.tensors,
    architecture=Tokens2dConfig.architecture,
    prepare=serving.prepare,
    act=serving.act,
    takes_prefix=True,
    read=serving.read,
    small=SMALL,
)

__all__ = ["POLICY", "Decoded", "Tokens2d", "Tokens2dConfig", "decode"]
