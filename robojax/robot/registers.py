"""The registers of Feetech's STS3215 servo that an SO-100 or SO-101 arm needs, and how their values are written.

Addresses are those of Feetech's memory table for the STS series; names are LeRobot's.
"""

from dataclasses import dataclass

MODEL_NUMBER = 777  # what an STS3215 answers in its register of this name
RESOLUTION = 4096  # steps of one turn


@dataclass(frozen=True)
class Register:
    """One register.

    Attributes:
        length: in bytes, least significant first.
        sign_bit: where the sign stands (sign and magnitude, not two's complement); None for values without one.
    """

    name: str
    address: int
    length: int
    sign_bit: int | None = None

    def encode(self, value: int) -> bytes:
        """The bytes of a value.

        Raises:
            ValueError: it does not fit.
        """
        magnitude, most = abs(value), (1 << (self.sign_bit or 8 * self.length)) - 1
        if magnitude > most or (value < 0 and self.sign_bit is None):
            low = 0 if self.sign_bit is None else -most
            raise ValueError(f"{self.name} cannot be {value}; it takes {low}..{most}")
        sign = 1 << self.sign_bit if value < 0 and self.sign_bit is not None else 0
        return (magnitude | sign).to_bytes(self.length, "little")

    def decode(self, data: bytes) -> int:
        """The value of these bytes."""
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

# What a servo says of itself with every answer, one bit each.
ALARMS = {1: "its voltage is out of range", 2: "its position sensor fails", 4: "it is too hot"} | {
    8: "its current is too high",
    32: "it is overloaded",
}


def alarms(status: int) -> list[str]:
    """A servo's status byte in words; empty when it is well."""
    return [text for bit, text in ALARMS.items() if status & bit]
