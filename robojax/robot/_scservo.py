"""Serial port for scservo_sdk that neither spins nor reads stale answers."""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# An extra without types: this module is imported when a bus is opened.

from scservo_sdk import PortHandler

# Extra milliseconds for an answer, as in LeRobot; the package's 34 are too short on a busy machine.
PACKET_TIMEOUT = 50.0
# Seconds of one read; the package would otherwise ask for bytes in a loop that takes a whole core.
WAIT = 0.002


class SerialPort(PortHandler):
    """scservo_sdk's ``PortHandler``, blocking with timeouts instead of spinning.

    Only the time that reads wait counts towards a timeout, so suspending the process or changing the wall clock, which
    the package uses, has no effect. `packet_timeout` is in milliseconds; None for ``PACKET_TIMEOUT``.
    """

    packet_timeout: float | None = None
    _left = 0.0  # milliseconds that reads may still wait

    def setupPort(self, cflag_baud: int) -> bool:
        """Open the port."""
        if not super().setupPort(cflag_baud):
            return False
        self.ser.timeout = WAIT
        self.ser.exclusive = True  # two programs that move one arm
        return True

    def clearPort(self) -> None:
        """Drop bytes that came late, before each packet: they must not be read as the answer to this one."""
        self.ser.reset_input_buffer()
        self.ser.flush()

    def readPort(self, length: int) -> bytes:
        """Read this many bytes, or those that came before the timeout."""
        data = self.ser.read(length)
        if len(data) < length:
            self._left -= WAIT * 1e3
        return data

    def setPacketTimeout(self, packet_length: int) -> None:
        """Set the deadline of an answer of this many bytes."""
        timeout = PACKET_TIMEOUT if self.packet_timeout is None else self.packet_timeout
        self._left = self.tx_time_per_byte * (packet_length + 3) + timeout

    def isPacketTimeout(self) -> bool:
        """Whether the deadline of the answer has passed."""
        return self._left <= 0
