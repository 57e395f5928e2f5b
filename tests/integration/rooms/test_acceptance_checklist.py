"""The acceptance checklist of the wire, in its order, over real sockets."""

import asyncio
import fractions
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import av
import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription, VideoStreamTrack

ROBOTICS = "/robotics/workspaces/w/rooms"
VIDEO = "/video/workspaces/w/rooms"


@pytest.fixture
def api(caller):
    """The server under ``/api``; `test_both_prefixes_have_the_same_routes` compares it with the root."""
    return caller.under("/api")


@pytest.mark.parametrize("kind", ["robotics", "video"])
async def test_list_of_an_unknown_workspace_is_empty(api, kind):
    listed = {"success": True, "workspace_id": "unknown", "rooms": [], "total": 0}
    assert await api.call("GET", f"/{kind}/workspaces/unknown/rooms") == (200, listed)


@pytest.mark.parametrize(
    ("kinds", "method", "tail", "body"),
    [
        ("robotics video", "GET", "", None),
        ("robotics video", "DELETE", "", None),
        ("robotics video", "GET", "/state", None),
        ("robotics", "POST", "/command", {"joints": [{"name": "Jaw", "value": 1}]}),
    ],
)
async def test_unknown_room_is_404_with_detail(api, kinds, method, tail, body):
    for kind in kinds.split():
        found = await api.call(method, f"/{kind}/workspaces/w/rooms/none{tail}", body)
        assert found == (404, {"detail": "Room not found"})


@pytest.mark.parametrize("kind", ["robotics", "video"])
@pytest.mark.parametrize(
    "body",
    [None, b"{}", b"null", {"room_id": "r", "workspace_id": "elsewhere", "name": "a name"}],
    ids=["no body", "empty object", "null", "room_id"],
)
async def test_create_makes_a_room_in_the_workspace_of_the_path(api, kind, body):
    status, answer = await api.call("POST", f"/{kind}/workspaces/w/rooms", body)
    assert (status, answer["success"], answer["workspace_id"]) == (200, True, "w")
    assert answer["room_id"] in answer["message"]
    assert answer["room_id"] == "r" or not isinstance(body, dict)
    _, listing = await api.call("GET", f"/{kind}/workspaces/w/rooms")
    assert [row["id"] for row in listing["rooms"]] == [answer["room_id"]]


async def test_room_created_at_the_root_exists_under_api(caller):
    path = await caller.room("robotics", "r")
    assert (await caller.under("/api").call("GET", path))[0] == 200


LISTED = {"resolution": {"width": 640, "height": 480}, "framerate": 25, "bitrate": 1_000_000, "quality": 80}
PRESENCE = {"has_producer": False, "active_consumers": 0}
NO_FRAMES = {"frame_count": 0, "last_frame_time": None}


@pytest.mark.parametrize(
    ("kind", "head", "row", "room", "state"),
    [
        ("robotics", {}, {"joints_count": 0}, PRESENCE, {"joints": {}}),
        (
            "video",
            {"workspace_id": "w"},
            {"frame_count": 0, "config": LISTED, **PRESENCE},
            {"config": {**LISTED, "encoding": "h264"}},
            {**NO_FRAMES, "current_config": {**LISTED, "encoding": "h264"}},
        ),
    ],
)
async def test_room_responses_have_the_exact_form(api, kind, head, row, room, state):
    path = await api.room(kind, "r", config={"framerate": 25, "encoding": "h264"})
    presence = {"producer": None, "consumers": [], "total": 0}
    row = {"id": "r", "workspace_id": "w", "participants": presence, **row}
    _, listing = await api.call("GET", f"/{kind}/workspaces/w/rooms")
    assert listing == {"success": True, "workspace_id": "w", "rooms": [row], "total": 1}
    assert await api.call("GET", path) == (200, {"success": True, **head, "room": {**row, **room}})
    _, answer = await api.call("GET", f"{path}/state")
    undated(answer["state"])
    state = {"room_id": "r", "workspace_id": "w", "participants": presence, **state}
    assert answer == {"success": True, **head, "state": state}
    message = "Room r deleted successfully from workspace w"
    assert await api.call("DELETE", path) == (200, {"success": True, **head, "message": message})


