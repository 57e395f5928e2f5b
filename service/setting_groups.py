"""The groups of settings, as they stand in the help and in the file; each setting is in exactly one of them."""

from typing import Literal

from pydantic import Field, FiniteFloat
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from service.setting_values import Address, Amounts, Counts, Names, Ranges, Seconds, Sources, Steps, Where

PREFIX = "ROBOJAX_"


class Group(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Only what `load_settings` gathered, and what tests give: it knows where each value came from.
        return (init_settings,)


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


class AccessSettings(Group):
    """Access"""

    insecure: bool = Field(
        default=False,
        description="Let everybody who reaches the port in, also from other machines, although no key is there.",
    )
    keys_file: str | None = Field(
        default=None,
        description="File of the keys that `robojax token new` makes; default: keys.json in the state folder. With a "
        "key in it, a key is wanted from everybody.",
    )
    jwt_secret_file: str | None = Field(
        default=None,
        description="File with the secret that signs bearer tokens; default: jwt-secret in the state folder, which "
        "`robojax token jwt` makes.",
    )
    jwt_hours: FiniteFloat = Field(default=24.0, gt=0, le=720, description="Hours that a bearer token may live.")
    transport_key_file: str | None = Field(
        default=None,
        description="File with lines of URL and key, for sessions whose rooms are on another server that wants one.",
    )


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


class ControlSettings(Group):
    """Control loop"""

    rate: FiniteFloat = Field(
        default=20.0, gt=0, le=1000, description="Ticks per second when neither the request nor the policy says."
    )
    max_rate: FiniteFloat = Field(
        default=200.0, gt=0, le=1000, description="The highest rate that a request may ask for."
    )
    frame_age_limit: Seconds = Field(
        default=0.3, description="Seconds after which a frame is stale and the robot is held."
    )
    starved_after: Seconds = Field(default=0.3, description="Seconds without an action after which the robot is held.")
    hold_repeats: int = Field(default=4, ge=1, le=100, description="How often a hold sends the measured pose.")
    failures_allowed: int = Field(
        default=3, ge=1, description="Failed inferences in a row that end a session in an error."
    )
    input_timeout: Seconds = Field(default=600.0, description="Seconds without any frame or joints that end a session.")
    joint_ranges: Ranges = Field(
        default={},
        description="Ranges of joints that are not an SO-100's: a table of name and (low, high).",
    )


class SafetySettings(Group):
    """Safety"""

    safety: Literal["clamp", "refuse"] = Field(
        default="clamp",
        description="What happens to an action chunk that leaves the limits: it is brought inside, or refused whole.",
    )
    max_relative_target: Steps = Field(
        default=None,
        description="Largest step of a joint from one tick to the next, in its unit: one for all, or a table of name "
        "and step. A request may ask for less, never for more.",
    )
    limits: str | None = Field(
        default=None,
        description="TOML file or URDF with limits of joints: low, high, step, velocity, acceleration, jerk.",
    )
    on_hold: Literal["hold", "ramp"] = Field(
        default="hold",
        description="How a moving robot is held: at its measured pose at once, or after slowing down.",
    )
    degraded_after: Seconds = Field(
        default=3.0,
        description="Seconds that a robot is held because it cannot be seen or reached, until its session is degraded.",
    )
    stop_after: Seconds = Field(
        default=30.0, description="Such seconds until it is stopped and latched: nobody expects a motion any more."
    )
    frozen_after: Seconds = Field(
        default=2.0, description="Seconds with the same picture after which a camera is said to be frozen."
    )
    frozen_stops: bool = Field(default=False, description="Stop and latch a robot whose camera is frozen.")
    bad_inputs: int = Field(
        default=20, ge=0, description="Bad joint values within a second that stop and latch a robot; 0 for never."
    )
    action_age_limit: Seconds | None = Field(
        default=None,
        description="Seconds after its frame until an action is not done any more; default: as long as a chunk lasts.",
    )
    slow_inference: FiniteFloat = Field(
        default=2.0,
        gt=0,
        description="How many times the seconds that its actions take an inference may take before the robot is held.",
    )


class PolicySettings(Group):
    """Policies"""

    device: str | None = Field(
        default=None, description="Where policies run: cpu, gpu, cuda:1, tpu:0; default: JAX's choice."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision; bfloat16 is for accelerators."
    )
    compile_cache: str | None = Field(
        default=None,
        description="Folder that keeps compiled programs, or off; default: robojax/xla in the user's cache.",
    )
    policy_cache: str | None = Field(
        default=None, description="Folder that keeps policies from the Hub; default: huggingface_hub's own."
    )
    policy_roots: Names = Field(
        default=(),
        description="Folders that policies may be in. Without them, and without policy_owners, every folder may be "
        "used when the server listens on this machine only and wants no key, else none.",
    )
    policy_owners: Names = Field(
        default=(), description="Users and organisations of the Hub whose policies may be used; as policy_roots."
    )
    policy_bytes: int = Field(
        default=20 << 30, ge=1 << 20, description="Bytes that the files of a policy may have; asked before a download."
    )
    load_memory: int = Field(
        default=1 << 30,
        ge=1 << 27,
        description="Bytes of memory for the process that reads a policy's files before this one does.",
    )
    stuck_after: Seconds = Field(default=5.0, description="Seconds after which a running inference is given up.")
    engine_batch_sizes: Counts = Field(
        default=(1, 2, 4, 8, 16),
        description="How many robots' inferences may run as one, by the sizes that are compiled; larger ones than 1 "
        "are compiled while no robot runs. 1 for one at a time.",
    )
    devices: Names = Field(
        default=(),
        description="Devices that policies run on side by side: all, numbers as 0,1, or names as cuda:0,cuda:1; one "
        "that is named twice runs two batches at a time. Default: the one that device names.",
    )
    placement: Literal["replicate", "shard"] = Field(
        default="replicate",
        description="How a policy uses several devices: replicate, a copy on each, which share the robots; or shard, "
        "spread over all of them, if it is too large for one. cuda:0+cuda:1 among devices is one such place, too.",
    )
    engine_load: FiniteFloat = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the time that sessions may ask a device to compute, by measurement; one that would ask "
        "for more is refused, or slowed down where it says degrade.",
    )


