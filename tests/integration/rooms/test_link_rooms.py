"""A session's link to the embedded server: rooms, joints, stops, and invalid input."""

import asyncio
import dataclasses
import gc
import time
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import RawTestServer
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidRequest, RobotTaken, TransportError
from service.transport.address import Address, Kind
from service.transport.client.connection import KERNEL_SEND_BUFFER, Membership, TransportTimeouts, retry_delay
from service.transport.client.rooms_link import COMMAND_LIFETIME
from service.transport.link import EmergencyStop, JointValue, Link, LinkDown, LinkUp, RobotLeft, Rooms
from service.transport.protocol import EmergencyStopMessage, WireError, rooms_of
from service.transport.server.rooms import RoomPath, RoomTable

SERVER_SIDE = ("sockets.py", "outbox.py", "cleanup.py", "server.py", "impl.py", "http_protocol.py", "frame.py")


@pytest.mark.parametrize("prefix", ["", "/api", "/api/"])
async def test_rooms_are_created_joined_and_removed_in_one_workspace(connect, server, seen, prefix):
    async with connect("front", "wrist", url=server.url + prefix) as link:
        checked: Link = link
        assert checked.rooms.workspace_id == "w"
        assert checked.rooms.cameras == {"front": "s-front", "wrist": "s-wrist"}
        assert await server.rooms("video", "w") == {"s-front", "s-wrist"}
        assert await server.rooms("robotics", "w") == {"s-joint-input", "s-joint-output"}
        _, answer = await server.call("GET", "/robotics/workspaces/w/rooms/s-joint-output")
        assert answer["room"]["participants"]["producer"].startswith("s-joint-output-producer-")
        _, answer = await server.call("GET", "/video/workspaces/w/rooms/s-wrist")
        assert answer["room"]["participants"]["consumers"][0].startswith("s-wrist-consumer-")
        assert {event.room for event in seen.of(LinkUp)} == {"s-front", "s-wrist", "s-joint-input", "s-joint-output"}
    assert await server.rooms("video", "w") == await server.rooms("robotics", "w") == set()


async def test_longest_names_fit_the_wire(connect):
    session, camera = "s" * 64, "c" * 64
    async with connect(camera, workspace_id="w" * 64, session_id=session) as link:
        rooms = link.health()["rooms"]
        assert all(len(room["participant_id"]) <= 100 for room in rooms.values())
        assert rooms[f"{session}-{camera}"]["participant_id"].split("-")[-2] == "consumer"


@pytest.mark.parametrize(
    ("cameras", "why"),
    [
        *[((name,), "cannot name a room") for name in ("", "a/b", "a b", "..", "ä", "x" * 65)],
        (("front", "front"), "its own id"),
        (("joint-input",), "its own id"),
    ],
)
def test_camera_names_without_a_valid_room_id_are_refused(cameras, why):
    with pytest.raises(InvalidRequest, match=why):
        rooms_of("s", cameras, "w")


async def test_each_link_creates_a_workspace_by_default(connect, server):
    async with connect(workspace_id=None) as first, connect(workspace_id=None) as second:
        assert first.rooms.workspace_id != second.rooms.workspace_id
        assert await server.rooms("robotics", first.rooms.workspace_id) == {"s-joint-input", "s-joint-output"}


async def test_existing_room_is_joined_unchanged_and_kept(connect, server):
    await server.call("POST", "/robotics/workspaces/w/rooms", {"room_id": "s-joint-input"})
    body = {"joints": [{"name": "Jaw", "value": 5.0}]}
    await server.call("POST", "/robotics/workspaces/w/rooms/s-joint-input/command", body)
    async with connect():
        _, answer = await server.call("GET", "/robotics/workspaces/w/rooms/s-joint-input/state")
        assert answer["state"]["joints"] == {"Jaw": 5.0}
    assert await server.rooms("robotics", "w") == {"s-joint-input"}


async def test_failed_link_leaves_no_room(connect, server):
    async with connect():
        with pytest.raises(RobotTaken, match=r"commanded by participant .s-joint-output-producer-.*stop that"):
            async with connect("front"):
                pass
        assert await server.rooms("video", "w") == set()
        assert await server.rooms("robotics", "w") == {"s-joint-input", "s-joint-output"}


