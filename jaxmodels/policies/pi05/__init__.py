"""pi0.5, as LeRobot and openpi define it: pi0 with the time in its norms and the state in its prompt.

Sources: https://arxiv.org/abs/2504.16054; lerobot/policies/pi05 (https://github.com/huggingface/lerobot, 0.6.1).
"""

from functools import partial

from jaxmodels.policies import PolicyType, TreeReader
from jaxmodels.policies.pi0 import openpi, serving, weights
from jaxmodels.policies.pi05.config import Pi05Config
from jaxmodels.policies.pi05.model import Pi05Model

POLICY = PolicyType(
    config=Pi05Config.from_json,
    model=Pi05Model,
    tensors=partial(weights.tensors, kind=Pi05Config.type),
    architecture=Pi05Config.architecture,
    prepare=weights.prepare,
    act=partial(serving.act, network=Pi05Model),
    runs_as_read=True,
    takes_prefix=True,
    unused=weights.find_unused,
    rename=weights.rename,
    tied=weights.TIED,
    openpi=TreeReader(openpi.complete_config, openpi.read_weights),
    accelerator_dtype="bfloat16",
    stages=serving.list_stages(Pi05Model),
    parts={"paligemma.vision.": "vision", "paligemma.projector.": "vision", "paligemma.": "language", "": "expert"},
)

__all__ = ["POLICY", "Pi05Config", "Pi05Model"]
