"""Bus of Feetech servos, and their registers, by LeRobot's names.

Addresses are of Feetech's STS memory table; ``feetech-servo-sdk`` (``scservo_sdk``) makes the packets.
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from robojax.robot.errors import BusLost, RobotError

MODEL_NUMBER = 777  # value of an STS3215's register Model_Number
RESOLUTION = 4096  # steps of one turn


@dataclass(frozen=True)
class Register:
    """Address and ``length`` in bytes (little endian) of a servo's register.

    ``sign_bit`` is the position of the sign (sign and magnitude); None for unsigned values.
    """

    name: str
    address: int
    length: int
    sign_bit: int | None = None

    def encode(self, value: int) -> bytes:
        """Return the bytes of a value; raise ``ValueError`` if it does not fit."""
        magnitude, most = abs(value), (1 << (self.sign_bit or 8 * self.length)) - 1
        if magnitude > most or (value < 0 and self.sign_bit is None):
            low = 0 if self.sign_bit is None else -most
            raise ValueError(f"{self.name} cannot be {value}; it takes {low}..{most}")
        sign = 1 << self.sign_bit if value < 0 and self.sign_bit is not None else 0
        return (magnitude | sign).to_bytes(self.length, "little")

    def decode(self, data: bytes) -> int:
        """Return the value of these bytes."""
        raw = int.from_bytes(data, "little")
        if self.sign_bit is None:
            return raw
        magnitude = raw & ((1 << self.sign_bit) - 1)
        return -magnitude if raw >> self.sign_bit & 1 else magnitude


FIRMWARE_MAJOR = Register("Firmware_Major_Version", 0, 1)
FIRMWARE_MINOR = Register("Firmware_Minor_Version", 1, 1)
MODEL = Register("Model_Number", 3, 2)
RETURN_DELAY = Register("Return_Delay_Time", 7, 1)
MIN_POSITION = Register("Min_Position_Limit", 9, 2)
MAX_POSITION = Register("Max_Position_Limit", 11, 2)
MAX_TEMPERATURE = Register("Max_Temperature_Limit", 13, 1)  # degrees Celsius
MAX_VOLTAGE = Register("Max_Voltage_Limit", 14, 1)  # tenths of a volt
MIN_VOLTAGE = Register("Min_Voltage_Limit", 15, 1)  # tenths of a volt
MAX_TORQUE = Register("Max_Torque_Limit", 16, 2)
P_COEFFICIENT = Register("P_Coefficient", 21, 1)
D_COEFFICIENT = Register("D_Coefficient", 22, 1)
I_COEFFICIENT = Register("I_Coefficient", 23, 1)
PROTECTION_CURRENT = Register("Protection_Current", 28, 2)
HOMING_OFFSET = Register("Homing_Offset", 31, 2, sign_bit=11)
OPERATING_MODE = Register("Operating_Mode", 33, 1)
OVERLOAD_TORQUE = Register("Overload_Torque", 36, 1)
TORQUE_ENABLE = Register("Torque_Enable", 40, 1)
ACCELERATION = Register("Acceleration", 41, 1)
GOAL_POSITION = Register("Goal_Position", 42, 2, sign_bit=15)
LOCK = Register("Lock", 55, 1)
PRESENT_POSITION = Register("Present_Position", 56, 2, sign_bit=15)
PRESENT_VOLTAGE = Register("Present_Voltage", 62, 1)  # tenths of a volt
PRESENT_TEMPERATURE = Register("Present_Temperature", 63, 1)  # degrees Celsius
MAX_ACCELERATION = Register("Maximum_Acceleration", 85, 1)

# Bits of the status in every answer of a servo.
ALARMS = {
    1: "its voltage is out of range",
    2: "its position sensor fails",
    4: "it is too hot",
    8: "its current is too high",
    32: "it is overloaded",
}


def describe_alarms(status: int) -> list[str]:
    """Return the texts of the errors in a servo's status byte."""
    return [text for bit, text in ALARMS.items() if status & bit]


INSTALL = "pip install -e '.[robot]'"


