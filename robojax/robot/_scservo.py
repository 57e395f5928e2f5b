"""Serial port for scservo_sdk that neither polls in a busy loop nor reads stale answers."""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# An extra without types: this module is imported when a bus is opened.

from scservo_sdk import PortHandler

PACKET_TIMEOUT = 50.0  # extra milliseconds for an answer, as in LeRobot; the package's 34 are too few on a busy machine
WAIT = 0.002  # seconds of a blocking read, which replaces the package's busy loop


class SerialPort(PortHandler):
    """scservo_sdk's ``PortHandler``, blocking with timeouts instead of spinning.

    Timeouts count only the waiting time of reads, so that a suspended process or a changed wall clock has no effect.
    ``packet_timeout`` is in milliseconds; None for ``PACKET_TIMEOUT``.
    """

    packet_timeout: float | None = None
    _left = 0.0  # milliseconds that reads may still wait

    def setupPort(self, cflag_baud: int) -> bool:
        """Open the port."""
        if not super().setupPort(cflag_baud):
            return False
        self.ser.timeout = WAIT
        self.ser.exclusive = True  # Two programs must not move the same arm.
        return True

    def clearPort(self) -> None:
        """Discard late bytes before each packet, so that they are not read as its answer."""
        self.ser.reset_input_buffer()
        self.ser.flush()

    def readPort(self, length: int) -> bytes:
        """Read ``length`` bytes, or fewer after the timeout."""
        data = self.ser.read(length)
        if len(data) < length:
            self._left -= WAIT * 1e3
        return data

    def setPacketTimeout(self, packet_length: int) -> None:
        """Set the deadline of an answer of ``packet_length`` bytes."""
        timeout = PACKET_TIMEOUT if self.packet_timeout is None else self.packet_timeout
        self._left = self.tx_time_per_byte * (packet_length + 3) + timeout

    def isPacketTimeout(self) -> bool:
        """Whether the deadline of the answer has passed."""
        return self._left <= 0
