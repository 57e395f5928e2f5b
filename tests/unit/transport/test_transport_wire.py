"""Encoding and decoding of messages, and refusal of invalid messages."""

import json
import traceback
from contextlib import suppress
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.transport import protocol
from service.transport.protocol import Join, JointUpdate, ParticipantRole, Unknown, WireError

MESSAGES = [kind for kind in get_args(protocol.Message) if kind not in (Unknown, protocol.JoinRefusal)]

# Examples take long to generate on a loaded machine, which must not fail the test.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
names = st.text(min_size=1, max_size=protocol.MAX_NAME)
text = st.text(max_size=30)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
)
objects = st.dictionaries(text, values, max_size=4)
joints = st.builds(lambda extra, name, value: {**extra, "name": name, "value": value}, objects, names, numbers)
descriptions = st.builds(lambda extra, sdp: {**extra, "sdp": sdp}, objects, text)
BY_FIELD = {
    "role": st.sampled_from(ParticipantRole),
    "participant_id": names,
    "room_id": text,
    "workspace_id": st.none() | text,
    "offer": descriptions,
    "answer": descriptions,
    "candidate": objects,
    "config": objects,
    "status": values,
    "stats": values,
    "message": text,
    "from_producer": text,
    "from_consumer": text,
}


def field(kind: type, name: str) -> st.SearchStrategy:
    if name == "data":
        by_kind = {
            protocol.StateSync: st.dictionaries(text, numbers, max_size=4),
            JointUpdate: st.lists(joints, max_size=4).map(tuple),
            protocol.StatusUpdate: values,
        }
        return by_kind[kind]
    return BY_FIELD.get(name, st.none() | text)


any_message = st.one_of(
    [st.builds(kind, **{entry.name: field(kind, entry.name) for entry in fields(kind)}) for kind in MESSAGES]
)


@patient
@given(any_message)
def test_an_encoded_message_parses_to_the_same_message(message):
    assert protocol.parse_message(protocol.build_message(message)) == message
    assert protocol.parse_message(protocol.build_message(message).encode()) == message


@patient
@given(st.builds(Join, participant_id=names, role=st.sampled_from(ParticipantRole)))
def test_a_join_is_encoded_without_a_type(join):
    built = protocol.build_message(join)
    assert protocol.parse_join(built) == join
    assert json.loads(built).keys() == {"participant_id", "role"}


@patient
@given(any_message)
def test_only_a_missing_timestamp_is_filled_in(message):
    found = json.loads(protocol.build_message(message, "2025-01-01T00:00:00+00:00"))
    timestamp = getattr(message, "timestamp", None)
    if "timestamp" in {entry.name for entry in fields(message)}:
        assert found["timestamp"] == (timestamp if timestamp is not None else "2025-01-01T00:00:00+00:00")
    else:
        assert "timestamp" not in found


def test_joint_values_are_floats_and_are_relayed_unchanged():
    twice = '{"type":"joint_update","data":[{"name":"Jaw","value":1},{"name":"Jaw","value":2}]}'
    update = protocol.parse_message(twice)
    assert update.values == {"Jaw": 2.0}
    assert isinstance(update.values["Jaw"], float)
    joint = '{"index":2,"value":1,"speed":null,"name":"Jaw"}'
    update = protocol.parse_message('{"type":"joint_update","data":[JOINT]}'.replace("JOINT", joint))
    assert joint in protocol.build_message(update)


anything = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200),
    values.map(json.dumps),
    st.dictionaries(
        st.sampled_from(
            ["type", "data", "role", "participant_id", "offer", "candidate", "config", "timestamp", "reason"]
        ),
        st.sampled_from(sorted(protocol._FORMS)) | values,
    ).map(json.dumps),
)


@patient
@given(anything)
def test_invalid_input_raises_only_wire_error(raw):
    for read in (protocol.parse_message, protocol.parse_join, protocol.decode):
        with suppress(WireError):
            read(raw)


