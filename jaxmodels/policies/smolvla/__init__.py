"""SmolVLA, as LeRobot defines it: a small vision-language model, and an action expert that follows a flow.

Sources: https://arxiv.org/abs/2506.01844; lerobot/policies/smolvla (https://github.com/huggingface/lerobot, 0.6.1).
"""

from jaxmodels.policies import PolicyType
from jaxmodels.policies.smolvla import model
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.policies.smolvla.model import SmolVlaModel
from jaxmodels.policies.vla import list_stages

POLICY = PolicyType(
    config=SmolVlaConfig.from_json,
    model=model.SmolVlaModel,
    tensors=model.tensors,
    act=model.act,
    runs_as_read=True,
    takes_prefix=True,
    unused=model.find_unused,
    tied=model.TIED,
    accelerator_dtype="bfloat16",
    stages=list_stages(model.SmolVlaModel),
    parts={"vlm.vision.": "vision", "vlm.connector.": "vision", "vlm.": "language", "": "expert"},
)

__all__ = ["POLICY", "SmolVlaConfig", "SmolVlaModel"]
