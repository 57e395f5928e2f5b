"""Serial port under scservo_sdk, without spinning or stale answers."""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# An extra without types: this module is imported when a bus is opened.

from scservo_sdk import PortHandler

# Milliseconds that an answer may take beyond its bytes. USB adapters hold bytes back for up to 16 ms; the package's own
# 34 ms are too short when the machine is busy (LeRobot waits 50, too).
PATIENCE = 50.0
# Seconds of one read; the package would otherwise ask for bytes in a loop that takes a whole core.
WAIT = 0.002


class SerialPort(PortHandler):
    """``PortHandler`` that does so.

    A servo is silent for as long as reads waited for it in vain: while this process stands still nobody reads, and what
    came meanwhile lies there. Nor does it count when somebody sets the wall clock, which the package goes by.
    """

    _left = 0.0  # milliseconds of reads that may still wait in vain

    def setupPort(self, cflag_baud: int) -> bool:
        """Opens the port."""
        if not super().setupPort(cflag_baud):
            return False
        self.ser.timeout = WAIT
        self.ser.exclusive = True  # two programs that move one arm
        return True

    def clearPort(self) -> None:
        """Called before each packet: what a servo said too late must not be read as the answer to this one."""
        self.ser.reset_input_buffer()
        self.ser.flush()

    def readPort(self, length: int) -> bytes:
        """So many bytes, or what came of them in a while."""
        data = self.ser.read(length)
        if len(data) < length:
            self._left -= WAIT * 1e3
        return data

    def setPacketTimeout(self, packet_length: int) -> None:
        """How long the answer of so many bytes may take."""
        self._left = self.tx_time_per_byte * (packet_length + 3) + PATIENCE

    def isPacketTimeout(self) -> bool:
        """Whether it took longer."""
        return self._left <= 0
