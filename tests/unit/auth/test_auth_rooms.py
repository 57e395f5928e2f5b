"""Rooms of a server with keys: owners, permissions to join, and the keys of sessions and robots."""

import time
from contextlib import asynccontextmanager

import aiohttp
import pytest

from service.auth.caller import Role
from service.auth.guard import AccessGuard, Admissions
from service.auth.keys import KeyFile, OwnKey
from service.errors import TransportError
from service.reloading_file import FileUnusable
from service.transport.address import Address
from service.transport.client.robot import connect_robot
from service.transport.client.room_keys import RoomKeys, auth_headers, open_key_file
from service.transport.client.rooms_link import RoomsTransport
from service.transport.link import LinkRequest, Rooms
from service.transport.server import websocket
from tests.testing.rig import POSE
from tests.testing.rooms_server import serve_transport
from tests.testing.waiting import until


class NullInbox:
    """Inbox that ignores its input."""

    def on_frame(self, *arguments): ...

    on_joints = on_event = on_frame


@asynccontextmanager
async def joined(server, path, by=None, role="consumer", who="x", **more):
    """Yield the type of the first message and the socket, or the status of a refused handshake and None."""
    headers = {"x-api-key": server.keys[by]} if by else {}
    try:
        async with server.http.ws_connect(f"{path}/ws", headers=headers, **more) as socket:
            await socket.send_json({"participant_id": who, "role": role})
            frame = await socket.receive(30)
            found = frame.json() if frame.type is aiohttp.WSMsgType.TEXT else {"type": "closed"}
            yield found.get("type"), socket
    except aiohttp.WSServerHandshakeError as error:
        yield error.status, None


async def join(server, path, by=None, role="consumer", **more):
    async with joined(server, path, by, role, **more) as (found, _):
        return found


async def test_a_session_and_its_rooms_belong_to_the_owner_of_the_key(serve):
    async with serve(real_rooms=True) as server:
        status, made = await server.create("arm", "alice", camera_names=["front"], transport_server_url=server.url)
        assert status == 200, made
        rooms = Rooms(
            made["workspace_id"], made["camera_room_ids"], made["joint_input_room_id"], made["joint_output_room_id"]
        )
        with pytest.raises(TransportError, match="401"):
            async with connect_robot(server.url, rooms, on_command=lambda values, at: None):
                pass
        with pytest.raises(TransportError):
            async with connect_robot(server.url, rooms, on_command=lambda v, at: None, key=server.keys["bob"]):
                pass
        async with connect_robot(server.url, rooms, on_command=lambda v, at: None, key=server.keys["alice"]) as robot:
            assert robot.send_joints({"Rotation": 0.0})
        base = f"/robotics/workspaces/{rooms.workspace_id}/rooms"
        out = f"{base}/{rooms.joint_output}"
        front = f"/video/workspaces/{rooms.workspace_id}/rooms/{rooms.cameras['front']}"
        for name in ("bob", "eve"):
            assert (await server.call("GET", base, name))[1]["total"] == 0
            for path in (out, front, f"{out}/state"):
                assert (await server.call("GET", path, name))[0] == 404
            assert await join(server, out, name) == "error"
        assert (await server.call("DELETE", out, "bob"))[0] == 404
        command = {"joints": [{"name": "a", "value": 1}]}
        assert (await server.call("POST", f"{out}/command", "bob", json=command))[0] == 404
        assert (await server.call("POST", base, "bob", json={"room_id": rooms.joint_output}))[0] == 409
        signal = {"client_id": "unknown", "message": {"type": "offer", "sdp": "x", "target_consumer": "y"}}
        assert (await server.call("POST", f"{front}/webrtc/signal", "bob", json=signal))[0] == 400
        for name in ("alice", "root"):
            assert (await server.call("GET", base, name))[1]["total"] == 2
            assert await join(server, out, name) == "state_sync"
        assert (await server.call("DELETE", "/sessions/arm", "alice"))[0] == 200
        assert (await server.call("GET", base, "root"))[1]["total"] == 0