async def test_session_error_is_raised_and_rooms_are_removed(connect, server):
    with pytest.raises(ZeroDivisionError):
        async with connect():
            raise ZeroDivisionError
    assert await server.rooms("robotics", "w") == set()


async def test_error_in_the_inbox_ends_the_session(both, seen):
    def broken(values, received_at):
        raise ZeroDivisionError

    seen.on_joints = broken

    async def session() -> None:
        async with both() as (_, robot):
            robot.send_joints({"Jaw": 1.0})
            await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as failure:
        await session()
    assert failure.group_contains(ZeroDivisionError)


async def test_no_task_or_socket_is_left_after_the_end(both):
    before = asyncio.all_tasks()
    async with both("front"):
        assert len(asyncio.all_tasks()) > len(before) + 8
    gc.collect()  # Unclosed sockets and coroutines warn here, and warnings are errors.
    left = [task.get_coro().cr_code.co_filename for task in asyncio.all_tasks() - before]
    assert [name for name in left if not name.endswith(SERVER_SIDE)] == []


def answering(make):
    """Return a handler that returns or raises the result of ``make`` for the request."""

    async def handle(request):
        answer = make(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle


async def too_slow(request):
    await asyncio.sleep(30)


def rest_only(request):
    if request.path.endswith("/ws"):
        return web.HTTPNotFound()
    return web.json_response({"success": True, "room": {"participants": {"producer": None, "consumers": []}}})


ODD_ROOM = {"room": {"participants": {"producer": ["p"], "consumers": {}}}}


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (
            answering(lambda _: web.Response(text="<html>", content_type="text/html")),
            ["expected JSON, got text/html", "/api"],
        ),
        (answering(lambda _: web.HTTPNotFound()), ["GET ", "answered 404", "base path"]),
        (answering(lambda _: web.HTTPInternalServerError()), ["answered 500", "see the log"]),
        (
            answering(lambda _: web.HTTPTemporaryRedirect("http://127.0.0.1:1/secret")),
            ["answered 307, a redirect", "final address"],
        ),
        (too_slow, ["no answer in time", "reachable"]),
        (answering(lambda _: web.json_response([1])), ["expected an object, got a JSON list"]),
        (
            answering(lambda _: web.Response(body=b" " * (2 << 20), content_type="application/json")),
            ["over 1048576 bytes"],
        ),
        (answering(lambda _: web.json_response(ODD_ROOM)), ["room.participants", "is this a RobotHub server?"]),
        (answering(rest_only), ["answered 404 instead of a WebSocket", "/api"]),
    ],
)
async def test_incompatible_server_is_explained(connect, quick, handler, words):
    # Only the slow case has a short timeout, because other responses may be late.
    pace = dataclasses.replace(quick, request=0.3 if handler is too_slow else 30.0, leave=0.1)
    async with RawTestServer(handler) as server:
        with pytest.raises(TransportError) as error:
            async with connect(url=f"http://127.0.0.1:{server.port}", pace=pace):
                pass
    assert [word for word in words if word not in str(error.value)] == [], error.value
    assert "secret" not in str(error.value)


async def test_refused_connection_names_the_address_and_the_command(connect, unused_tcp_port_factory):
    url = f"http://127.0.0.1:{unused_tcp_port_factory()}"
    with pytest.raises(
        TransportError, match=f"cannot connect.*is a transport server running at {url}.*robojax transport"
    ):
        async with connect(url=url):
            pass


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://user:secret@host",
        "http://host/?a=b",
        "http://host/#x",
        "http://host:99999",
        "http://ho st",
        "http://host\\@evil",
        "http://[::1",
        "",
    ],
)
def test_ambiguous_address_is_refused(url):
    with pytest.raises(InvalidRequest, match="transport_server_url") as error:
        Address.parse(url)
    assert error.value.loc == ("body", "transport_server_url")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "rest", "socket"),
    [
        ("http://h:8000", "http://h:8000", "ws://h:8000"),
        ("http://h:8000/", "http://h:8000", "ws://h:8000"),
        ("https://h/api/", "https://h/api", "wss://h/api"),
        ("ws://h/a/b", "http://h/a/b", "ws://h/a/b"),
        ("wss://[::1]:9", "https://[::1]:9", "wss://[::1]:9"),
    ],
)
def test_base_path_is_kept_for_both_protocols(url, rest, socket):
    address = Address.parse(url)
    assert address.rooms_url(Kind.VIDEO, "w") == f"{rest}/video/workspaces/w/rooms"
    assert address.socket_url(Kind.ROBOTICS, "w", "r") == f"{socket}/robotics/workspaces/w/rooms/r/ws"


