"""When a push becomes the policy of running sessions, and what takes it back."""

from pydantic import Field, FiniteFloat

from service.setting_groups.group import Group
from service.setting_groups.values import Seconds


class UpdateSettings(Group):
    """Policy updates"""

    update_quiet: Seconds = Field(
        default=20.0, description="Seconds without another push after which a push is looked at; a publish is several."
    )
    update_latest: Seconds = Field(default=300.0, description="Seconds after which it is looked at anyway.")
    update_poll: FiniteFloat = Field(
        default=300.0, ge=0, description="Seconds between looks at the Hub for pushes nobody told of; 0 for never."
    )
    update_probation: Seconds = Field(
        default=30.0, description="Seconds that a new policy has to run well before the old one is not gone back to."
    )
    update_fade: FiniteFloat = Field(
        default=0.2, ge=0, le=10, description="Seconds over which the first actions of a new policy are led over to."
    )
    update_patience: Seconds = Field(
        default=60.0, description="Seconds that a held robot is waited for before a new policy is given up."
    )
    update_difference: FiniteFloat = Field(
        default=0.25,
        gt=0,
        description="How far an action of a new policy may be from the running one's, as a part of its joint's range.",
    )
    update_step: FiniteFloat = Field(
        default=0.15,
        gt=0,
        description="How far a command may move a joint in one tick on probation, as a part of its range.",
    )
    update_slow: FiniteFloat = Field(
        default=0.5, gt=0, description="Part of the time a chunk is executed in that an inference may take."
    )
    update_cache_bytes: int = Field(
        default=20 << 30, ge=1 << 20, description="Bytes that one revision of a policy may have."
    )
