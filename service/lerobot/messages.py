"""Protobuf messages of LeRobot's gRPC service ``transport.AsyncInference``, as plain bytes.

The messages have at most two fields, so they need neither the protobuf package nor generated code.
"""

from typing import Any

from service.errors import InvalidRequest, TooLarge
from service.lerobot.pickles import MAX_BYTES

EMPTY = b""  # The message Empty.
# Tags of fields: number of the field << 3 | wire type.
_DATA_TAG = 0x0A  # `data` of PolicySetup and Actions.
_STATE_TAG, _PIECE_TAG = 0x08, 0x12  # `transfer_state` and `data` of Observation.
_BEGIN, _MIDDLE, _END = 1, 2, 3  # TransferState.
_VARINT, _LENGTH_DELIMITED = 0, 2  # Wire types.
_FIXED_SIZES = {1: 8, 5: 4}  # Wire type to bytes.
_MAX_FIELDS = 16


def read_policy_setup(message: bytes | memoryview) -> memoryview:
    """Return the pickle in a PolicySetup message; raises InvalidRequest if it is malformed."""
    return _read_fields(message).get(_DATA_TAG, memoryview(b""))


def write_actions_message(data: bytes) -> bytes:
    """Return an Actions message with pickled actions. Without data, the client asks again at once.

    Example:
        >>> write_actions_message(b"abc").hex()
        '0a03616263'
    """
    length, left = bytearray(), len(data)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    return b"".join((bytes((_DATA_TAG,)), length, bytes((left,)), data)) if data else EMPTY


class ObservationPieces:
    """Observation of one SendObservations call, which the client cuts into messages of 2 MiB.

    Example:
        >>> pieces = ObservationPieces()
        >>> pieces.add(bytes.fromhex("0801 1202 6162"))
        >>> bytes(pieces.add(bytes.fromhex("0803 1201 63")))
        b'abc'
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        """Create it for an observation of at most this number of bytes."""
        self._max_bytes = max_bytes
        self._joined: bytearray | None = None

    def add(self, message: bytes | memoryview) -> memoryview | None:
        """Add the next Observation message, and return the whole pickle after the last one.

        Raises:
            InvalidRequest: the message is malformed, or is the middle of an observation that did not begin.
            TooLarge: the observation has too many bytes.
        """
        joined, self._joined = self._joined, None  # An error discards the earlier pieces.
        fields = _read_fields(message)
        state, piece = fields.get(_STATE_TAG, 0), fields.get(_PIECE_TAG, memoryview(b""))
        if state not in (_BEGIN, _MIDDLE, _END):
            raise InvalidRequest(f"transfer_state is {state}; expected 1 (BEGIN), 2 (MIDDLE) or 3 (END)")
        if state == _MIDDLE and joined is None:
            raise InvalidRequest("transfer_state is 2 (MIDDLE) in an observation that did not begin; send 1 (BEGIN)")
        if state == _BEGIN or joined is None:
            joined = bytearray()
        if len(joined) + len(piece) > self._max_bytes:
            raise TooLarge(f"the observation has more than {self._max_bytes} bytes; send fewer or smaller images")
        if state == _END and not joined:
            return piece  # Without a copy.
        joined += piece
        self._joined = None if state == _END else joined
        return memoryview(joined) if state == _END else None


def _read_fields(message: bytes | memoryview) -> dict[int, Any]:
    """Return an integer or data for each tag. As in protobuf, the last of equal tags counts, and others are skipped."""
    body, position = memoryview(message), 0
    fields: dict[int, Any] = {}
    for _ in range(_MAX_FIELDS):
        if position == len(body):
            return fields
        tag, position = _read_varint(body, position)
        wire_type = tag & 7
        if tag >> 3 == 0 or wire_type not in (_VARINT, _LENGTH_DELIMITED, *_FIXED_SIZES):
            raise InvalidRequest(f"protobuf, byte {position}: tag {tag} is not of a field with wire type 0, 1, 2 or 5")
        size = _FIXED_SIZES.get(wire_type)
        if size is None:
            size, position = _read_varint(body, position)
        if wire_type == _VARINT:
            fields[tag] = size
            continue
        if size > (left := len(body) - position):
            raise InvalidRequest(f"protobuf, byte {position}: {size} bytes are declared; {left} are left")
        fields[tag] = body[position : position + size]
        position += size
    raise InvalidRequest(f"the protobuf message has {_MAX_FIELDS} fields or more; LeRobot's have at most 2")


def _read_varint(body: memoryview, position: int) -> tuple[int, int]:
    """Return an integer of at most 64 bits, and the position after it."""
    value = 0
    for index, byte in enumerate(body[position : position + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80 and value < 1 << 64:
            return value, position + index + 1
    raise InvalidRequest(f"protobuf, byte {position}: an integer is cut off or has more than 64 bits")