class Bus:
    """An open serial bus of servos. Calls block for milliseconds; one thread at a time may use it.

    Raises (every method):
        BusLost: the port is lost, or a servo did not answer.
    """

    def __init__(self, port: str, packet_timeout: float | None = None):
        """Open the port; raise ``RobotError`` if it cannot be opened or the package is not installed.

        ``packet_timeout`` is in milliseconds; None for the timeout of real servos.
        """
        try:
            import scservo_sdk
            import serial

            from robojax.robot._scservo import SerialPort
        except ImportError as error:
            raise RobotError(f"{error.name} is not installed, which talks to the servos", INSTALL) from error
        self.port = port
        self._lost = (serial.SerialException, OSError, TypeError)  # pyserial raises TypeError for a closed port.
        self._ok = scservo_sdk.COMM_SUCCESS
        self._write = scservo_sdk.GroupSyncWrite
        self._packets = scservo_sdk.PacketHandler(0)
        self._handler: Any = SerialPort(port)
        self._handler.packet_timeout = packet_timeout
        try:
            self._handler.openPort()
        except (serial.SerialException, OSError, ValueError) as error:
            raise RobotError(f"the port {port} cannot be opened: {_reason(error)}", _port_advice(error)) from error

    def __enter__(self) -> "Bus":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the port; servos keep holding their last targets."""
        if self._handler.ser is not None:
            self._handler.closePort()

    def ping(self, servo: int) -> int | None:
        """Return the model number of a servo; None if no servo with this id answers."""
        model, result, _ = self._do(lambda: self._packets.read2ByteTxRx(self._handler, servo, MODEL.address))
        return model if result == self._ok else None

    def read(self, servo: int, register: Register) -> int:
        """Read a register of a servo."""
        data, result, _ = self._do(
            lambda: self._packets.readTxRx(self._handler, servo, register.address, register.length)
        )
        if result != self._ok or len(data) != register.length:
            raise self._build_bus_lost([servo], f"reading {register.name}", result)
        return register.decode(bytes(data))

    def status(self, servo: int) -> list[str]:
        """Return the texts of the errors that a servo reports."""
        _, result, status = self._do(lambda: self._packets.readTxRx(self._handler, servo, MODEL.address, MODEL.length))
        if result != self._ok:
            raise self._build_bus_lost([servo], "reading its status", result)
        return describe_alarms(status)

    def write(self, servo: int, register: Register, value: int) -> None:
        """Write a register of a servo, which the servo confirms."""
        data = list(register.encode(value))
        result, _ = self._do(
            lambda: self._packets.writeTxRx(self._handler, servo, register.address, register.length, data)
        )
        if result != self._ok:
            raise self._build_bus_lost([servo], f"writing {register.name}", result)

    def read_all(self, servos: Sequence[int], register: Register) -> tuple[dict[int, int], dict[int, list[str]]]:
        """Read the same register of several servos with one packet.

        Returns:
            Id to value, and id to the texts of errors.

        Raises:
            BusLost: a servo did not answer.
        """
        values, alarms = {}, {}
        ask = partial(self._packets.syncReadTx, self._handler, register.address, register.length)
        result = self._do(lambda: ask(list(servos), len(servos)))
        if result != self._ok:
            raise self._build_bus_lost([], f"requesting {register.name}", result)
        for servo in servos:
            data, result, status = self._do(partial(self._packets.readRx, self._handler, servo, register.length))
            if result != self._ok or len(data) != register.length:
                # Do not wait for the other servos, because this reading has failed.
                raise self._build_bus_lost([servo], f"reading {register.name}", result)
            values[servo] = register.decode(bytes(data))
            if texts := describe_alarms(status):
                alarms[servo] = texts
        return values, alarms

    def write_all(self, values: Mapping[int, int], register: Register) -> None:
        """Write the same register of several servos with one packet, without confirmation."""
        group = self._write(self._handler, self._packets, register.address, register.length)
        for servo, value in values.items():
            group.addParam(servo, list(register.encode(value)))
        result = self._do(group.txPacket)
        if result != self._ok:
            raise self._build_bus_lost([], f"writing {register.name}", result)

    def _do(self, call: Any) -> Any:
        try:
            return call()
        except self._lost as error:
            raise BusLost(
                f"the port {self.port} is gone: {_reason(error)}",
                "check the USB cable and the arm's power, then start again",
            ) from error
        finally:
            # After an error, the package leaves this flag set and would refuse all further calls.
            self._handler.is_using = False

    def _build_bus_lost(self, servos: Sequence[int], doing: str, result: int) -> BusLost:
        who = f"servo {', '.join(map(str, servos))}" if servos else "the bus"
        why = self._packets.getTxRxResult(result).removeprefix("[TxRxResult] ").rstrip("!").lower()
        return BusLost(
            f"{who} on {self.port} did not answer ({doing}: {why})",
            "check the power supply and the cables to that servo and the previous servo",
            tuple(servos),
        )


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _port_advice(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    if number == 2:
        return "plug the arm in; lerobot-find-port finds its name, or look for /dev/ttyACM* and /dev/ttyUSB*"
    if number == 13:
        return "add yourself to the port's group (sudo usermod -aG dialout $USER) and log in again"
    if number in (11, 16):
        return "another program has the port; end it"
    return "give the serial port of the arm, e.g. --robot.port=/dev/ttyACM0"
