import io
import json
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidRequest, NotAcceptable, TooLarge, UnknownForm
from service.http import array_formats
from service.http.array_formats import ARRAY_FORMATS, ARRAY_FORMS, DTYPES, ArrayLimits
from service.http.bodies import choose_form, find_form

LIMITS = ArrayLimits(bytes=1 << 16, arrays=4)


def to_npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def to_json(**arrays: np.ndarray) -> bytes:
    entries = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tolist()}
        for name, array in arrays.items()
    }
    return json.dumps({"inputs": entries}).encode()


READERS = {"npz": (array_formats.decode_npz, to_npz), "json": (array_formats.decode_json, to_json)}
both = pytest.mark.parametrize(("decode", "write"), READERS.values(), ids=READERS)


def npy(header: str, data: bytes = b"", name: str = "x.npy", **more) -> bytes:
    """Return an npz file whose only member has this header."""
    head = header.encode() + b"\n"
    file = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, file, **more)
    return buffer.getvalue()


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_allowed_dtype_are_decoded(decode, write, dtype):
    if decode is array_formats.decode_npz and dtype == "bfloat16":
        with pytest.raises(InvalidRequest, match="dtype"):  # NumPy's files cannot name bfloat16.
            decode(write(x=np.ones(2, DTYPES[dtype])), LIMITS, {})
        return
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(DTYPES[dtype])
    [(name, found)] = decode(write(some_name=array), LIMITS, {}).items()
    assert (name, found.dtype, found.shape) == ("some_name", array.dtype, (2, 3))
    assert found.tolist() == array.tolist()


@both
def test_several_arrays_and_a_scalar_are_decoded(decode, write):
    arrays = {"a": np.float32(1.5).reshape(()), "b": np.arange(6, dtype=np.int16).reshape(1, 2, 3)}
    found = decode(write(**arrays), LIMITS, {})
    assert {name: array.shape for name, array in found.items()} == {"a": (), "b": (1, 2, 3)}
    assert (float(found["a"]), found["b"].ravel().tolist()) == (1.5, [0, 1, 2, 3, 4, 5])


@both
@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        (dict.fromkeys("ab", np.zeros(9000, np.float32)), TooLarge, "max_forward_bytes"),
        (dict.fromkeys("abcde", np.zeros(1, np.float32)), TooLarge, "more than 4 arrays"),
        *(({"x": np.zeros(shape, np.float32)}, InvalidRequest, "x has shape") for shape in ((0,), (2, 0), (1,) * 9)),
        *(
            ({"x": np.array([0, bad], DTYPES[dtype])}, InvalidRequest, r"NaN|finite|dtype")
            for bad in (np.nan, np.inf, -np.inf)
            for dtype in ("float16", "float32", "float64", "bfloat16")
        ),
    ],
)
def test_too_many_empty_and_infinite_arrays_are_refused(decode, write, arrays, error, message):
    with pytest.raises(error, match=message):
        decode(write(**arrays), LIMITS, {})


@both
def test_a_body_that_is_cut_at_any_place_is_refused(decode, write):
    whole = write(x=np.arange(100, dtype=np.float32), y=np.float32(1).reshape(()))
    decode(whole, LIMITS, {})
    for end in range(0, len(whole), 7):
        with pytest.raises((InvalidRequest, TooLarge)):
            decode(whole[:end], LIMITS, {})


@both
@given(st.data())
def test_a_damaged_body_raises_only_the_documented_errors(decode, write, data):
    whole = bytearray(write(x=np.arange(12, dtype=np.float32).reshape(3, 4), y=np.arange(3)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(whole), LIMITS, {})
    except (InvalidRequest, TooLarge):
        return
    assert all(array.dtype in DTYPES.values() and array.nbytes <= LIMITS.bytes for array in found.values())


@pytest.mark.parametrize("form", ARRAY_FORMATS, ids=lambda form: form.content_type)
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 5000), (3, 2, 700), (5000,), (2, 3, 1, 1)])
def test_encoded_arrays_can_be_decoded(form, shape):
    sample = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    body = b"".join(form.encode({"sample": sample}, {"compute": 1.5}))
    if form.content_type.endswith("npz"):
        found = np.load(io.BytesIO(body), allow_pickle=False)["sample"]
    else:
        answer = json.loads(body)
        assert answer["timings_ms"] == {"compute": 1.5}
        entry = answer["outputs"]["sample"]
        assert (entry["dtype"], entry["shape"]) == ("float32", list(shape))
        found = np.array(entry["data"], np.float32)
    np.testing.assert_array_equal(found, sample)


