"""pi0, as LeRobot and openpi define it: PaliGemma encodes images and words, and an action expert follows a flow.

Sources: https://arxiv.org/abs/2410.24164; lerobot/policies/pi0 (https://github.com/huggingface/lerobot, 0.6.1).
"""

from functools import partial

from jaxmodels.policies import PolicyType, TreeReader
from jaxmodels.policies.pi0 import model, openpi
from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import Pi0Model
from jaxmodels.policies.vla import act, list_stages

POLICY = PolicyType(
    config=Pi0Config.from_json,
    model=Pi0Model,
    tensors=model.tensors,
    act=partial(act, Pi0Model),
    runs_as_read=True,
    takes_prefix=True,
    unused=model.find_unused,
    rename=model.rename,
    tied=model.TIED,
    openpi=TreeReader(openpi.complete_config, openpi.read_weights),
    accelerator_dtype="bfloat16",
    stages=list_stages(Pi0Model),
    parts={"paligemma.vision.": "vision", "paligemma.projector.": "vision", "paligemma.": "language", "": "expert"},
)

__all__ = ["POLICY", "Pi0Config", "Pi0Model"]
