"""Models that are no policies, and how much may be asked of them."""

from pydantic import Field

from service.setting_groups.group import Group
from service.setting_groups.values import Seconds, Sources


class ModelSettings(Group):
    """Models"""

    models: Sources = Field(
        default={},
        description="A diffusers model to load: name=path, or name=repo@revision; POST /models/{name}/forward runs it.",
        json_schema_extra={"flag": "--model", "metavar": "NAME=PATH"},
    )
    max_forward_bytes: int = Field(
        default=64 << 20, ge=1024, le=1 << 30, description="Bytes of the arrays sent to a model, and of its answer."
    )
    max_forward_memory: int = Field(
        default=4 << 30, ge=1 << 20, description="Bytes that one forward pass may need beside the weights, by estimate."
    )
    forward_beside_robots: Seconds = Field(
        default=0.1, description="Seconds that one forward pass may take while a robot runs, by estimate."
    )
    max_forwards: int = Field(
        default=4, ge=1, le=64, description="Forward passes asked for at a time; one runs, the others wait."
    )
