"""Where a server listens, and which web pages may call it."""

from pydantic import Field

from service.setting_groups.group import Group
from service.setting_groups.values import Names


class ServerSettings(Group):
    """Server"""

    host: str = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 lets other machines in, and wants a key."
    )
    port: int = Field(default=8001, ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")
    origins: Names = Field(
        default=(),
        description="Web pages that may call the session API and the rooms, as exact origins (https://host). "
        "Pages of this server and of this machine always may; '*' is everybody.",
    )
    openpi_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="A second port, which speaks openpi's WebSocket protocol: for clients that are told a host and "
        "a port only.",
    )
    openpi_session: str | None = Field(
        default=None,
        description="The session that port is for; else the only direct one that a client's key sees.",
    )
