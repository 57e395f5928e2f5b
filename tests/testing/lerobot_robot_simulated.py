"""A simulated robot as a third-party plugin of LeRobot, for an environment with LeRobot (`make lerobot`).

A distribution of this name makes LeRobot import the module. The robot reaches each target at once, and its calibration
file is LeRobot's. It appends the time and the targets of each action to a file.
"""

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from lerobot.motors import Motor, MotorNormMode
from lerobot.robots import Robot, RobotConfig

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
POSE = (0.0, -90.0, 90.0, 0.0, 0.0, 10.0)


@RobotConfig.register_subclass("simulated_plugin")
@dataclass
class SimulatedPluginConfig(RobotConfig):
    """Configuration of the robot: the file of its actions."""

    actions: str = ""


class SimulatedPlugin(Robot):
    """A robot with an SO-101's joints in degrees and one camera, whose frames are noise."""

    config_class = SimulatedPluginConfig
    name = "simulated_plugin"

    def __init__(self, config: SimulatedPluginConfig):
        super().__init__(config)
        self.config = config
        motors = {joint: Motor(number, "sts3215", MotorNormMode.DEGREES) for number, joint in enumerate(JOINTS, 1)}
        motors["gripper"] = Motor(6, "sts3215", MotorNormMode.RANGE_0_100)
        self.bus = SimpleNamespace(motors=motors, model_resolution_table={"sts3215": 4096}, apply_drive_mode=True)
        self.pose = {f"{joint}.pos": value for joint, value in zip(JOINTS, POSE, strict=True)}
        self.noise = np.random.default_rng(0)
        self.connected = False

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, "front": (96, 96, 3)}

    @cached_property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self.pose, float)

    @property
    def cameras(self) -> dict[str, Any]:
        return {"front": None}

    @property
    def is_connected(self) -> bool:
        return self.connected

    @property
    def is_calibrated(self) -> bool:
        return bool(self.calibration)

    def connect(self, calibrate: bool = True) -> None:
        self.connected = True

    def calibrate(self) -> None:
        pass

    def configure(self) -> None:
        pass

    def get_observation(self) -> dict[str, Any]:
        return {**self.pose, "front": self.noise.integers(126, 129, (96, 96, 3), np.uint8)}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.pose = {name: float(target) for name, target in action.items()}
        self._log("action")
        return action

    def disconnect(self) -> None:
        self._log("disconnect")
        self.connected = False

    def _log(self, event: str) -> None:
        with Path(self.config.actions).open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **self.pose}) + "\n")
