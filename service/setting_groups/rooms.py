"""The rooms that are served here, and where sessions may go besides."""

from pydantic import Field

from service.setting_groups.group import Group
from service.setting_groups.values import Names


class TransportSettings(Group):
    """Rooms"""

    embedded_transport: bool = Field(default=True, description="Serve rooms too, at / and under /api.")
    transport_oddities: bool = Field(
        default=False, description="Let the embedded rooms behave as the reference server does where it is broken."
    )
    transport_hosts: Names = Field(
        default=(),
        description="Transport servers that sessions may be sent to besides this machine's and this server itself: "
        "host, host:8000, *.lan, 192.168.1.0/24.",
    )
    ice_servers: Names = Field(default=(), description="STUN and TURN URLs; none are needed on a local network.")
