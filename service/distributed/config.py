"""Settings of a Ray cluster, and of several servers with one database."""

from typing import Self

from pydantic import Field, model_validator

from service.setting_types import Address, Amounts, Common, DatabaseUrl, Group, Private, Seconds, Where, conflict


class ClusterSettings(Group):
    """Cluster."""

    engine: Common[Where] = Field(
        default="local",
        description="Place where policies run: local (a process for each device of this machine), ray-local (a Ray "
        "that the server starts), ray-auto (the Ray cluster of which this machine is a node) or "
        "ray://HOST:PORT (another Ray cluster, through its client server)",
    )
    engines: int = Field(default=1, ge=1, le=10_000, description="Smallest number of engines of a cluster")
    engines_most: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Largest number of engines of a cluster, which adds engines while all are busy or requests wait "
        "too long, and removes idle engines; default: as engines",
    )
    engine_resources: Amounts = Field(
        default={"CPU": 1.0},
        description="Resources of Ray for each engine, as NAME=AMOUNT with commas between: GPU=1, or TPU=4,CPU=8",
    )
    engine_wait: Seconds = Field(
        default=0.05, description="Seconds that nine of ten requests may wait for a device before an engine is added"
    )
    engine_patience: Seconds = Field(
        default=60.0,
        description="Seconds that a robot without any engine is held before its session fails; engines that end "
        "restart",
    )
    database: Common[Private[DatabaseUrl | None]] = Field(
        default=None,
        repr=False,
        description="PostgreSQL (postgresql://USER@HOST/NAME) through which several servers share their sessions: "
        "each id is on one server, and others redirect its requests. Default: none; sessions are in "
        "SQLite, in the state folder. Put a password into PGPASSFILE or ROBOJAX_DATABASE.",
    )
    front_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Name of this server for the other servers of its database, the same after a restart; default: "
        "host name and port",
    )
    front_url: Address | None = Field(
        default=None,
        description="URL of this server for the other servers of its database and for redirected clients; default: "
        "the address on which it listens",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engines_most is not None and self.engines > self.engines_most:
            raise conflict({"engines": self.engines, "engines_most": self.engines_most}, "engines <= engines_most")
        named = {"front_name": self.front_name, "front_url": self.front_url}
        alone = {name: value for name, value in named.items() if value is not None}
        if alone and self.database is None:
            raise conflict(alone, "--database postgresql://... for all servers, too", "without database")
        return self