def test_an_answer_with_nan_is_refused_in_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        array_formats.encode_json({"sample": np.array([np.nan], np.float32)}, {})


def test_numbers_and_lists_get_the_dtype_of_the_model():
    body = b'{"inputs": {"x": [[1, 2], [3, 4]], "t": 7, "m": [true, false], "other": [1, 2.5]}, "unknown": 1}'
    found = array_formats.decode_json(body, LIMITS, {"x": "float32", "t": "int32", "m": "float32"})
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "x": ("float32", (2, 2)),
        "t": ("int32", ()),
        "m": ("float32", (2,)),
        "other": ("float64", (2,)),
    }


def test_flat_data_is_accepted_with_a_shape():
    body = b'{"inputs": {"x": {"dtype": "int8", "shape": [2, 2], "data": [1, 2, 3, -4]}}}'
    found = array_formats.decode_json(body, LIMITS, {})
    assert found["x"].tolist() == [[1, 2], [3, -4]]


@pytest.mark.parametrize(
    "value",
    [
        *('"text"', '["1.5"]', "null", "[[1], [2, 3]]", "[1, [2]]", "[[]]"),
        *('{"dtype": "float32"}', '{"dtype": "object", "data": [1]}', '{"dtype": 4, "data": [1]}'),
        *('{"shape": [3], "data": [1, 2]}', '{"shape": "2", "data": [1, 2]}', '{"shape": [true], "data": [1]}'),
        *('{"shape": [-1], "data": [1]}', '{"dtype": "int8", "data": [300]}', '{"dtype": "uint8", "data": [-1]}'),
        *('{"dtype": "int32", "data": [1.5]}', '{"dtype": "float16", "data": [1e6]}', "1e999", "NaN", "[Infinity]"),
        *("1" + "0" * 400, "[" * 100_000, "[" * 80 + "1" + "]" * 80, "99999999999999999999"),
    ],
)
def test_json_that_is_not_a_finite_array_is_refused(value):
    with pytest.raises(InvalidRequest):
        array_formats.decode_json(f'{{"inputs": {{"x": {value}}}}}'.encode(), LIMITS, {})


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"inputs": []}', b'{"inputs": 1}', b"\xff\xfe", b"nope"])
def test_json_of_another_form_is_refused_with_the_expected_form(body):
    with pytest.raises(InvalidRequest, match="wanted"):
        array_formats.decode_json(body, LIMITS, {})


def test_unusual_array_names_are_not_repeated_in_errors():
    for name in ("<script>", "x" * 200, ""):
        with pytest.raises(InvalidRequest) as caught:
            array_formats.decode_json(json.dumps({"inputs": {name: "y"}}).encode(), LIMITS, {})
        assert name == "" or name not in str(caught.value)


def test_array_orders_byte_orders_and_compression_are_decoded():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays, packed = {"c": array, "f": np.asfortranarray(array), "big": array.astype(">f4")}, io.BytesIO()
    np.savez_compressed(packed, **arrays)
    for body in (to_npz(**arrays), packed.getvalue()):
        for read in array_formats.decode_npz(body, LIMITS, {}).values():
            np.testing.assert_array_equal(read, array)
            assert read.dtype.isnative


