"""A scripted expert that knows where the asked cube is: reach above it, go down, close the jaw, lift.

Its poses come from damped least squares inverse kinematics with the fingers pointing down.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's names come from a compiled module without stubs.

from collections.abc import Iterator
from dataclasses import dataclass

import mujoco
import numpy as np

from service.demo import scene
from service.demo.arm import HOME, Arm
from service.demo.units import HIGH, JOINTS, LOW, to_wire

OPEN, CLOSED = 1.2, -0.1  # radians of the jaw
HOVER, GRASP, LIFT = 0.07, 0.005, 0.09  # metres of the grip above the cube's centre
TURN_WEIGHT = 0.15  # metres per radian: how much a tilted finger counts against a missed place
DAMPING = 1e-4
UP = np.array([0.0, 0.0, 1.0])
LONGEST_STEP = 0.2  # radians per iteration


@dataclass(frozen=True)
class Leg:
    """Part of the way: a pose in radians and the ticks to get there."""

    pose: np.ndarray
    ticks: int


class Kinematics:
    """Poses of the arm for places of its grip; works on a copy, so the simulated arm does not move."""

    def __init__(self, arm: Arm):
        self.model = arm.model
        self._data = mujoco.MjData(arm.model)
        self._addresses = arm.addresses
        self._free = len(JOINTS) - 1  # all but the jaw
        self._columns = [self.model.joint(f"{scene.ARM}/{joint}").dofadr[0] for joint in JOINTS[: self._free]]
        self._grip = self.model.site(scene.GRIP).id
        self._hand = self.model.site_bodyid[self._grip]

    def solve(self, start: np.ndarray, place: np.ndarray, iterations: int = 80) -> np.ndarray:
        """The pose (radians) near `start` whose grip is at `place` (metres), fingers down."""
        model, data, pose = self.model, self._data, start.copy()
        moves, turns = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        for _ in range(iterations):
            data.qpos[self._addresses] = pose
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            fingers = -data.xmat[self._hand].reshape(3, 3)[:, 1]
            missing = place - data.site_xpos[self._grip]
            tilt = np.cross(fingers, (0.0, 0.0, -1.0))
            mujoco.mj_jacSite(model, data, moves, turns, self._grip)
            jacobian = np.vstack((moves[:, self._columns], TURN_WEIGHT * turns[:, self._columns]))
            error = np.concatenate((missing, TURN_WEIGHT * tilt))
            step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + DAMPING * np.eye(6), error)
            pose[: self._free] += np.clip(step, -LONGEST_STEP, LONGEST_STEP)
            pose = np.clip(pose, LOW, HIGH)
        return pose


def plan(arm: Arm, kinematics: Kinematics) -> list[Leg]:
    """The way to lift the asked cube from where it lies now: 90 ticks in all."""
    cube = arm.cube
    above = kinematics.solve(HOME, cube + HOVER * UP)
    at = kinematics.solve(above, cube + GRASP * UP)
    up = kinematics.solve(above, cube + LIFT * UP)
    above[-1] = at[-1] = OPEN
    closed = at.copy()
    closed[-1] = up[-1] = CLOSED
    return [Leg(above, 25), Leg(at, 15), Leg(closed, 15), Leg(up, 25), Leg(up, 10)]


def targets(legs: list[Leg], start: np.ndarray = HOME) -> Iterator[np.ndarray]:
    """One target (six wire values) per tick, easing in and out of every leg."""
    before = start
    for leg in legs:
        for tick in range(1, leg.ticks + 1):
            share = tick / leg.ticks
            eased = share * share * (3 - 2 * share)
            yield to_wire(before + (leg.pose - before) * eased)
        before = leg.pose