async def test_health_and_status_of_both_services(api):
    await api.room("robotics", "r")
    assert await api.call("GET", "/health") == (200, {"status": "healthy", "server_running": True})
    for kind in ("robotics", "video"):
        assert await api.call("GET", f"/{kind}/health") == (200, {"status": "healthy", "service": kind})
    cleanup = {"enabled": True, "inactivity_timeout_hours": 1.0, "cleanup_interval_minutes": 15.0}
    same = {"status": "active", "version": "2.0.0", "supported_roles": ["producer", "consumer"], "cleanup": cleanup}
    robots = {"connections_count": 0, "supported_robot_types": ["so-arm100", "generic"]}
    counts = {"workspaces_count": 1, "rooms_count": 1}
    assert await api.call("GET", "/robotics/status") == (200, {"service": "robotics", **same, **counts, **robots})
    _, status = await api.call("GET", "/video/status")
    assert "freeze_last_frame" in status.pop("recovery_policies")
    none = dict.fromkeys(
        ("webrtc_connections_count", "websocket_connections_count", "workspaces_count", "rooms_count"), 0
    )
    assert status == {"service": "video", **same, **none, "supported_encodings": ["jpeg", "h264", "vp8", "vp9"]}
    _, banner = await api.call("GET", "/video/")
    assert (banner["status"], banner["service"]) == ("active", "video")


# Joins: state_sync then joined; joined only; video without workspace_id; refusals and closes; invalid joins.


@pytest.mark.parametrize("kind", ["robotics", "video"])
@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_join_is_confirmed_and_robotics_sends_the_state_first(api, kind, role):
    socket = await api.open_socket(await api.room(kind, "r"), "x", role)
    if (kind, role) == ("robotics", "consumer"):
        assert undated(await socket.next()) == {"type": "state_sync", "data": {}}
    where = {"workspace_id": "w"} if kind == "robotics" else {}
    assert undated(await socket.next()) == {"type": "joined", "room_id": "r", "role": role, **where}
    assert await socket.is_silent()


@pytest.mark.parametrize("kind", ["robotics", "video"])
@pytest.mark.parametrize("why", ["second producer", "duplicate consumer", "unknown room"])
async def test_refused_join_sends_an_error_and_closes(api, kind, why):
    path, *_ = await api.pair(kind)
    where, who, role = {
        "second producer": (path, "q", "producer"),
        "duplicate consumer": (path, "c", "consumer"),
        "unknown room": (f"/{kind}/workspaces/w/rooms/none", "q", "consumer"),
    }[why]
    socket = await api.open_socket(where, who, role)
    refusal, more = await socket.next(), {}
    if kind == "video":
        refusal, more = undated(refusal), {"code": None}
    assert refusal == {"type": "error", "message": "Cannot join room", **more}
    assert await socket.next() is None


@pytest.mark.parametrize("kind", ["robotics", "video"])
@pytest.mark.parametrize(
    "first",
    [
        "not json",
        "[]",
        "{}",
        '{"participant_id": "x"}',
        '{"participant_id": "x", "role": "boss"}',
        '{"role": 1}',
        "[" * 99999,
    ],
)
async def test_invalid_join_ends_the_connection(api, kind, first):
    path = await api.room(kind, "r")
    socket = await api.open(path)
    await socket.send(first)
    assert await socket.next() is None
    assert (await api.call("GET", path))[1]["room"]["participants"]["total"] == 0


# joint_update: changed joints only, whole objects, source and UTC timestamp; and the REST command.


async def test_consumers_get_changed_joints_as_complete_objects(api):
    _, producer, consumer = await api.pair("robotics")
    jaw = {"name": "Jaw", "value": 10, "index": 6, "speed": 3, "unit": {"of": "percent"}}
    pitch = {"name": "Pitch", "value": -4.5}
    await producer.send({"type": "joint_update", "data": [jaw, pitch]})
    assert undated(await consumer.next()) == {"type": "joint_update", "data": [jaw, pitch], "source": "p"}
    await producer.send({"type": "joint_update", "data": [jaw, {"name": "Pitch", "value": 5}]})
    assert (await consumer.next())["data"] == [{"name": "Pitch", "value": 5}]
    assert await producer.is_silent()


