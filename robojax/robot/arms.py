"""An arm as its flags tell of it: a real one with its calibration file, or a simulated one."""

from collections.abc import Iterator
from contextlib import contextmanager

from robojax.robot.arm import JOINTS, Arm
from robojax.robot.bus import Bus
from robojax.robot.calibration import Calibration, JointCalibration, find_calibration, read_calibration
from robojax.robot.flags import RobotConfig

# Of the simulated arm: its servos stand in the middle of two thirds of a turn.
LOW, HIGH = 700, 3395


def calibration_of(config: RobotConfig) -> Calibration:
    """Its calibration.

    Raises:
        RobotError: there is none, or it cannot be used.
    """
    if config.is_simulated:
        return {name: JointCalibration(servo, 0, 0, LOW, HIGH) for name, servo in JOINTS.items()}
    return read_calibration(find_calibration(config.type, config.id, config.calibration_dir), JOINTS)


@contextmanager
def open_arm(config: RobotConfig) -> Iterator[Arm]:
    """The arm until the context ends; nothing is written to it by that.

    Raises:
        RobotError: its calibration, its port or a package is not there.
    """
    calibration = calibration_of(config)
    if config.is_simulated and not config.port:
        from robojax.robot.registers import HOMING_OFFSET, MAX_POSITION, MIN_POSITION
        from robojax.robot.simulated import Servo, SimulatedBus

        servos = {servo: Servo() for servo in JOINTS.values()}
        for servo in servos.values():
            servo[HOMING_OFFSET], servo[MIN_POSITION], servo[MAX_POSITION] = 0, LOW, HIGH
        with SimulatedBus(servos) as simulated, Bus(simulated.port) as bus:
            yield Arm(bus, calibration, config.use_degrees)
        return
    with Bus(config.port) as bus:
        yield Arm(bus, calibration, config.use_degrees)
