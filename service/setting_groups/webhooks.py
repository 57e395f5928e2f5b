"""What comes from the Hub and what is told to others, and where it is kept."""

from pydantic import Field

from service.setting_groups.group import Group
from service.setting_groups.values import Names


class WebhookSettings(Group):
    """Webhooks"""

    state: str | None = Field(
        default=None,
        description="Folder that keeps sessions, webhooks and policy updates over restarts, or off; default: "
        "robojax/PORT in the user's state folder.",
    )
    webhook_secret_file: str | None = Field(
        default=None,
        description="File with the secrets that deliveries may carry, one per line; default: WEBHOOK_SECRET of the "
        "environment. Without one only this machine may deliver.",
    )
    registry: bool = Field(default=False, description="Keep webhooks of this server's own, at /api/settings/webhooks.")
    registry_token_file: str | None = Field(
        default=None,
        description="File with the tokens that may manage them, one per line; default: one made in the state folder.",
    )
    registry_allow: Names = Field(
        default=(),
        description="Networks that deliveries may go to although they are private, as 192.168.1.0/24.",
    )
    registry_watch: Names = Field(
        default=(), description="Policy folders whose changes are events, as owner/name=path."
    )
    registry_jobs: str | None = Field(default=None, description="TOML file with the jobs that webhooks may start.")