@given(attempt=st.integers(0, 10_000))
def test_wait_before_a_rejoin_doubles_up_to_its_limit(attempt):
    pace = TransportTimeouts()
    assert 0 <= retry_delay(attempt, pace) <= min(10.0, 0.25 * 2 ** min(attempt, 10))


async def test_joints_are_received_and_commands_sent(both, server, seen, until):
    commands = []
    async with both(on_command=lambda v, at: commands.append((v, at))) as (link, robot):
        assert robot.is_connected
        assert robot.send_joints({"Jaw": 1.0, "Elbow": 2.0})
        await until(lambda: seen.pose == {"Jaw": 1.0, "Elbow": 2.0})
        robot.send_joints({"Jaw": 3.0, "Elbow": 2.0})
        await until(lambda: seen.poses[-1] == {"Jaw": 3.0})  # The server forwards only changes.
        assert link.send([JointValue("Jaw", 7.5, 5), JointValue("Elbow", 0.5)])
        await until(lambda: commands)
        assert commands[0][0] == {"Jaw": 7.5, "Elbow": 0.5}
        _, answer = await server.call("GET", "/robotics/workspaces/w/rooms/s-joint-output/state")
        assert answer["state"]["joints"] == {"Jaw": 7.5, "Elbow": 0.5}
        assert link.health()["rooms"]["s-joint-output"]["sent"] >= 1


async def test_joint_is_sent_with_its_index(connect, server):
    async with connect() as link, ClientSession() as session:
        base = server.url.replace("http", "ws") + "/robotics/workspaces/w/rooms/s-joint-output/ws"
        async with session.ws_connect(base) as socket:
            await socket.send_json({"participant_id": "watcher", "role": "consumer"})
            await socket.receive_json()
            await socket.receive_json()
            link.send([JointValue("Jaw", 1.5, 5), JointValue("Elbow", 2.5)])
            message = await socket.receive_json(timeout=30)
    assert message["data"] == [{"name": "Jaw", "value": 1.5, "index": 5}, {"name": "Elbow", "value": 2.5}]


async def test_pose_of_an_earlier_robot_is_known_at_once(join_robot, connect, server, seen, until):
    await server.call("POST", "/robotics/workspaces/w/rooms", {"room_id": "s-joint-input"})
    await server.call("POST", "/robotics/workspaces/w/rooms", {"room_id": "s-joint-output"})
    rooms = Rooms("w", {}, "s-joint-input", "s-joint-output")
    async with join_robot(rooms) as robot:
        robot.send_joints({"Jaw": 4.0})
        await asyncio.sleep(0.05)
        async with connect():
            await until(lambda: seen.pose == {"Jaw": 4.0})


async def test_pose_of_a_departed_robot_is_not_used(join_robot, connect, server, seen, quick, until):
    await server.call("POST", "/robotics/workspaces/w/rooms", {"room_id": "s-joint-input"})
    body = {"joints": [{"name": "Jaw", "value": 5.0}, {"name": "Elbow", "value": 6.0}]}
    await server.call("POST", "/robotics/workspaces/w/rooms/s-joint-input/command", body)
    async with connect() as link:
        await asyncio.sleep(2 * quick.heartbeat)
        assert seen.poses == []
        # The next robot has the pose that the room already stores, so the server forwards no update.
        async with join_robot(link.rooms) as robot:
            robot.send_joints({"Jaw": 5.0, "Elbow": 6.0})
            await until(lambda: seen.pose == {"Jaw": 5.0, "Elbow": 6.0})


async def test_departed_robot_is_reported_and_its_successor_known(join_robot, connect, seen, until):
    async with connect() as link:
        for _ in range(2):
            seen.poses.clear()
            async with join_robot(link.rooms) as robot:
                robot.send_joints({"Jaw": 5.0})
                await until(lambda: link.health()["rooms"]["s-joint-input"]["producer"])
                await until(lambda: seen.pose == {"Jaw": 5.0})
        await until(lambda: seen.of(RobotLeft)[1:] == [RobotLeft("s-joint-input")])


