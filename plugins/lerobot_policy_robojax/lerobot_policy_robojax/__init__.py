"""Policy ``robojax`` of LeRobot, which asks a robojax server for actions."""

from lerobot_policy_robojax.configuration_robojax import RobojaxConfig

__all__ = ["RobojaxConfig"]
