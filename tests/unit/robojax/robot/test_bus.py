"""The bus: the real servo package on a pseudo-terminal with simulated servos."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robojax.robot import _scservo
from robojax.robot import bus as registers
from robojax.robot.bus import Bus, Register
from robojax.robot.errors import BusLost, RobotError
from robojax.robot.simulated_bus import Servo, ServoLine, SimulatedBus, compute_checksum

ALL = range(1, 7)


def test_only_present_servos_answer(bus: Bus) -> None:
    assert [bus.ping(servo) for servo in (1, 6, 7)] == [777, 777, None]


def test_registers_are_written_and_read_with_their_sign(bus: Bus, servos: SimulatedBus) -> None:
    bus.write(3, registers.HOMING_OFFSET, -77)
    assert bus.read(3, registers.HOMING_OFFSET) == -77
    # Feetech's table defines sign and magnitude: bit 11 and 77.
    assert servos.line.servos[3].read(31, 2, 0.0) == (77 | 1 << 11).to_bytes(2, "little")


def test_all_servos_are_read_and_written_with_one_packet(bus: Bus, servos: SimulatedBus) -> None:
    bus.write_all({servo: 1000 + servo for servo in ALL}, registers.GOAL_POSITION)
    assert [bus.read(servo, registers.GOAL_POSITION) for servo in ALL] == [1001, 1002, 1003, 1004, 1005, 1006]
    servos.line.servos[2].status = 4 | 32
    values, complaints = bus.read_all(list(ALL), registers.PRESENT_POSITION)
    assert values == dict.fromkeys(ALL, 2048)
    assert complaints == {2: ["it is too hot", "it is overloaded"]}
    assert bus.status(2) == complaints[2]


@pytest.mark.parametrize("fault", ["silent", "corrupted"])
def test_failing_servo_is_named_and_gets_no_invented_value(bus: Bus, servos: SimulatedBus, fault: str) -> None:
    getattr(servos.line, fault).add(4)
    with pytest.raises(BusLost, match="servo 4") as lost:
        bus.read_all(list(ALL), registers.PRESENT_POSITION)
    assert lost.value.servos == (4,)
    with pytest.raises(BusLost, match="servo 4"):
        bus.write(4, registers.TORQUE_ENABLE, 1)
    getattr(servos.line, fault).clear()
    assert bus.read_all(list(ALL), registers.PRESENT_POSITION)[0] == dict.fromkeys(ALL, 2048)


def test_late_response_is_not_used_for_the_next_request(bus: Bus, servos: SimulatedBus) -> None:
    # Bytes on the line before a request: a well-formed response of servo 1 at position 1.
    stale = bytes([1, 4, 0, 1, 0])
    os.write(servos._ours, b"\xff\xff" + stale + bytes([compute_checksum(stale)]))
    assert bus.read(1, registers.PRESENT_POSITION) == 2048


def test_response_during_a_pause_of_this_process_is_accepted(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scservo, "PACKET_TIMEOUT", 50.0)
    read, stood_still = bus._handler.ser.read, list[bool]()

    def late(length: int) -> bytes:
        if not stood_still:
            stood_still.append(True)
            time.sleep(0.2)  # Longer than the response timeout; the response arrives in this time.
            return b""
        return read(length)

    monkeypatch.setattr(bus._handler.ser, "read", late)
    assert bus.read(1, registers.PRESENT_POSITION) == 2048


def test_lost_port_is_reported(servos: SimulatedBus) -> None:
    with Bus(servos.port) as bus:
        bus._handler.ser.close()
        for _ in range(2):
            with pytest.raises(BusLost, match="is gone"):
                bus.read(1, registers.PRESENT_POSITION)


def test_occupied_or_missing_port_is_explained(bus: Bus, servos: SimulatedBus) -> None:
    for port, advice in ((servos.port, "another program"), ("/dev/ttyACM99", "lerobot-find-port")):
        with pytest.raises(RobotError, match="cannot be opened") as refused:
            Bus(port)
        assert advice in refused.value.then


@given(st.binary(max_size=300))
def test_random_bytes_do_not_break_the_servos(data: bytes) -> None:
    line = ServoLine({1: Servo()})
    line.feed(data, 0.0)
    ask = bytes([1, 4, 2, 56, 2])
    # The rest of an incomplete packet may consume the next bytes; after a silence, the request is repeated.
    answer = b"".join(line.feed(b"\xff\xff" + ask + bytes([compute_checksum(ask)]), 0.0) for _ in range(100))
    assert answer.endswith(b"\xff\xff" + bytes([1, 4, 0, 0, 8, 0xF2]))


@pytest.mark.parametrize("value", [-(1 << 11), 1 << 11])
def test_value_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="Homing_Offset cannot be"):
        registers.HOMING_OFFSET.encode(value)


@given(st.integers(-32767, 32767))
def test_signs_survive_encoding(value: int) -> None:
    register = Register("x", 0, 2, sign_bit=15)
    assert register.decode(register.encode(value)) == value


def test_servo_moves_only_with_torque_and_within_its_speed() -> None:
    servo = Servo(2048, speed=1000.0)
    servo.read(56, 2, 1.0)
    servo.write(42, (3000).to_bytes(2, "little"), 1.0)
    servo.read(56, 2, 2.0)
    assert (servo[registers.PRESENT_POSITION], servo.written) == (2048, [])
    servo.write(40, b"\1", 2.0)
    servo.read(56, 2, 2.5)
    assert servo[registers.PRESENT_POSITION] == 2548