async def test_a_session_refuses_a_room_of_another_owner(serve):
    async with serve(real_rooms=True) as server:
        base = "/robotics/workspaces/lab/rooms"
        assert (await server.call("POST", base, "bob", json={"room_id": "arm-joint-output"}))[0] == 200
        status, body = await server.create(
            "arm", "alice", workspace_id="lab", camera_names=["front"], transport_server_url=server.url
        )
        assert status == 502, body
        assert "has another owner" in body["detail"]
        assert (await server.call("GET", base, "root"))[1]["total"] == 1


async def test_viewers_only_read_and_operators_use_only_their_client_ids(server):
    server.keys["wall"] = server.file.create("wall", Role.VIEWER, "alice", time.time())
    server.keys["arm-1"] = server.file.create("arm-1", Role.OPERATOR, "alice", time.time())
    base, room = "/video/workspaces/w/rooms", "/video/workspaces/w/rooms/cam"
    for name, expected in ((None, 401), ("eve", 403), ("wall", 403), ("alice", 200)):
        assert (await server.call("POST", base, name, json={"room_id": "cam"}))[0] == expected, name
    assert await join(server, room) == 401
    assert await join(server, room, "wall", "producer") == "error"
    assert await join(server, room, "wall") == "joined"
    assert (await server.call("DELETE", room, "wall"))[0] == 403
    offer = {"client_id": "eye", "message": {"type": "offer", "sdp": "x", "target_consumer": "y"}}
    async with joined(server, room, "arm-1", "producer", who="eye") as (found, _):
        assert found == "joined"
        assert (await server.call("POST", f"{room}/webrtc/signal", "arm-1", json=offer))[0] == 200
        assert (await server.call("POST", f"{room}/webrtc/signal", "wall", json=offer))[0] == 403
    _, body = await server.call("POST", "/tickets", "wall")
    ticket = {"ticket": body["ticket"]}
    assert (await join(server, room, params=ticket), await join(server, room, params=ticket)) == ("joined", 401)
    assert (await server.call("GET", "/video/health"))[0] == 200


async def test_a_revoked_key_closes_its_socket(server, monkeypatch):
    monkeypatch.setattr(websocket, "KEY_CHECK_INTERVAL", 0.01)
    await server.call("POST", "/robotics/workspaces/w/rooms", "alice", json={"room_id": "r"})
    async with joined(server, "/robotics/workspaces/w/rooms/r", "alice") as (_, socket):
        await socket.receive(30)
        server.file.revoke("alice")
        frame = await socket.receive(30)
        assert (frame.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, 1008)


async def test_a_robot_without_a_valid_key_stays_stopped(serve, monkeypatch):
    monkeypatch.setattr(websocket, "KEY_CHECK_INTERVAL", 0.01)
    async with serve(real_rooms=True) as server:
        _, made = await server.create("arm", "alice", camera_names=["front"], transport_server_url=server.url)
        rooms = Rooms(
            made["workspace_id"], made["camera_room_ids"], made["joint_input_room_id"], made["joint_output_room_id"]
        )

        async def status():
            return (await server.call("GET", "/sessions/arm", "alice"))[1]

        async with connect_robot(server.url, rooms, on_command=lambda v, at: None, key=server.keys["alice"]) as robot:
            robot.send_joints(POSE)
            assert (await server.call("POST", "/sessions/arm/start", "alice"))[0] == 200
            away = server.file.path.rename(server.file.path.with_name("away"))
            await until(lambda: server.app.ctx.sessions.get("arm").is_latched)
            away.rename(server.file.path)
            assert (await server.call("POST", "/sessions/arm/start", "alice"))[0] == 409
            found = await status()
            assert (found["status"], "no longer accepted" in found["stats"]["emergency_stop"]) == ("stopped", True)
        # Revoking the key of a client that only watches stops no robot.
        assert (await server.call("POST", "/debug/sessions/arm/reset", "alice"))[0] == 200
        path = f"/robotics/workspaces/{rooms.workspace_id}/rooms/{rooms.joint_output}"
        server.keys["watching"] = server.file.create("watching", Role.OPERATOR, "alice", time.time())
        async with joined(server, path, "watching") as (_, socket):
            assert socket is not None
            server.file.revoke("watching")
            while (await socket.receive(30)).type is not aiohttp.WSMsgType.CLOSE:
                pass
            assert (await status())["stats"]["emergency_stop"] is None


