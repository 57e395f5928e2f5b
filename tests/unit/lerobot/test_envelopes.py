"""Envelopes of LeRobot's remote inference: reading, limits, and hostile bytes."""

import io
import random
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image

from service.lerobot.envelopes import Envelope, EnvelopeError, read_envelope, write_envelope
from tests.testing.zenoh_robot import rgb, tensor

BASE = {"version": 1, "message_type": "observation", "instance_id": "i", "session_id": "s", "generation": 3}
BASE |= {"request_id": "r"}


def pack(value: Any = None, **changes: Any) -> bytes:
    return msgpack.packb({**BASE, "body": {"x": value}, **changes}) or b""


def nest(depth: int) -> Any:
    return [] if depth == 0 else [nest(depth - 1)]


def test_arrays_and_ids_are_read_as_written() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    envelope = read_envelope(write_envelope(Envelope("observation", {"x": array, "at": 0.1}, "i", "s", 3, "r")))
    np.testing.assert_array_equal(envelope.body["x"], array)
    assert (envelope.body["at"], envelope.generation, envelope.request_id) == (0.1, 3, "r")
    assert msgpack.unpackb(write_envelope(envelope))["body"]["x"] == tensor(array)


def test_big_endian_tensors_and_jpeg_files_are_converted() -> None:
    big = tensor(np.array([1, 2], np.int16)) | {"endianness": "big", "data": np.array([1, 2], ">i2").tobytes()}
    assert read_envelope(pack(big)).body["x"].tolist() == [1, 2]
    file, picture = io.BytesIO(), np.full((16, 24, 3), 90, np.uint8)
    Image.fromarray(picture).save(file, "JPEG")
    read = read_envelope(pack(rgb(picture, "jpeg", file.getvalue()))).body["x"]
    assert np.abs(read.astype(int) - picture).max() < 4
    with pytest.raises(EnvelopeError, match="JPEG"):
        read_envelope(pack(rgb(np.zeros((24, 16, 3), np.uint8), "jpeg", file.getvalue())))


@pytest.mark.parametrize(
    "payload",
    [
        pack(version=True),
        pack(version=2),
        pack(generation=-1),
        pack(generation=1 << 63),
        pack(request_id=""),
        pack(instance_id="x" * 129),
        pack(body=[]),
        pack(float("nan")),
        pack([float("inf")]),
        pack("x" * 16385),
        pack([0] * 4097),
        pack([[0] * 4000] * 3),
        pack(nest(16)),
        pack({1: 2}),
        pack(msgpack.ExtType(5, b"x")),
        pack(tensor(np.zeros(2, np.float32)) | {"shape": [0]}),
        pack(tensor(np.zeros(2, np.float32)) | {"shape": [3]}),
        pack(tensor(np.zeros(2, np.float32)) | {"shape": [1] * 9}),
        pack(tensor(np.zeros(2, np.float32)) | {"dtype": "object"}),
        pack(tensor(np.array([np.nan], np.float32))),
        pack(tensor(np.array([2], np.uint8)) | {"dtype": "bool"}),
        pack(tensor(np.zeros(2, np.uint8)) | {"dtype": tensor(np.zeros(2, np.uint8))}),
        pack(rgb(np.zeros((2, 2, 3), np.uint8)) | {"shape": [2, 2, 4]}),
        pack(rgb(np.zeros((2, 2, 3), np.uint8)) | {"shape": [4097, 4097, 3]}),
        pack([rgb(np.zeros((1, 1, 3), np.uint8)) | {"shape": [4096, 4096, 3], "encoding": "jpeg"}] * 2),
        b"\x82\xa1a\x01\xa1a\x02",
        pack() + b"\x00",
        b"",
        bytes((32 << 20) + 1),
    ],
)
def test_envelopes_beyond_the_limits_are_refused(payload) -> None:
    with pytest.raises(EnvelopeError):
        read_envelope(payload)


@pytest.mark.timed
def test_hostile_envelopes_are_cheap() -> None:
    choices = random.Random(7)
    valid = pack([tensor(np.ones((3, 2), np.float32)), rgb(np.ones((8, 8, 3), np.uint8)), {"a": [1.5, None, "b"]}])
    heads = (0x80, 0x90, 0xC1, 0xC6, 0xC7, 0xDB, 0xDD, 0xDF, 0xFF)
    tracemalloc.start()
    try:
        for _ in range(2000):
            hostile = bytearray(valid)
            for _ in range(choices.randint(1, 8)):
                hostile[choices.randrange(len(hostile))] = choices.choice((*heads, choices.randrange(256)))
            del hostile[choices.randrange(len(hostile) // 2, len(hostile) + 1) :]
            began = time.thread_time()
            with suppress(EnvelopeError):
                read_envelope(bytes(hostile))
            assert time.thread_time() - began < 0.05
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
