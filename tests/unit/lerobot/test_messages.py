import doctest
import random
from types import ModuleType
from typing import Any

import pytest

from service.errors import InvalidRequest, TooLarge
from service.lerobot import messages, pickles
from service.lerobot.messages import EMPTY, ObservationPieces, read_policy_setup, write_actions_message

BEGIN, MIDDLE, END = b"\x08\x01", b"\x08\x02", b"\x08\x03"
PIECE = 2 << 20


def varint(value: int) -> bytes:
    return (bytes([value & 0x7F | 0x80]) + varint(value >> 7)) if value > 0x7F else bytes([value])


def field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + varint(len(data)) + data


def observation_messages(data: bytes) -> list[bytes]:
    """Return the messages that LeRobot's client sends for these bytes."""
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    states = [BEGIN, *[MIDDLE] * (len(pieces) - 2), END] if len(pieces) > 1 else [END]
    return [state + field(0x12, piece) for state, piece in zip(states, pieces, strict=True)]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 70_000])
def test_data_is_written_and_read(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    message = write_actions_message(data)
    assert message == (field(0x0A, data) if size else EMPTY)
    assert bytes(read_policy_setup(message)) == data
    assert bytes(read_policy_setup(memoryview(message))) == data


@pytest.mark.parametrize(
    "others",
    [
        field(0x1A, b"unknown"),
        b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x11" + bytes(8),
        b"\x15" + bytes(4),
        field(0x0A, b"earlier"),
        b"\xf8\xff\xff\xff\x0f\x00",
    ],
)
def test_unknown_and_earlier_fields_are_skipped(others: bytes) -> None:
    assert bytes(read_policy_setup(others + field(0x0A, b"setup"))) == b"setup"


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",
        b"\x0a\x05abcd",
        b"\x0a\xff\xff\xff\xff\x07abc",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01abc",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02abc",
        b"\x0a" + b"\x80" * 1000,
        b"\x08",
        b"\x08\x80",
        b"\x11abcdefg",
        b"\x15abc",
        b"\x0b\x0c",
        b"\x0e\x00",
        b"\x0f\x00",
        b"\x00\x00",
        b"\x02\x01a",
        b"\x08\x01" * 500_000,
    ],
)
def test_malformed_messages_are_refused(message: bytes) -> None:
    with pytest.raises(InvalidRequest, match="protobuf"):
        read_policy_setup(message)
    with pytest.raises(InvalidRequest, match="protobuf"):
        ObservationPieces().add(message)


@pytest.mark.parametrize("size", [1, PIECE, PIECE + 1, 2 * PIECE, 7_100_000])
def test_pieces_are_joined_as_lerobot_cuts_them(size: int) -> None:
    data = random.Random(size).randbytes(size)
    pieces = ObservationPieces()
    for _ in range(2):
        *firsts, last = observation_messages(data)
        assert [pieces.add(message) for message in firsts] == [None] * len(firsts)
        assert pieces.add(last) == data


def test_begin_discards_earlier_pieces() -> None:
    pieces = ObservationPieces()
    for start in (BEGIN + field(0x12, b"old"), MIDDLE + field(0x12, b"older"), BEGIN + field(0x12, b"new")):
        assert pieces.add(start) is None
    assert pieces.add(END) == b"new"
    assert pieces.add(END) == b""


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (MIDDLE + field(0x12, b"a"), "in an observation that did not begin"),
        (field(0x12, b"a"), r"transfer_state is 0; expected 1 \(BEGIN\)"),
        (b"\x08\x00", "transfer_state is 0"),
        (b"\x08\x04", "transfer_state is 4"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "transfer_state is 18446744073709551615"),
        (field(0x0A, b"\1") + field(0x12, b"a"), "transfer_state is 0"),
    ],
)
def test_pieces_without_a_valid_state_are_refused(message: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        ObservationPieces().add(message)


def test_errors_discard_earlier_pieces() -> None:
    pieces = ObservationPieces()
    pieces.add(BEGIN + field(0x12, b"a"))
    with pytest.raises(InvalidRequest, match="transfer_state is 0"):
        pieces.add(EMPTY)
    with pytest.raises(InvalidRequest, match="did not begin"):
        pieces.add(MIDDLE)


def test_size_of_all_pieces_is_limited() -> None:
    pieces = ObservationPieces(max_bytes=10)
    assert pieces.add(END + field(0x12, bytes(10))) == bytes(10)
    assert pieces.add(BEGIN + field(0x12, bytes(6))) is None
    with pytest.raises(TooLarge, match="more than 10 bytes"):
        pieces.add(MIDDLE + field(0x12, bytes(5)))
    with pytest.raises(TooLarge, match="more than 10 bytes"):
        pieces.add(END + field(0x12, bytes(11)))


def test_random_messages_are_read_or_refused() -> None:
    known = [BEGIN, MIDDLE, END, field(0x12, b"abc"), field(0x0A, b"setup"), b"\x11" + bytes(8), b"\x15" + bytes(4)]
    outcomes: dict[Any, int] = {}
    for seed in range(600):
        dice = random.Random(seed)
        message = bytearray(
            b"".join(dice.choices(known, k=dice.randrange(5))) if seed % 3 else dice.randbytes(seed // 20)
        )
        for _ in range(dice.randrange(3) if message else 0):
            message[dice.randrange(len(message))] = dice.randrange(256)
        pieces = ObservationPieces(max_bytes=100)
        for read in (read_policy_setup, pieces.add, pieces.add):
            try:
                kind = type(read(bytes(message)))
            except (InvalidRequest, TooLarge) as error:
                kind = type(error)
            outcomes[kind] = outcomes.get(kind, 0) + 1
    assert min(outcomes[kind] for kind in (InvalidRequest, memoryview, type(None))) > 50, outcomes


@pytest.mark.parametrize("module", [messages, pickles])
def test_examples_run(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)
