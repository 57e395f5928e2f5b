"""tokens2d: action chunks as tokens, decoded by confidence on the 2D transformer.

Sources: https://arxiv.org/abs/2202.04200 (masked prediction and decoding by confidence),
https://arxiv.org/abs/2508.20072 (the same for actions), https://arxiv.org/abs/2403.03950 (bins with a spread).
"""

from jaxmodels.policies.tokens2d import serving
from jaxmodels.policies.tokens2d.config import Tokens2dConfig
from jaxmodels.policies.tokens2d.model import Tokens2d
from jaxmodels.policies.tokens2d.serving import Decoded, decode
from jaxmodels.policies.transformer2d_policy import transformer2d_policy_type

# Its `small` has about 1.4 M parameters with one 96x96 camera.
POLICY = transformer2d_policy_type(Tokens2dConfig, Tokens2d, serving.act)

__all__ = ["POLICY", "Decoded", "Tokens2d", "Tokens2dConfig", "decode"]
