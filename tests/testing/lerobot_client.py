"""LeRobot's own robot client with a simulated robot, for an environment with LeRobot (`make lerobot`).

    python tests/testing/lerobot_client.py ADDRESS POLICY ACTIONS

It imports nothing of robojax. It prints the number of executed actions when it has reached ACTIONS, then runs until its
input is closed, and prints the time and the targets of each action as JSON. The robot reaches each target at once.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
from lerobot.async_inference.configs import RobotClientConfig
from lerobot.async_inference.robot_client import RobotClient
from lerobot.robots import Robot, RobotConfig

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
POSE = (0.0, -90.0, 90.0, 0.0, 0.0, 10.0)


@RobotConfig.register_subclass("simulated_so101")
@dataclass
class SimulatedSo101Config(RobotConfig):
    """Configuration of the robot, which has no fields."""


class SimulatedSo101(Robot):
    """A robot with an SO-101's joints and one camera, whose frames are gray."""

    config_class = SimulatedSo101Config
    name = "simulated_so101"

    def __init__(self, config: SimulatedSo101Config):
        super().__init__(config)
        self.pose = {f"{joint}.pos": value for joint, value in zip(JOINTS, POSE, strict=True)}
        self.actions: list[tuple[float, ...]] = []  # Seconds since 1970, and the targets of the joints.

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, "front": (96, 96, 3)}

    @cached_property
    def action_features(self) -> dict[str, Any]:
        return {f"{joint}.pos": float for joint in JOINTS}

    @property
    def cameras(self) -> dict[str, Any]:
        return {"front": None}

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        pass

    def calibrate(self) -> None:
        pass

    def configure(self) -> None:
        pass

    def get_observation(self) -> dict[str, Any]:
        return {**self.pose, "front": np.full((96, 96, 3), 127, np.uint8)}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.pose = dict(action)
        self.actions.append((time.time(), *self.pose.values()))
        return action

    def disconnect(self) -> None:
        pass


def main(address: str, policy: str, wanted: int) -> None:
    config = RobotClientConfig(
        robot=SimulatedSo101Config(id="test"),
        server_address=address,
        policy_type="act",
        pretrained_name_or_path=policy,
        policy_device="cpu",
        actions_per_chunk=20,
        fps=10,
        task="lift the cube",
    )
    client = RobotClient(config)
    assert client.start(), "the server refused the policy instructions"
    for run in (client.receive_actions, lambda: client.control_loop(task=config.task)):
        threading.Thread(target=run, daemon=True).start()
    robot: Any = client.robot
    while len(robot.actions) < wanted:
        time.sleep(0.01)
    sys.stdout.write(f"{len(robot.actions)}\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.write(json.dumps({"lerobot": version("lerobot"), "actions": robot.actions}))
    client.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