async def test_empty_or_unchanged_update_sends_no_message(api):
    _, producer, consumer = await api.pair("robotics")
    for data in ([{"name": "Jaw", "value": 1}], [{"name": "Jaw", "value": 1}], [{"name": "Jaw", "value": 1.0}], []):
        await producer.send({"type": "joint_update", "data": data})
    for empty in ({}, {"data": None}):
        await producer.send({"type": "joint_update", **empty})
    assert await producer.is_silent()
    assert (await consumer.next())["data"] == [{"name": "Jaw", "value": 1}]
    assert await consumer.is_silent()


async def test_joint_update_from_a_consumer_is_ignored(api):
    path = await api.room("robotics", "r")
    one, two = await api.join(path, "one", "consumer"), await api.join(path, "two", "consumer")
    await one.send({"type": "joint_update", "data": [{"name": "Jaw", "value": 1}]})
    assert await one.is_silent()
    assert await two.is_silent()
    assert (await api.call("GET", path))[1]["room"]["joints_count"] == 0


async def test_later_consumer_gets_joints_of_a_departed_producer(api):
    path = await api.room("robotics", "r")
    producer = await api.join(path, "p", "producer")
    await producer.send({"type": "joint_update", "data": [{"name": "Jaw", "value": 7.5}]})
    assert await producer.is_silent()
    await producer.close()
    await api.settled(path, producer=None)
    sync = await (await api.open_socket(path, "c", "consumer")).next()
    assert sync["data"] == {"Jaw": 7.5}


async def test_rest_command_is_broadcast_with_source_and_null_speed(api):
    path = await api.room("robotics", "r")
    consumer = await api.join(path, "c", "consumer")
    body = {"joints": [{"name": "Jaw", "value": 10}, {"name": "Pitch", "value": -360, "speed": 50}]}
    done = {"joints_updated": 2, "message": "Commands sent successfully"}
    answer = (200, {"success": True, "workspace_id": "w", "room_id": "r", **done})
    assert await api.call("POST", f"{path}/command", body) == answer
    data = [{"name": "Jaw", "value": 10, "speed": None}, {"name": "Pitch", "value": -360, "speed": 50}]
    assert undated(await consumer.next()) == {"type": "joint_update", "data": data, "source": "api"}
    body["joints"][0]["value"] = 11
    assert (await api.call("POST", f"{path}/command", body))[1]["joints_updated"] == 1


# Messages: heartbeat, emergency_stop, unknown type, invalid JSON.


@pytest.mark.parametrize("kind", ["robotics", "video"])
async def test_heartbeat_is_answered_to_its_sender_only(api, kind):
    path = await api.room(kind, "r")
    one, two = await api.join(path, "one", "consumer"), await api.join(path, "two", "consumer")
    if kind == "video":
        assert (await one.next())["type"] == "participant_joined"
    await one.send({"type": "heartbeat"})
    ack = await one.next()
    assert ack.keys() == {"type", "timestamp"}
    assert ack["type"] == "heartbeat_ack"
    assert await two.is_silent()


@pytest.mark.parametrize(
    ("kind", "default"), [("robotics", "Emergency stop from c"), ("video", "Emergency stop triggered")]
)
async def test_emergency_stop_reaches_all_participants_and_its_sender(api, kind, default):
    path = await api.room(kind, "r")
    sockets = [
        await api.join(path, who, role) for who, role in (("p", "producer"), ("c", "consumer"), ("d", "consumer"))
    ]
    await sockets[1].send({"type": "emergency_stop"})
    await sockets[1].send({"type": "emergency_stop", "reason": "smoke"})
    for socket in sockets:
        for reason in (default, "smoke"):
            stop = {"type": "emergency_stop", "reason": reason, "source": "c"}
            assert undated(await socket.until("emergency_stop")) == stop


async def test_emergency_stop_is_not_latched_by_the_room(api):
    _, producer, consumer = await api.pair("robotics")
    await consumer.send({"type": "emergency_stop"})
    await consumer.until("emergency_stop")
    await producer.send({"type": "joint_update", "data": [{"name": "Jaw", "value": 1}]})
    assert (await consumer.next())["type"] == "joint_update"


