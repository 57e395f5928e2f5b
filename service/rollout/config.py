"""Settings of rollouts and webhooks."""

from dataclasses import dataclass
from typing import Self

from pydantic import Field, FiniteFloat, model_validator

from service.setting_types import Common, Group, Names, Private, Seconds, conflict


@dataclass(frozen=True)
class DeploymentSettings:
    """Settings of deployments; times in seconds."""

    quiet: float = 20.0  # time without a push before a push counts as complete; LeRobot publishes in 4 commits
    longest: float = 300.0  # time after which a commit is deployed although pushes go on
    poll: float | None = 180.0  # time between checks of the heads, for lost webhooks; None for never
    jitter: float = 0.2  # part of `poll` by which a check may be early or late, so that a fleet spreads its checks
    transfers: int = 3  # attempts to fetch a commit before bad bytes count as the commit's fault
    transfer_pause: float = 2.0  # pause before the second attempt; doubled for each further attempt
    superseded: int = 3  # deployments in a row that a newer commit may replace, so that pushes cannot block all
    preparing: float = 900.0  # time limit of the preparation, per session
    swapping: float = 120.0  # time limit of the swap, per session
    retry: float = 120.0  # pause after a failure that was not the commit's fault; doubled each time
    retry_longest: float = 3600.0
    max_records: int = 500  # number of newest records to keep


class UpdateSettings(Group):
    """Policy updates."""

    update_quiet: Seconds = Field(
        default=20.0, description="Seconds without another push before a push is handled; a publish is several pushes"
    )
    update_latest: Seconds = Field(default=300.0, description="Seconds after which a push is handled in any case")
    update_poll: Common[FiniteFloat] = Field(
        default=300.0, ge=0, description="Seconds between two polls of the Hub; 0 turns polling off"
    )
    update_probation: Seconds = Field(
        default=30.0, description="Seconds of motion (probation) in which a failure brings the old policy back"
    )
    update_fade: FiniteFloat = Field(
        default=0.2, ge=0, le=10, description="Seconds of the transition to the first actions of a new policy"
    )
    update_patience: Seconds = Field(
        default=60.0, description="Seconds that a new policy waits for a held robot before it is given up"
    )
    update_difference: FiniteFloat = Field(
        default=0.25,
        gt=0,
        description="Largest distance of a new policy's action from the running one's, as a part of a joint's range",
    )
    update_step: FiniteFloat = Field(
        default=0.15,
        gt=0,
        description="Largest step of a joint in one tick of a policy's probation, as a part of the joint's range",
    )
    update_slow: FiniteFloat = Field(
        default=0.5, gt=0, description="Longest inference of a new policy, as a part of its chunk's duration"
    )
    update_cache_bytes: int = Field(
        default=20 << 30, ge=1 << 20, description="Largest size of one revision of a policy, in bytes"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.update_quiet > self.update_latest:
            values = {"update_quiet": self.update_quiet, "update_latest": self.update_latest}
            raise conflict(values, "update_quiet <= update_latest")
        return self


class WebhookSettings(Group):
    """Webhooks."""

    state: Common[Private[str | None]] = Field(
        default=None,
        description="Folder that keeps sessions, webhooks and policy updates over restarts, or off; default: "
        "robojax/PORT in the user's state folder",
    )
    webhook_secret_file: Common[Private[str | None]] = Field(
        default=None,
        description="File with the accepted secrets of deliveries, one per line; default: WEBHOOK_SECRET of the "
        "environment. Without a secret, only this machine may deliver.",
    )
    registry: Common[bool] = Field(default=False, description="Keep webhooks on this server, at /api/settings/webhooks")
    registry_token_file: Private[str | None] = Field(
        default=None,
        description="File with tokens to manage these webhooks, one per line; default: a token in the state folder",
    )
    registry_allow: Names = Field(
        default=(),
        description="Private networks to which deliveries may go, as 192.168.1.0/24",
    )
    registry_jobs: Private[str | None] = Field(
        default=None, description="TOML file with the jobs that webhooks may start"
    )
