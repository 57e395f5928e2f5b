"""The demo's arm behind simulated servos: a lift goes through units, steps and packets, and still is a lift."""

import numpy as np
import pytest

from robojax.robot import bus
from robojax.robot.arm import JOINTS, Arm, Unit, from_steps, to_steps
from robojax.robot.arm_thread import Follower, normalize_joint_name
from robojax.robot.simulated_bus import SimulatedBus
from tests.unit.robojax.robot.conftest import CALIBRATION

pytest.importorskip("mujoco", reason="the extra 'sim' is not installed")
TICK = 0.04  # seconds of the demo's clock
UNITS = {name: Unit.GRIPPER if name == "gripper" else Unit.PERCENT for name in JOINTS}


def test_the_demos_cube_is_lifted_through_the_bus(arm: Arm, servos: SimulatedBus) -> None:
    from robojax.sim.arm import JOINTS as WIRE
    from robojax.sim.arm import Arm as Simulation
    from robojax.sim.expert import Kinematics, interpolate_targets, plan_legs

    simulation = Simulation()
    simulation.reset(5)
    names = [normalize_joint_name(name) for name in WIRE]
    assert names == list(JOINTS)

    def feel() -> None:
        """The servos are where the simulated joints are."""
        with servos.lock:
            for name, value in zip(names, simulation.joints, strict=True):
                servos.servo(JOINTS[name]).set_position(to_steps(float(value), CALIBRATION[name], UNITS[name]))

    feel()
    arm.enable_torque()
    follower = Follower(JOINTS, command_timeout=0.5, max_relative_target=20.0)
    now, farthest = 0.0, 0.0
    for wanted in interpolate_targets(plan_legs(simulation, Kinematics(simulation))):
        command = dict(zip(WIRE, wanted.tolist(), strict=True))
        follower.command(command, now)
        pose = arm.read_pose()
        assert pose is not None
        goal = follower.compute_goal(pose, now).targets
        assert goal is not None
        arm.move(goal)
        assert arm.read_status("gripper") == []  # nobody confirms a target; what is asked after it is answered after it
        with servos.lock:
            told = [
                from_steps(servos.servo(servo)[bus.GOAL_POSITION], CALIBRATION[name], UNITS[name])
                for name, servo in JOINTS.items()
            ]
        farthest = max(farthest, *(abs(each - goal[name]) for each, name in zip(told, names, strict=True)))
        simulation.step(np.array(told))
        feel()
        now += TICK
    assert simulation.is_lifted
    # One step of a servo is 0.074 of -100..100.
    assert farthest < 0.08
