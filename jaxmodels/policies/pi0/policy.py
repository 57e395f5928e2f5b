"""Entry of pi0 in the registry of policy types."""

from functools import partial

from jaxmodels.policies import PolicyType, TreeReader
from jaxmodels.policies.pi0 import model, openpi
from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import Pi0Model
from jaxmodels.policies.vla import list_stages, prepare

POLICY = PolicyType(
    config=Pi0Config.from_json,
    model=Pi0Model,
    tensors=model.tensors,
    stages=list_stages(Pi0Model),
    fit=model.fit_into_square,
    prepare=partial(prepare, Pi0Model),
    depends_on_version=True,
    runs_as_read=True,
    takes_prefix=True,
    unused=model.find_unused,
    rename=model.rename,
    tied=model.TIED,
    openpi=TreeReader(openpi.complete_config, openpi.read_weights),
    accelerator_dtype="bfloat16",
    parts={"paligemma.vision.": "vision", "paligemma.projector.": "vision", "paligemma.": "language", "": "expert"},
)