async def test_unknown_type_is_an_error_in_robotics_only(api):
    robot = await api.join(await api.room("robotics", "r"), "p", "producer")
    await robot.send({"type": "dance"})
    assert undated(await robot.next()) == {"type": "error", "message": "Unknown message type: dance"}
    camera = await api.join(await api.room("video", "v"), "p", "producer")
    await camera.send({"type": "dance"})
    assert await camera.is_silent()


async def test_known_type_without_effect_gets_no_response(api):
    robot = await api.join(await api.room("robotics", "r"), "p", "producer")
    for kind in ("status_update", "consumer_status", "state_sync", "joined", "error", "heartbeat_ack"):
        await robot.send({"type": kind})
    assert await robot.is_silent()


@pytest.mark.parametrize("kind", ["robotics", "video"])
@pytest.mark.parametrize("text", ["{", "", "nul", "[1, 2]", "7", "[" * 99999, '{"type":' * 9999])
async def test_invalid_json_is_ignored_and_the_socket_stays_open(api, kind, text):
    path = await api.room(kind, "r")
    socket = await api.join(path, "p", "producer")
    await socket.send(text)
    assert await socket.is_silent()


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", '"12"', "null", "true", "[1]", "1" + "0" * 400]
)
async def test_non_finite_value_is_refused_and_not_relayed(api, value):
    path, producer, consumer = await api.pair("robotics")
    update = '{"type":"joint_update","data":[{"name":"Pitch","value":1},{"name":"Jaw","value":VALUE}]}'
    await producer.send(update.replace("VALUE", value))
    error = await producer.next()
    assert (error["type"], error["message"]) == ("error", "Failed to process joint update")
    assert await consumer.is_silent()
    assert (await api.call("GET", f"{path}/state"))[1]["state"]["joints"] == {}


# Signalling: offer, answer, ice both ways; missing target or wrong role; 400, 500; participant events.


async def test_signals_are_pushed_to_the_other_peer(api):
    path, producer, consumer = await api.pair("video", "v")
    candidate = {"candidate": "candidate:1 1 udp 1 x.local 9 typ host", "sdpMid": "0", "sdpMLineIndex": 0}
    end = {"candidate": ""}
    calls = [
        ("p", {"type": "offer", "sdp": "v=0", "target_consumer": "c"}, "Offer forwarded to consumer"),
        ("c", {"type": "answer", "sdp": "v=1", "target_producer": "p"}, "Answer forwarded to producer"),
        ("p", {"type": "ice", "candidate": candidate, "target_consumer": "c"}, "ICE candidate forwarded to consumer"),
        ("c", {"type": "ice", "candidate": end, "target_producer": "p"}, "ICE candidate forwarded to producer"),
    ]
    for client_id, message, reply in calls:
        answer = {"success": True, "workspace_id": "w", "response": {"success": True, "message": reply}}
        assert await api.signal(path, client_id, **message) == (200, answer)
    got = [await consumer.next(), await consumer.next(), await producer.next(), await producer.next()]
    assert [undated(message) for message in got] == [
        {"type": "webrtc_offer", "offer": {"type": "offer", "sdp": "v=0"}, "from_producer": "p"},
        {"type": "webrtc_ice", "candidate": candidate, "from_producer": "p", "from_consumer": None},
        {"type": "webrtc_answer", "answer": {"type": "answer", "sdp": "v=1"}, "from_consumer": "c"},
        {"type": "webrtc_ice", "candidate": end, "from_producer": None, "from_consumer": "c"},
    ]


@pytest.mark.parametrize(
    ("client_id", "message"),
    [
        ("p", {"type": "ice", "candidate": {}}),
        ("c", {"type": "ice", "candidate": {}, "target_consumer": "c"}),
        ("p", {"type": "ice", "candidate": {}, "target_producer": "p"}),
        ("x", {"type": "ice", "candidate": {}, "target_consumer": "c"}),
        ("c", {"type": "answer", "sdp": "v=0"}),
        ("x", {"type": "answer", "sdp": "v=0", "target_producer": "p"}),
        ("p", {"type": "candidate-pair"}),
    ],
)
async def test_signal_without_target_or_of_wrong_role_is_dropped(api, client_id, message):
    path, producer, consumer = await api.pair("video", "v")
    answer = {"success": True, "workspace_id": "w", "message": "Signal processed"}
    assert await api.signal(path, client_id, **message) == (200, answer)
    assert await producer.is_silent()
    assert await consumer.is_silent()


