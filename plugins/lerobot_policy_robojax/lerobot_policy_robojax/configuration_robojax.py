"""Configuration of the policy ``robojax``."""

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import PreTrainedConfig


@PreTrainedConfig.register_subclass("robojax")
@dataclass
class RobojaxConfig(PreTrainedConfig):
    """Server, session and joints of the policy; the server's key is ROBOJAX_KEY in the environment.

    Attributes:
        server: URL of the server.
        policy_path: policy of the session: a folder on the server's machine, or a Hub repo id.
        joint_names: the robot's joints, in the order of its state and action.
        fps: actions per second of the program, which must be the policy's rate; None for no comparison.
        session: id of the new session, which is removed at the end; None for a random id.
    """

    server: str = "http://127.0.0.1:8001"
    policy_path: str = ""
    joint_names: list[str] = field(default_factory=list)
    fps: float | None = None
    session: str | None = None

    @property
    def observation_delta_indices(self) -> None:
        """No history, because the server keeps earlier observations."""

    action_delta_indices = reward_delta_indices = observation_delta_indices

    def validate_features(self) -> None:
        """Check nothing, because the server checks each observation."""

    def get_optimizer_preset(self) -> Any:
        """Refuse to train."""
        raise NotImplementedError(
            "policy.type is robojax, which runs on a server and cannot be trained; train another type, e.g. "
            "--policy.type=act, and serve its checkpoint"
        )

    get_scheduler_preset = get_optimizer_preset