class ClusterSettings(Group):
    """Cluster"""

    engine: Where = Field(
        default="here",
        description="Where policies run: here, in this process; ray-local, in processes beside this one, on a Ray that "
        "is started for it; ray-auto, in the Ray cluster of which this machine is a node; ray://HOST:PORT, in one of "
        "which it is none, through Ray's client server there.",
    )
    engines: int = Field(default=1, ge=1, le=10_000, description="Engines that a cluster has at least.")
    engines_most: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Engines that it has at most: more are made while they are busy or requests wait too long, and "
        "fewer are kept when they idle. Default: as engines.",
    )
    engine_resources: Amounts = Field(
        default={"CPU": 1.0},
        description="What Ray has to have for an engine, as NAME=AMOUNT with commas between: GPU=1, or TPU=4,CPU=8.",
    )
    engine_wait: Seconds = Field(
        default=0.05, description="Seconds that nine of ten requests may wait for a device before an engine is added."
    )
    engine_patience: Seconds = Field(
        default=60.0, description="Seconds that a robot without any engine is held before its session fails."
    )
    front_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="What the other fronts of a cluster call this one, the same after a restart; default: "
        "its host's name and its port.",
    )
    front_url: Address | None = Field(
        default=None,
        description="Where the other fronts of a cluster reach this one; default: the address it listens on.",
    )


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


class RecordingSettings(Group):
    """Recordings"""

    recordings: str | None = Field(
        default=None, description="Folder that recordings of sessions go to; default: recordings in the state folder."
    )
    recording_free: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that stay free: a recording ends before. Default: 1 GiB, or 5 % of a small disk.",
    )
    recording_limit: int = Field(default=20 << 30, ge=1 << 20, description="Bytes of one recording.")
    recording_datasets: bool = Field(
        default=True, description="Make a LeRobotDataset of every recording when it has ended."
    )


class LogSettings(Group):
    """Log"""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or one JSON object per line."
    )
    log_file: str | None = Field(default=None, description="File that is logged to besides standard error.")
    log_file_bytes: int = Field(
        default=10 << 20, ge=10_000, description="Bytes after which the log file is set aside and a new one begun."
    )
    log_files: int = Field(default=5, ge=1, le=1000, description="Log files kept; the oldest goes.")
    log_lines: int = Field(default=500, ge=1, le=100_000, description="Lines kept for GET /debug/logs.")


GROUPS: tuple[type[Group], ...] = (
    ServerSettings,
    AccessSettings,
    LimitSettings,
    ControlSettings,
    SafetySettings,
    PolicySettings,
    HostSettings,
    ClusterSettings,
    ModelSettings,
    TransportSettings,
    UpdateSettings,
    WebhookSettings,
    RecordingSettings,
    LogSettings,
)