@pytest.mark.parametrize(
    ("client_id", "target", "reply"),
    [
        ("p", {}, "Peer-to-peer mode - no server WebRTC processing"),
        ("c", {"target_consumer": "c"}, "Peer-to-peer mode - no server WebRTC processing"),
        ("x", {"target_consumer": "c"}, "Peer-to-peer mode - no server WebRTC processing"),
        ("p", {"target_consumer": "gone"}, "Offer forwarded to consumer"),
    ],
)
async def test_offer_without_a_recipient_is_accepted(api, client_id, target, reply):
    path, _, consumer = await api.pair("video", "v")
    status, answer = await api.signal(path, client_id, type="offer", sdp="v=0", **target)
    assert (status, answer["response"]["message"]) == (200, reply)
    assert await consumer.is_silent()


async def test_signal_to_an_unknown_room_is_400_without_detail(api):
    assert await api.signal(f"{VIDEO}/none", "p", type="offer", sdp="v=0") == (400, {"detail": ""})


@pytest.mark.parametrize(
    ("client_id", "message"),
    [
        ("p", {"type": "offer", "target_consumer": "c"}),
        ("c", {"type": "answer", "target_producer": "p"}),
        ("p", {"type": "ice", "target_consumer": "c"}),
        ("p", {"sdp": "v=0"}),
    ],
)
async def test_incomplete_signal_is_500_without_detail(api, client_id, message):
    path, *_ = await api.pair("video", "v")
    assert await api.signal(path, client_id, **message) == (500, {"detail": ""})


def joints(*more: dict) -> dict:
    return {"joints": list(more)}


@pytest.mark.parametrize(
    ("tail", "body", "kind", "loc"),
    [
        ("command", joints(*[{"name": "j", "value": 0}] * 21), "too_long", ["joints"]),
        ("command", joints(), "too_short", ["joints"]),
        ("command", joints({"name": "j", "value": 361}), "less_than_equal", ["joints", 0, "value"]),
        ("command", joints({"name": "j", "value": -361}), "greater_than_equal", ["joints", 0, "value"]),
        ("command", joints({"name": "", "value": 1}), "string_too_short", ["joints", 0, "name"]),
        ("command", joints({"name": "j" * 51, "value": 1}), "string_too_long", ["joints", 0, "name"]),
        ("command", joints({"name": "j"}), "missing", ["joints", 0, "value"]),
        ("command", joints({"name": "j", "value": 1, "speed": 101}), "less_than_equal", ["joints", 0, "speed"]),
        ("webrtc/signal", {"message": {}}, "missing", ["client_id"]),
        ("webrtc/signal", {"client_id": "", "message": {}}, "string_too_short", ["client_id"]),
        ("webrtc/signal", {"client_id": "x" * 101, "message": {}}, "string_too_long", ["client_id"]),
        ("webrtc/signal", {"client_id": "x", "message": "hello"}, "dict_type", ["message"]),
        ("webrtc/signal", b'{"client_id": "x", "message": {"a": {"priority": NaN}}}', "finite_number", ["message"]),
        ("webrtc/signal", None, "missing", []),
        ("webrtc/signal", b"{", "json_invalid", [1]),
    ],
)
async def test_body_out_of_bounds_is_422_with_a_validation_list(api, tail, body, kind, loc):
    path = await api.room("robotics" if tail == "command" else "video", "r")
    status, answer = await api.call("POST", f"{path}/{tail}", body)
    assert status == 422
    assert [(entry["type"], entry["loc"]) for entry in answer["detail"]] == [(kind, ["body", *loc])]
    assert all(entry.keys() == {"type", "loc", "msg"} for entry in answer["detail"])


