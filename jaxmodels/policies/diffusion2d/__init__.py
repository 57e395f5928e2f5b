"""A chunk of actions by flow matching or diffusion, on the 2D transformer; continues a plan that is being executed.

Sources: https://arxiv.org/abs/2303.04137 (diffusion policy), https://arxiv.org/abs/2310.00426 (the transformer's
modulation), https://arxiv.org/abs/2506.07339 (real-time chunking).
"""

from jaxmodels.policies import PolicyType
from jaxmodels.policies.diffusion2d import serving
from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.model import Diffusion2d

POLICY = PolicyType(
    config=Diffusion2dConfig.from_json,
    model=Diffusion2d,
    tensors=serving.tensors,
    architecture=serving.architecture,
    prepare=serving.prepare,
    act=serving.act,
    takes_prefix=True,
)

__all__ = ["POLICY", "Diffusion2d", "Diffusion2dConfig"]