async def test_joint_message_with_a_non_finite_number_is_dropped(connect):
    async with connect() as link:
        connection = link._connections["s-joint-input"]
        membership = connection._membership
        assert isinstance(membership, Membership)
        assert membership._parse('{"type": "joint_update", "data": [{"name": "Jaw", "value": NaN}]}') is None
        assert membership._parse('{"type": "joint_update", "data": [{"name": "Jaw", "value": 1e999}]}') is None
        assert link.health()["rooms"]["s-joint-input"]["malformed"] == 2
        with pytest.raises(WireError):
            link.send([JointValue("Jaw", float("nan"))])


async def test_pause_drops_a_command_but_not_an_emergency_stop(both, until):
    received, stops = [], []
    record = lambda values, at: received.append(values)  # noqa: E731
    async with both(on_command=record, on_emergency_stop=stops.append) as (link, robot):
        assert link.send([JointValue("Jaw", 1.0)])
        await until(lambda: received == [{"Jaw": 1.0}])
        assert link.send([JointValue("Jaw", 2.0)])
        connection = link._connections["s-joint-output"]
        assert connection.send(EmergencyStopMessage("test"))
        time.sleep(1.5 * COMMAND_LIFETIME)  # noqa: ASYNC251 - this process pauses as if suspended
        await until(lambda: len(stops) == 1)
        robot.unlatch()
        assert link.send([JointValue("Jaw", 3.0)])
        await until(lambda: received[1:] == [{"Jaw": 3.0}])
        assert robot.refused == 0
        assert connection.health()["expired"] == 1


async def test_commands_before_a_leave_reach_the_robot(join_robot, connect, server, until):
    for room in ("s-joint-input", "s-joint-output"):
        await server.call("POST", "/robotics/workspaces/w/rooms", {"room_id": room})
    received = []
    rooms = Rooms("w", {}, "s-joint-input", "s-joint-output")
    async with join_robot(rooms, lambda values, at: received.append(values)):
        async with connect() as link:
            for number in range(8):
                assert link.send([JointValue("Jaw", float(number))])
        await until(lambda: received == [{"Jaw": float(number)} for number in range(8)])


async def test_robot_never_sends_a_non_finite_number(both):
    async with both() as (_, robot):
        with pytest.raises(WireError, match=r"\['Jaw'\] are not finite"):
            robot.send_joints({"Jaw": float("inf"), "Elbow": 1.0})
        assert robot._pose == {}


@pytest.mark.parametrize(
    ("kind", "room"), [("robotics", "s-joint-input"), ("robotics", "s-joint-output"), ("video", "s-front")]
)
async def test_emergency_stop_in_any_room_reaches_the_session(connect, server, seen, until, kind, room):
    async with connect("front"), ClientSession() as session:
        url = f"{server.url.replace('http', 'ws')}/{kind}/workspaces/w/rooms/{room}/ws"
        async with session.ws_connect(url) as socket:
            await socket.send_json({"participant_id": "bystander", "role": "consumer"})
            await socket.send_json({"type": "emergency_stop", "reason": "smoke"})
            stop = (await until(lambda: seen.of(EmergencyStop)))[0]
    assert stop.reason == "smoke"


async def test_robot_sends_stops_and_receives_stops_of_others(both, seen, until):
    received = []
    async with both() as (link, robot):
        robot.on_emergency_stop = received.append
        assert robot.emergency_stop("a hand in the way")
        await until(lambda: len(seen.of(EmergencyStop)) == 2)  # Once in each joint room.
        stop = seen.of(EmergencyStop)[0]
        assert stop.reason == "a hand in the way"
        assert stop.source.startswith("robot-")
        await asyncio.sleep(0.05)
        assert received == []  # Its own echo is ignored.
        link._output.send(EmergencyStopMessage(reason="the operator"))
        await until(lambda: received)
        assert received[0].reason == "the operator"


async def test_unsent_stop_is_sent_after_the_next_join(both, server, seen, until):
    async with both() as (_, robot):
        await server.kill()
        await until(lambda: not robot.is_connected)
        assert not robot.emergency_stop("while the server was away")
        await server.start()
        stop = (await until(lambda: seen.of(EmergencyStop)))[0]
        assert stop.reason == "while the server was away"