async def test_video_room_announces_joins_and_leaves(api):
    path = await api.room("video", "v")
    consumer = await api.join(path, "c", "consumer")
    producer = await api.join(path, "p", "producer")
    them = {"room_id": "v", "participant_id": "p", "role": "producer"}
    assert undated(await consumer.next()) == {"type": "participant_joined", **them}
    await producer.close()
    assert undated(await consumer.next()) == {"type": "participant_left", **them}


async def test_robotics_room_announces_no_participants(api):
    path = await api.room("robotics", "r")
    consumer = await api.join(path, "c", "consumer")
    producer = await api.join(path, "p", "producer")
    await producer.close()
    await api.settled(path, producer=None)
    assert await consumer.is_silent()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"type": "stream_started", "config": {"fps": 30}}, {"config": {"fps": 30}, "participant_id": "c"}),
        ({"type": "stream_started"}, {"config": {}, "participant_id": "c"}),
        ({"type": "stream_stopped", "reason": "night"}, {"participant_id": "c", "reason": "night"}),
        ({"type": "stream_stopped"}, {"participant_id": "c", "reason": None}),
        ({"type": "video_config_update", "config": {"framerate": 5}}, {"config": {"framerate": 5}, "source": "c"}),
        ({"type": "status_update", "status": "ok", "data": {"a": 1}}, {"status": "ok", "data": {"a": 1}}),
        ({"type": "status_update"}, {"status": "unknown", "data": None}),
        ({"type": "stream_stats", "stats": {"fps": 9.5}}, {"stats": {"fps": 9.5}}),
        (
            {"type": "recovery_triggered", "policy": "black_screen", "reason": "r"},
            {"policy": "black_screen", "reason": "r"},
        ),
        ({"type": "recovery_triggered"}, {"policy": None, "reason": "Recovery triggered"}),
    ],
)
async def test_video_messages_are_relayed_with_a_new_timestamp(api, sent, expected):
    _, producer, consumer = await api.pair("video", "v")
    await consumer.send({**sent, "timestamp": "1999-01-01T00:00:00+00:00"})
    assert undated(await producer.next()) == {"type": sent["type"], **expected}
    assert await consumer.is_silent()


# Refused joins, late closes, recreated rooms.


async def test_refused_duplicate_join_keeps_the_first_producer(caller):
    path = await caller.room("robotics", "r")
    original = await caller.join(path, "p", "producer")
    second = await caller.open_socket(path, "p", "producer")
    assert (await second.next())["message"] == "Cannot join room"
    assert await second.next() is None
    await caller.settled(path, producer="p")
    consumer = await caller.join(path, "c", "consumer")
    await original.send({"type": "joint_update", "data": [{"name": "Jaw", "value": 1}]})
    assert (await consumer.next())["source"] == "p"


async def test_late_close_leaves_the_same_id_in_another_room(caller):
    one, two = await caller.room("robotics", "one"), await caller.room("robotics", "two")
    old = await caller.join(one, "p", "producer")
    await caller.join(two, "p", "producer")
    await old.close()
    await caller.settled(one, producer=None)
    await caller.settled(two, producer="p")


async def test_creating_an_occupied_room_again_keeps_its_sockets(caller):
    path, producer, consumer = await caller.pair("robotics")
    await caller.room("robotics", "r")
    await producer.send({"type": "joint_update", "data": [{"name": "Jaw", "value": 1}]})
    assert await producer.is_silent()
    assert (await caller.call("GET", path))[1]["room"]["participants"]["total"] == 2
    assert not await consumer.is_silent()


async def test_recreating_an_empty_room_clears_its_joints(caller):
    path = await caller.room("robotics", "r")
    await caller.call("POST", f"{path}/command", {"joints": [{"name": "Jaw", "value": 1}]})
    await caller.room("robotics", "r")
    assert (await caller.call("GET", path))[1]["room"]["joints_count"] == 0


@pytest.mark.parametrize("kind", ["robotics", "video"])
async def test_delete_closes_the_sockets_of_the_room(caller, kind):
    path, producer, consumer = await caller.pair(kind)
    await caller.call("DELETE", path)
    assert await producer.next() is await consumer.next() is None
    assert producer.raw.close_code == 1000


