"""Six simulated servos behind a pseudo-terminal, with the real servo package at the other end."""

from collections.abc import Iterator

import pytest

pytest.importorskip("scservo_sdk", reason="the extra 'robot' is not installed")

from robojax.robot import _scservo
from robojax.robot import bus as registers
from robojax.robot.arm import JOINTS, Arm, JointCalibration
from robojax.robot.bus import Bus
from robojax.robot.simulated_bus import Servo, SimulatedBus

LOW, HIGH = 700, 3395
CALIBRATION = {name: JointCalibration(servo, 0, 0, LOW, HIGH) for name, servo in JOINTS.items()}


@pytest.fixture
def servos(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBus]:
    # The simulated servos run in a thread, which may pause longer than the response time of real servos.
    monkeypatch.setattr(_scservo, "PACKET_TIMEOUT", 1000.0)
    made = {servo: Servo() for servo in JOINTS.values()}
    for servo in made.values():
        servo[registers.MIN_POSITION], servo[registers.MAX_POSITION] = LOW, HIGH
    with SimulatedBus(made) as simulated:
        yield simulated


@pytest.fixture
def bus(servos: SimulatedBus) -> Iterator[Bus]:
    with Bus(servos.port) as bus:
        yield bus


@pytest.fixture
def arm(bus: Bus) -> Arm:
    return Arm(bus, CALIBRATION, use_degrees=False)
