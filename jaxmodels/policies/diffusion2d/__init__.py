"""diffusion2d: action chunks by flow matching or diffusion on the 2D transformer.

Sources: https://arxiv.org/abs/2303.04137 (diffusion policy), https://arxiv.org/abs/2310.00426 (the transformer's
modulation), https://arxiv.org/abs/2506.07339 and https://arxiv.org/abs/2512.05964 (real-time chunking, without and
with training).
"""

from jaxmodels.policies.diffusion2d import serving
from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.model import Diffusion2d
from jaxmodels.policies.transformer2d_policy import transformer2d_policy_type

# Its `small` has about 1.5 M parameters with one 96x96 camera.
POLICY = transformer2d_policy_type(Diffusion2dConfig, Diffusion2d, serving.act)

__all__ = ["POLICY", "Diffusion2d", "Diffusion2dConfig"]