async def test_a_separate_rooms_server_checks_keys(tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    key = file.create("lab", Role.OPERATOR, "lab", time.time())
    listing = tmp_path / "elsewhere"
    async with serve_transport(guard=AccessGuard(Admissions(file))) as url, aiohttp.ClientSession(url) as http:
        listing.write_text(f"# the lab's\n{url} {key}\nhttps://rooms.example rjk_other\n")
        listing.chmod(0o600)
        for headers, expected in (({}, 401), (auth_headers(key), 200)):
            async with http.get("/api/robotics/workspaces/w/rooms", headers=headers) as answer:
                assert answer.status == expected
        async with http.post("/tickets", headers=auth_headers(key)) as answer:
            assert (await answer.json())["ticket"].startswith("rjt_")
        keys = RoomKeys(OwnKey(), None, open_key_file(listing))

        def connected(keys=None):
            transport = RoomsTransport(keys=keys)
            return transport.connect(LinkRequest(url, "s", (), "w", NullInbox()))

        with pytest.raises(TransportError, match="transport_key_file"):
            async with connected():
                pass
        async with connected(keys) as link:
            assert link.rooms.workspace_id == "w"


@pytest.mark.parametrize(
    ("bound", "url", "expected"),
    [
        (("127.0.0.1", 8001), "http://127.0.0.1:8001/api", "http://127.0.0.1:8001/api"),
        (("127.0.0.1", 8001), "http://localhost:8001", "http://127.0.0.1:8001"),
        (("::1", 8001), "http://localhost:8001", "http://[::1]:8001"),
        (("0.0.0.0", 8001), "http://localhost:8001", "http://127.0.0.1:8001"),
        (("0.0.0.0", 8001), "http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        (("127.0.0.1", 80), "http://localhost", "http://127.0.0.1:80"),
        (("127.0.0.1", 8001), "http://127.0.0.1:8000", None),
        (("127.0.0.1", 8001), "http://127.0.0.2:8001", None),
        (("127.0.0.1", 8001), "http://[::1]:8001", None),
        (("127.0.0.1", 8001), "https://127.0.0.1:8001", None),
        (("0.0.0.0", 8001), "http://203.0.113.9:8001", None),
        (("0.0.0.0", 8001), "http://[::1]:8001", None),
        (("0.0.0.0", 8001), "http://rooms.example:8001", None),
        (("0.0.0.0", 8001), "http://224.0.0.1:8001", None),
        (None, "http://127.0.0.1:8001", None),
    ],
)  # fmt: skip
def test_the_own_key_is_sent_only_to_the_own_address(bound, url, expected):
    own = OwnKey()
    address, headers = RoomKeys(own, bound).for_address(Address.parse(url), "ann")
    if expected is None:
        assert (address, headers) == (Address.parse(url), {})
    else:
        assert (address.base, headers) == (expected, own.headers("ann"))
    assert headers.get("x-api-key", "rjo_") not in repr(own)


@pytest.mark.parametrize("line", ["rjk_key", "http://a b c", "ftp://a rjk_key", "http://a k\u00e9y"])
def test_an_invalid_line_in_the_transport_key_file_is_refused(tmp_path, line):
    path = tmp_path / "elsewhere"
    path.write_text(f"http://fine rjk_fine\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(FileUnusable, match="line 2") as refused:
        open_key_file(path)
    assert "rjk_" not in str(refused.value)
