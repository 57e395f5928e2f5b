"""Several machines with one policy spread over them."""

from pydantic import Field

from service.setting_groups.group import Group
from service.setting_groups.values import Seconds


class HostSettings(Group):
    """Several hosts"""

    hosts_count: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Machines whose devices one policy is spread over, this one included; robojax follow runs on the "
        "others. With devices all and placement shard.",
    )
    hosts_address: str | None = Field(
        default=None, description="ADDRESS:PORT where this server waits for the others, as they reach it."
    )
    hosts_coordinator: str | None = Field(
        default=None,
        description="ADDRESS:PORT of this machine for JAX's own connections, or auto where JAX finds all hosts by "
        "itself (TPU pods, Slurm). Default: the port after that of hosts_address.",
    )
    hosts_secret_file: str | None = Field(
        default=None, description="File with a secret of 16 characters or more that is the same on all hosts."
    )
    hosts_wait: Seconds = Field(default=300.0, description="Seconds in which the others have to come.")
