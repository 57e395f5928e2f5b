"""Entry of SmolVLA in the registry of policy types."""

from functools import partial

from jaxmodels.policies import PolicyType
from jaxmodels.policies.smolvla import model
from jaxmodels.policies.smolvla.config import SmolVlaConfig
from jaxmodels.policies.vla import list_stages, prepare

POLICY = PolicyType(
    config=SmolVlaConfig.from_json,
    model=model.SmolVlaModel,
    tensors=model.tensors,
    stages=list_stages(model.SmolVlaModel, model.sample),
    fit=model.fit_image,
    prepare=partial(prepare, model.SmolVlaModel),
    runs_as_read=True,
    takes_prefix=True,
    unused=model.find_unused,
    tied=model.TIED,
    accelerator_dtype="bfloat16",
    parts={"vlm.vision.": "vision", "vlm.connector.": "vision", "vlm.": "language", "": "expert"},
)