def test_compression_bombs_are_refused():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.zeros(50_000_000, np.uint8))
    assert len(buffer.getvalue()) < 60_000
    with pytest.raises(TooLarge, match="when unpacked"):
        array_formats.decode_npz(buffer.getvalue(), LIMITS, {})
    body = bytearray(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (100,)}", bytes(1 << 20)))
    struct.pack_into("<II", body, body.rindex(b"PK\x01\x02") + 20, 600, 600)  # The directory states wrong sizes.
    with pytest.raises((InvalidRequest, TooLarge)):
        array_formats.decode_npz(bytes(body), LIMITS, {})


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\x80\x04N."),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,)}", bytes(4)),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", bytes(4)),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", bytes(4)),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(4)),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", bytes(4)),
        ("{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        ("{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        ("{'descr': '<U4', 'fortran_order': False, 'shape': (1,)}", bytes(16)),
        ("{'descr': '<f16', 'fortran_order': False, 'shape': (1,)}", bytes(16)),
        ("{'descr': '|V2', 'fortran_order': False, 'shape': (1,)}", bytes(2)),
        ("{'descr': '(2,)<f4', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", bytes(4)),
        ("{'descr': '<f4', 'shape': (1,)}", bytes(4)),
        ("__import__('os').abort()", b""),
        ("(" * 3000, b""),
        ("{" + " " * 5000 + "'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(4)),
    ],
)
def test_headers_of_unsupported_arrays_are_refused(header, data):
    with pytest.raises((InvalidRequest, TooLarge)):
        array_formats.decode_npz(npy(header, data), LIMITS, {})


VALID_HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"
VALID_FILE = npy(VALID_HEADER, bytes(4))
UNREADABLE = {
    **{f"member {name!r}": (npy(VALID_HEADER, bytes(4), name), None) for name in ("x", "x.txt", ".npy")},
    "packed by bzip2": (npy(VALID_HEADER, bytes(4), compress_type=zipfile.ZIP_BZIP2), "packed in a way"),
    "packed by LZMA": (npy(VALID_HEADER, bytes(4), compress_type=zipfile.ZIP_LZMA), "packed in a way"),
    "empty": (b"", r"numpy\.savez"),
    "the first two bytes": (b"PK", r"numpy\.savez"),
    "not a zip": (b"x" * 1000, r"numpy\.savez"),
    "a pickle": (b"\x80\x04\x95" + b"." * 100, r"numpy\.savez"),
    "a comment": (VALID_FILE[:-2] + b"\x05\x00hello", None),
    "ZIP64": (VALID_FILE[:-22] + b"PK\x06\x07" + bytes(16) + VALID_FILE[-22:], "extras"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_zips_of_other_forms_and_members_are_refused(kind):
    assert array_formats.decode_npz(VALID_FILE, LIMITS, {})["x"].tolist() == [0]
    body, message = UNREADABLE[kind]
    with pytest.raises(InvalidRequest, match=message):
        array_formats.decode_npz(body, LIMITS, {})


def test_a_duplicate_name_is_refused():
    buffer = io.BytesIO()
    archive_bytes = to_npz(x=np.zeros(1, np.float32))
    with zipfile.ZipFile(io.BytesIO(archive_bytes)) as source, zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", source.read("x.npy"))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", source.read("x.npy"))
    with pytest.raises(InvalidRequest, match="twice"):
        array_formats.decode_npz(buffer.getvalue(), LIMITS, {})


def test_a_directory_of_many_members_is_refused_before_it_is_read():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(3000):
            archive.writestr(f"{number}.npy", b"")
    body = bytearray(buffer.getvalue())
    with pytest.raises(TooLarge, match="more than 4 arrays"):
        array_formats.decode_npz(bytes(body), LIMITS, {})
    struct.pack_into("<2H", body, len(body) - 14, 1, 1)  # The count is wrong, but the size of the directory is right.
    with pytest.raises(TooLarge, match="more than 4 arrays"):
        array_formats.decode_npz(bytes(body), LIMITS, {})


def test_a_directory_with_wrong_offsets_is_refused():
    directory = VALID_FILE.rindex(b"PK\x01\x02")
    for offset, value in (
        (len(VALID_FILE) - 5, b"\x7f"),  # The directory begins after the end of the file.
        (directory + 46, b"\x80"),  # The name is not valid UTF-8.
        (directory + 42, b"\xff\xff\xff\x7f"),  # The member begins after the end of the file.
    ):
        damaged = bytearray(VALID_FILE)
        damaged[directory + 9] |= 0x08  # This bit states that names are in UTF-8.
        damaged[offset : offset + len(value)] = value
        with pytest.raises(InvalidRequest, match=r"numpy\.savez"):
            array_formats.decode_npz(bytes(damaged), LIMITS, {})


def test_the_content_type_selects_the_form_of_a_body():
    assert find_form("application/x-npz", ARRAY_FORMS).decode is array_formats.decode_npz
    assert find_form("Application/JSON; charset=utf-8", ARRAY_FORMS).decode is array_formats.decode_json
    for other in (None, "", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        with pytest.raises(UnknownForm, match="application/json, application/x-npz"):
            find_form(other, ARRAY_FORMS)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "application/json"),
        ("", "application/json"),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("application/x-npz", "application/x-npz"),
        ("application/json;q=0.5, application/x-npz;q=0.9", "application/x-npz"),
        ("text/html, application/json", "application/json"),
        ("application/x-npz;q=0, */*;q=0.1", "application/json"),
        ("application/x-npz;q=nonsense, application/json", "application/json"),
    ],
)
def test_the_accept_header_selects_the_form_of_an_answer(accept, expected):
    assert choose_form(accept, ARRAY_FORMATS[0], ARRAY_FORMS).content_type == expected


def test_an_unsupported_accept_header_is_refused():
    with pytest.raises(NotAcceptable, match="application/x-npz"):
        choose_form("text/html, image/png", ARRAY_FORMATS[0], ARRAY_FORMS)
