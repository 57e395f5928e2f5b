"""How much callers may ask of a server: sessions, bytes, connections, time."""

from pydantic import Field

from service.setting_groups.group import Group
from service.setting_groups.values import Seconds


class LimitSettings(Group):
    """Limits"""

    max_sessions: int = Field(default=64, ge=1, le=4096, description="Sessions at a time.")
    max_cameras: int = Field(default=8, ge=1, le=64, description="Cameras per session.")
    max_body: int = Field(default=1 << 20, ge=1024, description="Bytes of one request's body.")
    max_connections: int = Field(
        default=64,
        ge=1,
        description="Connections of one address at a time, this machine's apart; a robot with 8 cameras has about 20.",
    )
    max_all_connections: int = Field(default=4096, ge=16, description="Connections of everybody at a time.")
    creates_per_minute: int = Field(
        default=20,
        ge=1,
        description="Sessions that one key (or one address, where no key is wanted) may make in a minute, "
        "this machine's own callers without a key apart.",
    )
    limit_local: bool = Field(
        default=False,
        description="Hold callers on this machine to max_connections and creates_per_minute too; "
        "for a server behind a proxy on the same machine.",
    )
    request_deadline: Seconds = Field(default=10.0, description="Seconds in which a whole request must have arrived.")
    answer_deadline: Seconds = Field(
        default=30.0, description="Seconds in which a request is answered; making a session may take longer."
    )
