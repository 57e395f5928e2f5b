"""SmolVLA, as LeRobot defines it: a small vision-language model, and an expert of actions that follows a flow.

Sources: https://arxiv.org/abs/2506.01844; lerobot/policies/smolvla (https://github.com/huggingface/lerobot, 0.6.1).
"""

from jaxmodels.policies import PolicyType
from jaxmodels.policies.smolvla import serving, weights
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.policies.smolvla.model import SmolVlaModel

POLICY = PolicyType(
    config=SmolVlaConfig.from_json,
    model=SmolVlaModel,
    tensors=weights.tensors,
    architecture=SmolVlaConfig.architecture,
    prepare=weights.prepare,
    act=serving.act,
    runs_as_read=True,
    takes_prefix=True,
    unused=weights.find_unused,
    tied=weights.TIED,
    accelerator_dtype="bfloat16",
    stages=serving.STAGES,
    parts={"vlm.vision.": "vision", "vlm.connector.": "vision", "vlm.": "language", "": "expert"},
)

__all__ = ["POLICY", "SmolVlaConfig", "SmolVlaModel"]