async def test_rooms_are_recreated_and_rejoined_after_a_server_restart(both, server, seen, until):
    commands = []
    async with both("front", on_command=lambda v, at: commands.append(v)) as (link, robot):
        robot.send_joints({"Jaw": 9.0})
        await until(lambda: seen.poses)
        first = link.health()["rooms"]["s-joint-output"]["participant_id"]
        await server.kill()
        await until(lambda: len(seen.of(LinkDown)) == 3)
        assert not link.send([JointValue("Jaw", 1.0)])
        seen.events.clear()
        seen.poses.clear()
        await asyncio.sleep(0.2)
        assert seen.events == []  # LinkDown is sent once, not with each attempt.
        await server.start()
        await until(lambda: len(seen.of(LinkUp)) == 3 and robot.is_connected)
        assert await server.rooms("robotics", "w") == {"s-joint-input", "s-joint-output"}
        await until(lambda: seen.pose == {"Jaw": 9.0})  # The robot reports its pose again.
        again = link.health()["rooms"]["s-joint-output"]
        assert again["participant_id"] not in (None, first)
        assert again["reconnects"] == 1
        assert link.send([JointValue("Jaw", 2.0)])
        await until(lambda: {"Jaw": 2.0} in commands)
        assert commands == [{"Jaw": 2.0}]  # The refused command is dropped.
    assert await server.rooms("robotics", "w") == set()


async def test_cut_connection_is_detected_at_once_and_restored(connect, proxy, seen, until):
    async with connect(url=proxy.url) as link:
        proxy.cut()
        await until(lambda: len(seen.of(LinkDown)) == 2, within=0.3)
        await until(lambda: len(seen.of(LinkUp)) == 4)
        assert link.send([JointValue("Jaw", 1.0)])


async def test_command_is_refused_when_the_send_queue_is_full(connect, proxy, quick, until):
    pace = dataclasses.replace(quick, heartbeat=30.0)
    async with connect(url=proxy.url, pace=pace) as link:
        proxy.carries.clear()
        joints = [
            JointValue(name, 1.0, 1) for name in ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
        ]
        taken = 0
        for _ in range(20_000):
            if not link.send(joints):
                break
            taken += 1
            await asyncio.sleep(0)
        assert not link.send(joints)
        assert link.health()["rooms"]["s-joint-output"]["refused"] >= 2
        # Without limits, aiohttp and the kernel would buffer megabytes.
        assert taken * 300 < 40 * KERNEL_SEND_BUFFER, taken
        proxy.carries.set()
        await until(lambda: link.send(joints))


@pytest.fixture
def silent_rooms(monkeypatch):
    """Delete and replace rooms without a notice to their participants, as the reference server does."""

    def delete(table: RoomTable, path: RoomPath, claim: str | None = None) -> list[Any]:
        del table.rooms[path]
        return []

    monkeypatch.setattr(RoomTable, "delete", delete)
    monkeypatch.setattr(RoomTable, "is_occupied", lambda table, path: False)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
@pytest.mark.usefixtures("silent_rooms")
async def test_deleted_room_of_an_open_socket_is_detected(connect, server, seen, until, how):
    async with connect() as link:
        path = "/robotics/workspaces/w/rooms"
        if how == "deleted":
            await server.call("DELETE", f"{path}/s-joint-output")
        else:
            await server.call("POST", path, {"room_id": "s-joint-output"})
        down = (await until(lambda: seen.of(LinkDown)))[0]
        assert down.reason.startswith("the server no longer")
        await until(lambda: LinkUp("s-joint-output") in seen.events[seen.events.index(down) :])
        assert link.send([JointValue("Jaw", 1.0)])


@pytest.mark.usefixtures("silent_rooms")
async def test_link_checks_its_room_after_an_error_of_the_server(connect, server, seen, quick, until):
    pace = dataclasses.replace(quick, heartbeat=3.0)
    async with connect(pace=pace) as link:
        await asyncio.sleep(pace.heartbeat / 10 + 0.05)
        await server.call("DELETE", "/robotics/workspaces/w/rooms/s-joint-output")
        link.send([JointValue("Jaw", 1.0)])
        down = (await until(lambda: seen.of(LinkDown), within=1.0))[0]
        assert down.reason == "the server no longer knows the room"
