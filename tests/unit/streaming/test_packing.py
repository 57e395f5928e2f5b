import base64
import json
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service.errors import InvalidRequest, ServiceError, TooLarge
from service.streaming import codec, observation


def to_openpi(array: np.ndarray) -> dict:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def packed(value: object) -> memoryview:
    return memoryview(msgpack.packb(value))


DTYPES = st.sampled_from(["|u1", "<i4", ">i4", "<i8", "<f4", ">f8", "<f2", "|b1"])


@settings(max_examples=40)
@given(DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(max_dims=3, max_side=4, min_side=0))))
def test_arrays_are_read_back_from_both_formats(array):
    for found in (codec.unpack(packed(to_openpi(array))), codec.unpack(codec.pack({"a": array}))["a"]):
        np.testing.assert_array_equal(found, array)
        assert found.dtype.isnative


def test_data_is_not_copied():
    body = codec.pack({"a": np.arange(100, dtype=np.uint8)})
    assert np.shares_memory(codec.unpack(body)["a"], np.frombuffer(body, np.uint8))


ARRAY = to_openpi(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "value",
    [
        ARRAY | {b"dtype": "|O"},
        ARRAY | {b"dtype": "<c8"},
        ARRAY | {b"dtype": "|V4"},
        ARRAY | {b"dtype": "<U1"},
        ARRAY | {b"dtype": "float32,float32"},
        ARRAY | {b"dtype": ["<f4"]},
        ARRAY | {b"shape": [3]},
        ARRAY | {b"shape": [-1, -2]},
        ARRAY | {b"shape": [True, 2]},
        ARRAY | {b"shape": [2**62, 2**62]},
        ARRAY | {b"shape": [2**62, 2**62, 0], b"data": b""},
        ARRAY | {b"shape": [0, 2**62], b"data": b""},
        ARRAY | {b"shape": "2"},
        ARRAY | {b"data": "text"},
        ARRAY | {b"more": 1},
        {b"__ndarray__": True},
        {b"__npgeneric__": True, b"data": "0", b"dtype": "<f4"},
        {b"__npgeneric__": True, b"data": 1, b"dtype": "|O"},
        {"dtype": "object", "shape": [1], "data": b"12345678"},
        {"dtype": "bfloat16", "shape": [1], "data": b"12"},
        {"a": msgpack.ExtType(4, b"pickle")},
        {1: 2},
    ],
    ids=str,
)
def test_a_value_that_is_not_a_plain_array_is_refused(value):
    with pytest.raises(ServiceError) as refused:
        codec.unpack(packed(value))
    assert refused.value.status in (413, 422)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (msgpack.packb({"a": 1}) + b"\xc0", "has data after its end"),
        (b"\x91" * 100_000, None),
        (b"\x81" * 100_000, None),
        (msgpack.packb(list(range(100)) * 6), "too many values"),
    ],
    ids=["trailing data", "deep lists", "deep maps", "many"],
)
def test_long_deep_and_numerous_messages_are_refused(body, message):
    with pytest.raises(ServiceError, match=message):
        codec.unpack(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.binary(), inner, max_size=4),
    max_leaves=12,
)
MARKED = st.sampled_from([b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape", "dtype", "shape", "data"])


@settings(max_examples=150)
@given(st.binary(max_size=64) | (VALUES | st.dictionaries(MARKED, VALUES, max_size=4)).map(msgpack.packb))
@example(packed({b"__npgeneric__": True, b"data": 1, b"dtype": []}))
def test_any_input_is_read_or_refused(body):
    with suppress(InvalidRequest, TooLarge):
        codec.unpack(body)


@pytest.mark.parametrize(
    "text", ["", "{", '{"state": NaN}', "[" * 5000, '{"a": Infinity}', "\ud800", '{"a": {"Elbow": 5, "Elbow": 50}}']
)
def test_invalid_json_is_refused(text):
    with pytest.raises(ServiceError):
        codec.unpack_json(text)
    assert codec.unpack_json(codec.pack_json({"a": np.eye(2)})) == json.loads('{"a": [[1, 0], [0, 1]]}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": "' + "\\n" * 200_000 + '"}', "backslashes"),
        ('{"a": [' + " " * 200_000 + "]}", "outside of strings"),
        ('{"a": [' + ("0." + "9" * 600 + ",") * 300 + "0]}", "outside of strings"),
        ('"' * 200_000, "outside of strings"),
        ("[" + "{}," * 5000 + "1]", "too many values"),
        ('{"a":' + "[1]," * 5000, "too many values"),
        (b"[" + b"0," * 5000 + b"0]", "too many values"),
    ],
    ids=["escapes", "spaces", "numbers", "quotes", "objects", "lists", "bytes"],
)
async def test_a_long_text_without_images_is_refused_unparsed(text, message):
    with pytest.raises(TooLarge, match=message):
        codec.unpack_json(text)
    with pytest.raises(TooLarge, match=message):
        await codec.read_json(text)


async def test_a_long_text_with_images_is_read():
    assert codec.unpack_json(json.dumps({"images": {"front": "A" * (1 << 20)}, "state": [0.5] * 1000}))
    body = {"images": {"front": 'a "\\" ' + "A/" * (1 << 19)}, "state": [0.5, 1]}
    assert await codec.read_json(json.dumps(body)) == body
    assert await codec.read_json(json.dumps(body).replace("/", "\\/", 60_000).encode("utf-16")) == body


@pytest.mark.parametrize("length", [0, 3, 1000, 3 << 16, 300_001])
def test_base64_is_read_in_pieces(length):
    data = np.random.default_rng(length).bytes(length)
    text = base64.b64encode(data).decode()
    assert observation.decode_base64("front", text) == data
    assert observation.decode_base64("front", "data:image/png;base64," + text) == data
    for invalid in (text + "\n", "=" + text, "====" + text if length else "A", text + "\u00e9"):
        with pytest.raises(InvalidRequest):
            observation.decode_base64("front", invalid)


JPEG_HEAD = b"\xff\xd8"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (JPEG_HEAD + b"\xff\xd8\xff" * 1000, "a damaged or incomplete JPEG file"),
        (JPEG_HEAD + b"\xff" * 4000, "a damaged or incomplete JPEG file"),
        (JPEG_HEAD + b"\xff\xfe\0\2" * 1000, "a JPEG file of more than 256 parts"),
        (JPEG_HEAD + b"\xff\xda\0\2" * 1000, "a JPEG file of more than 256 scans"),
        (JPEG_HEAD + b"a" * 1000, "a damaged or incomplete JPEG file"),
        (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0tEXt\0\0\0\0" * 1000, "a PNG file of too many parts"),
        (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0IDAT\0\0\0\0" * 1000, "a PNG file of too many parts"),
    ],
)
def test_images_with_thousands_of_parts_are_not_decoded(file, message):
    with pytest.raises(InvalidRequest, match=f"camera 'front': {message}"):
        observation.decode_image("front", file, 1 << 20)
