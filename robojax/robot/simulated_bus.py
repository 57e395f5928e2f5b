"""Simulated servos behind a pseudo-terminal, with the protocol of real servos, for tests and robots without an arm."""

import os
import select
import threading
import time
import tty
from collections.abc import Mapping

from robojax.robot import bus
from robojax.robot.bus import RESOLUTION, Register

PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 0x01, 0x02, 0x03, 0x82, 0x83
EVERYBODY = 0xFE
SPEED = 3000.0  # steps per second without load, about the speed of an STS3215 at 7.4 V
MAX_WRITTEN = 20_000  # goals in a servo's history, because an arm may run for days
# Initial values of a calibrated servo's registers.
FIRST = {
    bus.FIRMWARE_MAJOR: 3,
    bus.FIRMWARE_MINOR: 10,
    bus.MODEL: bus.MODEL_NUMBER,
    bus.RETURN_DELAY: 250,
    bus.MAX_POSITION: RESOLUTION - 1,
    bus.MAX_TEMPERATURE: 70,
    bus.MAX_VOLTAGE: 80,
    bus.MIN_VOLTAGE: 40,
    bus.MAX_TORQUE: 1000,
    bus.PROTECTION_CURRENT: 500,
    bus.P_COEFFICIENT: 32,
    bus.D_COEFFICIENT: 32,
    bus.OVERLOAD_TORQUE: 80,
    bus.LOCK: 1,
    bus.PRESENT_VOLTAGE: 74,
    bus.PRESENT_TEMPERATURE: 31,
}


class Servo:
    """Simulated servo: its memory, and a shaft that moves to its goal while torque is on.

    ``speed`` is in steps per second; None for a shaft that only ``set_position`` turns, e.g. with a physics engine.
    ``written`` contains the newest goals while torque was on, each with its time.
    """

    def __init__(self, position: int = RESOLUTION // 2, speed: float | None = SPEED):
        self.memory = bytearray(128)
        self.status = 0
        self.written: list[tuple[float, int]] = []
        self._position, self._speed, self._at = float(position), speed, 0.0
        for register, value in FIRST.items():
            self[register] = value
        self[bus.GOAL_POSITION] = position
        self[bus.PRESENT_POSITION] = position

    def __getitem__(self, register: Register) -> int:
        return register.decode(bytes(self.memory[register.address : register.address + register.length]))

    def __setitem__(self, register: Register, value: int) -> None:
        self.memory[register.address : register.address + register.length] = register.encode(value)

    def read(self, address: int, length: int, now: float) -> bytes:
        """Read bytes of the memory."""
        self._move(now)
        return bytes(self.memory[address : address + length])

    def write(self, address: int, data: bytes, now: float) -> None:
        """Write bytes to the memory, except to read-only registers."""
        self._move(now)
        protected = bytes(self.memory[:5]), bytes(self.memory[56:71])
        self.memory[address : address + len(data)] = data
        self.memory[:5], self.memory[56:71] = protected
        goal = bus.GOAL_POSITION
        if address <= goal.address < address + len(data) and self[bus.TORQUE_ENABLE]:
            self.written.append((now, self[goal]))
            if len(self.written) > MAX_WRITTEN:
                del self.written[: MAX_WRITTEN // 2]

    def set_position(self, position: float) -> None:
        """Turn the shaft to a position, as by hand."""
        self._position = position
        self[bus.PRESENT_POSITION] = round(position)

    def _move(self, now: float) -> None:
        seconds, self._at = (now - self._at if self._at else 0.0), now
        if self[bus.TORQUE_ENABLE] and self._speed is not None:
            low, high = self[bus.MIN_POSITION], self[bus.MAX_POSITION]
            way = min(max(self[bus.GOAL_POSITION], low), high) - self._position
            step = self._speed * seconds
            self._position += max(-step, min(step, way))
            self[bus.PRESENT_POSITION] = round(self._position)


class ServoLine:
    """All servos of a bus; ``silent`` servos do not answer, ``corrupted`` servos send wrong checksums."""

    def __init__(self, servos: Mapping[int, Servo]):
        self.servos = dict(servos)
        self.silent: set[int] = set()
        self.corrupted: set[int] = set()
        self._buffer = bytearray()

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the answer of the servos to these bytes."""
        self._buffer += data
        answers = bytearray()
        while (packet := self._next()) is not None:
            answers += self._execute(packet, now)
        return bytes(answers)

    def _next(self) -> bytes | None:
        """Return the next complete and valid packet: id, length, instruction, parameters."""
        while True:
            start = self._buffer.find(b"\xff\xff")
            if start < 0:
                del self._buffer[: max(0, len(self._buffer) - 1)]
                return None
            del self._buffer[:start]
            if len(self._buffer) < 4:
                return None
            whole = self._buffer[3] + 4
            if len(self._buffer) < whole:
                return None
            packet = bytes(self._buffer[2:whole])
            if packet[1] >= 2 and packet[-1] == compute_checksum(packet[:-1]):
                del self._buffer[:whole]
                return packet[:-1]
            del self._buffer[0]

    def _execute(self, packet: bytes, now: float) -> bytes:
        target, instruction, parameters = packet[0], packet[2], packet[3:]
        if instruction == SYNC_WRITE and target == EVERYBODY and len(parameters) > 2:
            address, length = parameters[0], parameters[1]
            for start in range(2, len(parameters) - length, length + 1):
                servo = parameters[start]
                if servo in self.servos and servo not in self.silent:
                    self.servos[servo].write(address, parameters[start + 1 : start + 1 + length], now)
            return b""
        if instruction == SYNC_READ and target == EVERYBODY and len(parameters) > 2:
            address, length = parameters[0], parameters[1]
            return b"".join(self._answer(servo, self._read(servo, address, length, now)) for servo in parameters[2:])
        if target not in self.servos:
            return b""
        if instruction == READ and len(parameters) == 2:
            return self._answer(target, self._read(target, parameters[0], parameters[1], now))
        if instruction == WRITE and len(parameters) > 1:
            if target not in self.silent:
                self.servos[target].write(parameters[0], parameters[1:], now)
            return self._answer(target, b"")
        return self._answer(target, b"") if instruction == PING else b""

    def _read(self, servo: int, address: int, length: int, now: float) -> bytes:
        return self.servos[servo].read(address, length, now) if servo in self.servos else b""

    def _answer(self, servo: int, data: bytes) -> bytes:
        if servo not in self.servos or servo in self.silent:
            return b""
        body = bytes([servo, len(data) + 2, self.servos[servo].status]) + data
        wrong = 1 if servo in self.corrupted else 0
        return b"\xff\xff" + body + bytes([compute_checksum(body) ^ wrong])


def compute_checksum(body: bytes) -> int:
    """Return the checksum, the last byte of a packet with this body."""
    return ~sum(body) & 0xFF


class SimulatedBus:
    """Simulated servos in a thread behind the pseudo-terminal ``port`` (for ``--robot.port``); a context manager."""

    def __init__(self, servos: Mapping[int, Servo]):
        self.line = ServoLine(servos)
        self.lock = threading.Lock()
        self._ours, self._theirs = os.openpty()
        tty.setraw(self._theirs)
        self.port = os.ttyname(self._theirs)
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="servos", daemon=True)

    def __enter__(self) -> "SimulatedBus":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._end, b"x")
        self._thread.join()
        for descriptor in (self._ours, self._theirs, self._ended, self._end):
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._ours, self._ended], [], [])
            if self._ended in ready:
                return
            data = os.read(self._ours, 4096)
            with self.lock:
                answer = self.line.feed(data, time.monotonic())
            if answer:
                os.write(self._ours, answer)
