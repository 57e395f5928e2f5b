"""Settings of address, limits, LeRobot's port and embedded transport."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from service.setting_types import (
    Common,
    Group,
    Names,
    Networks,
    Private,
    Seconds,
    Sources,
    ZenohEndpoint,
    conflict,
    read_json,
)


class LimitSettings(Group):
    """Limits."""

    max_sessions: int = Field(default=64, ge=1, le=4096, description="Largest number of sessions at a time")
    max_cameras: int = Field(default=8, ge=1, le=64, description="Largest number of cameras of a session")
    max_body: int = Field(default=1 << 20, ge=1024, description="Largest body of a request, in bytes")
    max_connections: int = Field(
        default=64,
        ge=1,
        description="Connections of one address at a time, except this machine's; a robot with 8 cameras has about 20",
    )
    max_all_connections: int = Field(default=4096, ge=16, description="Connections of all addresses at a time")
    creates_per_minute: int = Field(
        default=20,
        ge=1,
        description="Sessions that one key (or one address, if no key is required) may create in a minute; callers "
        "on this machine without a key are not limited",
    )
    limit_local: bool = Field(
        default=False,
        description="Apply max_connections and creates_per_minute to this machine, too, for a proxy on it",
    )
    request_deadline: Seconds = Field(default=10.0, description="Seconds in which a whole request must arrive")
    answer_deadline: Seconds = Field(
        default=30.0, description="Seconds in which a request is answered; the creation of a session may take longer"
    )


class ServerSettings(Group):
    """Server."""

    host: Common[str] = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 accepts other machines and requires a key"
    )
    port: Common[int] = Field(
        default=8001, ge=0, le=65535, description="Port to listen on; 0 takes a free port and prints it"
    )
    origins: Common[Names] = Field(
        default=(),
        description="Web pages that may call the session API and the rooms, as exact origins (https://host); '*' "
        "allows all. Pages of this server and of this machine are always allowed.",
    )
    openpi_port: Common[int | None] = Field(
        default=None,
        ge=0,
        le=65535,
        description="Second port with openpi's WebSocket protocol, for clients that accept only a host and a port",
    )
    openpi_session: str | None = Field(
        default=None,
        description="Session of the openpi port; default: the only direct session that a client's key may see",
    )

    @property
    def local_url(self) -> str:
        """URL at which this machine reaches the server."""
        return format_url(self.host, self.port)


def format_url(host: str, port: int) -> str:
    """Return the HTTP URL of an address, with a loopback host in place of the host for all interfaces."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class LerobotSettings(Group):
    """Robots of LeRobot."""

    lerobot_port: Common[int | None] = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for LeRobot's robot_client (gRPC); 0 takes a free port. This protocol has no keys: a robot "
        "that reaches the port needs no key, and its session has no owner.",
    )
    lerobot_allow: Common[Networks] = Field(
        default=(),
        description="Networks of robots that may use lerobot_port, as 192.168.1.0/24; default: all that have a "
        "certificate, or this machine. A server for other machines requires networks or certificates.",
    )
    lerobot_tls_cert: Private[str | None] = Field(
        default=None, description="PEM file with the certificate of lerobot_port, for robots with certificates (mTLS)"
    )
    lerobot_tls_key: Private[str | None] = Field(
        default=None, description="PEM file with the private key of lerobot_tls_cert"
    )
    lerobot_tls_client_ca: Private[str | None] = Field(
        default=None, description="PEM file with the certificates of the authorities that sign the robots' certificates"
    )
    lerobot_zenoh: Common[ZenohEndpoint | None] = Field(
        default=None,
        description="Endpoint for LeRobot's remote inference (Zenoh), as tcp/127.0.0.1:7447; this protocol has no "
        "keys, so other machines require lerobot_zenoh_config",
    )
    lerobot_zenoh_mode: Literal["peer", "client"] = Field(
        default="peer", description="peer: listen on lerobot_zenoh; client: connect to the Zenoh router there"
    )
    lerobot_zenoh_config: Private[str | None] = Field(
        default=None, description="Zenoh's JSON5 file with client certificates (enable_mtls), passwords or access rules"
    )
    lerobot_deployments: Common[Private[Sources]] = Field(
        default={},
        description="Policy that robots may use by this name over lerobot_zenoh, as name=path or name=repo@revision",
        json_schema_extra={"flag": "--lerobot-deployment", "metavar": "NAME=PATH"},
    )
    lerobot_joints: Annotated[Mapping[str, Names], BeforeValidator(read_json)] = Field(
        default={},
        description="Names of a deployment's joints in the order of its actions, for checkpoints without LeRobot's "
        'names: {"name": ["shoulder_pan.pos", ...]}',
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        files = {name: getattr(self, name) for name in ("lerobot_tls_cert", "lerobot_tls_key", "lerobot_tls_client_ca")}
        if len({file is None for file in files.values()}) > 1:
            raise conflict(files, "all three files, or none")
        if self.lerobot_zenoh is not None and not self.lerobot_deployments:
            raise conflict({"lerobot_zenoh": self.lerobot_zenoh}, "--lerobot-deployment NAME=PATH, too")
        return self


class TransportSettings(Group):
    """Rooms."""

    embedded_transport: bool = Field(default=True, description="Serve rooms, too, at / and under /api")
    transport_hosts: Common[Names] = Field(
        default=(),
        description="Other transport servers that sessions may use: host, host:8000, *.lan, 192.168.1.0/24. This "
        "server and transport servers on this machine are always allowed.",
    )
    ice_servers: Common[Names] = Field(default=(), description="STUN and TURN URLs; none are needed on a local network")
