"""ACT, the Action Chunking Transformer, as LeRobot 0.4.4 defines it.

Source: lerobot/policies/act (https://github.com/huggingface/lerobot); paper https://arxiv.org/abs/2304.13705.
"""

from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act

__all__ = ["Act", "ActConfig"]