@pytest.mark.parametrize(
    "raw",
    [
        *("", "{", "[]", "1", "null", b"\xff\xfe\xfd"),
        "[" * 200_000,
        '{"a":' * 100_000,
        '{"type":"heartbeat"}' + " " * (1 << 20),
        "9" * 9999,
        '{"type":"heartbeat","a":' + "9" * 641 + "}",
        '{"type":"heartbeat","a":[' + "0," * 4096 + "0]}",
    ],
)
def test_a_frame_that_is_not_an_object_is_an_error_without_type(raw):
    with pytest.raises(WireError) as caught:
        protocol.parse_message(raw)
    assert caught.value.type is None
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        *(f'[{{"name":"Jaw","value":{value}}}]' for value in ("NaN", "1e999", "-Infinity", '"1"', "true", "null")),
        '[{"name":"Jaw","value":1,"speed":NaN}]',
        '[{"name":"Jaw","value":1,"deep":{"er":[1e400]}}]',
        *('[{"name":"Jaw"}]', '[{"value":1}]', '[{"name":"","value":1}]', '[{"name":7,"value":1}]'),
        *('["Jaw"]', '{"Jaw":1}', '"Jaw"'),
        "[" + ",".join(['{"name":"Jaw","value":1}'] * 257) + "]",
        '[{"name":"' + "J" * 101 + '","value":1}]',
    ],
)
def test_an_invalid_joint_update_is_an_error_with_its_type(data):
    with pytest.raises(WireError) as caught:
        protocol.parse_message('{"type":"joint_update","data":' + data + "}")
    assert caught.value.type == "joint_update"


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ('{"type":"dance"}', "dance"),
        ("{}", None),
        ('{"type":null}', None),
        ('{"type":7}', "7"),
        ('{"type":["x"]}', "['x']"),
    ],
)
def test_an_unknown_type_becomes_an_unknown_message(raw, kind):
    assert protocol.parse_message(raw) == Unknown(kind)


@patient
@given(st.sampled_from(["1e999", "NaN", "7", "null", "[]", '{"a":1}', '"' + "x" * 2000 + '"']))
def test_an_emergency_stop_is_never_refused_for_its_fields(value):
    message = protocol.parse_message(
        '{"type":"emergency_stop","reason":VALUE,"timestamp":VALUE}'.replace("VALUE", value)
    )
    assert isinstance(message, protocol.EmergencyStopMessage)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_a_value_that_is_not_json_is_never_encoded(value):
    with pytest.raises(WireError):
        protocol.build_message(JointUpdate(({"name": "Jaw", "value": value},)))


def test_an_unpaired_surrogate_is_encoded_and_parsed():
    message = protocol.EmergencyStopMessage("\ud800")
    built = protocol.build_message(message)
    built.encode()
    assert protocol.parse_message(built) == message


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("joined", {"room_id": "r", "role": "boss"}, "role: found str: Input should be 'producer' or 'consumer'"),
        ("joined", {"role": "producer"}, "room_id: found nothing: "),
        ("webrtc_offer", {"offer": {"sdp": 1}, "from_producer": "p"}, "offer: found dict: "),
        ("webrtc_answer", {"answer": {}, "from_consumer": "c"}, "answer: found dict: "),
        ("webrtc_answer", {"answer": {"sdp": ""}, "from_consumer": None}, "from_consumer: found NoneType: "),
        ("webrtc_ice", {"candidate": "c"}, "candidate: found str: "),
        ("stream_started", {"config": []}, "config: found list: "),
        ("state_sync", {"data": {"Jaw": True}}, "data: found dict: "),
        ("error", {"message": "m", "code": 7}, "code: found int: "),
        ("heartbeat_ack", {"timestamp": 7}, "timestamp: found int: "),
    ],
)
def test_an_error_names_the_field_the_value_and_the_expectation(kind, values, text):
    with pytest.raises(WireError) as caught:
        protocol.parse_message(json.dumps({"type": kind, **values}))
    assert caught.value.type == kind
    assert str(caught.value).startswith(f"{kind}.{text}")


@pytest.mark.parametrize("key", ['"\\ud800":1', '"a\\udfff":{}'])
@pytest.mark.parametrize(
    "raw",
    [
        '{"type":"emergency_stop","reason":"\\ud800",KEY}',
        '{"type":"joint_update","data":[{"value":1,"name":"\\ud800","x":"\\udfff"}],KEY}',
        '{"type":"status_update","status":{"\\ud800":[]},KEY}',
    ],
)
def test_an_unpaired_surrogate_is_accepted_in_any_place(raw, key):
    plain = protocol.parse_message(raw.replace(",KEY", ""))
    assert not isinstance(plain, Unknown)
    assert protocol.parse_message(raw.replace("KEY", key)) == plain
    assert protocol.parse_join('{"participant_id":"\\ud800","role":"producer",KEY}'.replace("KEY", key)).participant_id


def test_a_wire_error_does_not_contain_the_sent_values():
    secret = "ses" + "ame"  # Split, because the traceback quotes lines of this file.
    with pytest.raises(WireError) as caught:
        protocol.parse_message('{"type":"joined","room_id":{"a":"SECRET"},"role":"producer"}'.replace("SECRET", secret))
    assert caught.value.type == "joined"
    assert secret not in "".join(traceback.format_exception(caught.value))
