"""ACT, the Action Chunking Transformer, as LeRobot 0.4.4 defines it.

Source: lerobot/policies/act (https://github.com/huggingface/lerobot); paper https://arxiv.org/abs/2304.13705.
"""

from jaxmodels.policies import PolicyType
from jaxmodels.policies.act import folding, names, serving
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act

POLICY = PolicyType(
    config=ActConfig.from_json,
    model=Act,
    tensors=names.tensors,
    architecture=serving.architecture,
    prepare=folding.fold,
    act=serving.act,
)

__all__ = ["POLICY", "Act", "ActConfig"]