async def test_signals_stay_in_the_workspace_of_their_room(caller):
    ours, theirs = await caller.room("video", "v", "ours"), await caller.room("video", "v", "theirs")
    await caller.join(ours, "p", "producer")
    mine, other = await caller.join(ours, "c", "consumer"), await caller.join(theirs, "c", "consumer")
    await caller.signal(ours, "p", type="offer", sdp="v=0", target_consumer="c")
    assert (await mine.next())["type"] == "webrtc_offer"
    assert await other.is_silent()


async def test_max_consumers_is_enforced(caller):
    path = await caller.room("robotics", "r", max_consumers=1)
    await caller.join(path, "one", "consumer")
    assert (await (await caller.open_socket(path, "two", "consumer")).next())["type"] == "error"


# Real media: two aiortc peers through the relay without STUN.


class Colour(VideoStreamTrack):
    def __init__(self, rgb: tuple[int, int, int]):
        super().__init__()
        self.picture = np.full((240, 320, 3), rgb, np.uint8)

    async def recv(self) -> av.VideoFrame:
        frame = av.VideoFrame.from_ndarray(self.picture, format="rgb24")
        frame.pts, frame.time_base = await self.next_timestamp()
        assert isinstance(frame.time_base, fractions.Fraction)
        return frame


@pytest.fixture
async def peers() -> AsyncIterator[list[RTCPeerConnection]]:
    made: list[RTCPeerConnection] = []
    yield made
    await asyncio.gather(*(peer.close() for peer in made))


async def offer(caller, path: str, peer: RTCPeerConnection) -> None:
    await peer.setLocalDescription(await peer.createOffer())
    await caller.signal(path, "p", type="offer", sdp=peer.localDescription.sdp, target_consumer="c")


async def take_offer(caller, path: str, consumer, peer: RTCPeerConnection) -> asyncio.Future:
    """Answer the offer on the consumer's socket, and return a future of the first track."""
    track = asyncio.get_running_loop().create_future()
    peer.on("track", lambda found: track.done() or track.set_result(found))
    pushed = await consumer.until("webrtc_offer")
    await peer.setRemoteDescription(RTCSessionDescription(pushed["offer"]["sdp"], "offer"))
    await peer.setLocalDescription(await peer.createAnswer())
    there = pushed["from_producer"]
    await caller.signal(path, "c", type="answer", sdp=peer.localDescription.sdp, target_producer=there)
    return track


async def take_answer(producer, peer: RTCPeerConnection) -> None:
    pushed = await producer.until("webrtc_answer")
    await peer.setRemoteDescription(RTCSessionDescription(pushed["answer"]["sdp"], "answer"))


async def test_late_camera_is_seen_within_three_seconds(caller, peers, pauses):
    path, producer, consumer = await caller.pair("video", "v")
    peers += [RTCPeerConnection(RTCConfiguration(iceServers=[])) for _ in range(4)]
    early, late = peers[:2], peers[2:]
    early[0].createDataChannel("no camera yet")
    await offer(caller, path, early[0])
    assert "m=video" not in early[0].localDescription.sdp
    track = await take_offer(caller, path, consumer, early[1])
    await take_answer(producer, early[0])
    assert not track.done()
    late[0].addTrack(Colour((20, 220, 60)))
    await producer.send({"type": "stream_started", "config": {}})
    assert (await consumer.until("stream_started"))["participant_id"] == "p"
    started = time.monotonic()
    await offer(caller, path, late[0])
    track = await take_offer(caller, path, consumer, late[1])
    await take_answer(producer, late[0])
    frame = await asyncio.wait_for((await track).recv(), 30)
    assert pauses.running(started) < 3
    assert np.abs(frame.to_ndarray(format="rgb24").mean((0, 1)) - (20, 220, 60)).max() < 6


def undated(message: dict) -> dict:
    """Return a message without its timestamp, which must be the current time in ISO 8601 and UTC."""
    timestamp = message.pop("timestamp")
    assert timestamp.endswith("+00:00")
    assert abs(datetime.now(tz=UTC) - datetime.fromisoformat(timestamp)) < timedelta(seconds=10)
    return message
