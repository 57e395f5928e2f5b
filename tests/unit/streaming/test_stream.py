import asyncio
import io
import json
import re
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import websockets
from PIL import Image

from jaxmodels.errors import JaxModelsError
from robojax.client import AsyncClient
from robojax.client import Client as SyncClient
from service.auth.caller import Role
from service.auth.keys import KeyFile
from service.streaming import codec, observation, openpi, stream
from service.transport.link import JointValue
from tests.testing.waiting import until
from tests.unit.streaming.conftest import Client


async def test_the_control_loop_drives_whoever_is_connected(server):
    async with server.client() as client:
        welcome = await client.hear("welcome")
        assert welcome["cameras"] == {"front": [48, 64]}
        assert (welcome["chunk"], welcome["silence_s"], welcome["joint_ranges"]["Jaw"]) == (20, 2.0, [0, 100])
        await server.call("POST", "/sessions/arm/start")
        await client.say("observation", **server.seen(number=1))
        first = await client.hear("command")
        assert (first["number"], first["observation"]) == (1, 1)
        assert set(first["joints"]) == set(welcome["joint_names"])
        # What is not sent again stays as it was.
        await client.say("observation", state={"Elbow": -21.0}, images={"front": server.seen()["images"]["front"]})
        assert (await client.hear("command"))["number"] == 2
        status = (await server.call("GET", "/sessions/arm"))[1]
        assert (status["status"], status["stats"]["measured_joints"]["Elbow"]) == ("running", -21.0)
        await client.say("stop", reason="enough")
        assert (await client.hear("stopped"))["reason"] == "enough"
        await client.say("observation", **server.seen(number=2))
        assert (await client.hear("status"))["status"] == "stopped"
    status = (await server.call("GET", "/sessions/arm"))[1]
    assert status["stats"]["emergency_stop"] == "enough"
    assert status["stats"]["watch"]["links_lost"] == {"stream": "the client on the stream is gone"}


async def test_a_robot_that_is_latched_by_itself_is_shown_as_held(server):
    def stats(answer):
        return [answer[1]["stats"][name] for name in ("robot_latched", "hold_code")]

    async def until_status(**expected):
        while (told := await client.hear("status")) | expected != told:
            pass

    async with server.stream() as socket, server.stream() as other:
        client = Client(socket)
        assert (await client.hear("status"))["latch"] is None
        await client.say("latch", reason="key at the robot")
        await client.say("observation", **server.seen())
        await server.call("POST", "/sessions/arm/start")
        await until_status(status="running", hold_code="robot_latched", latch=None)
        assert stats(await server.call("GET", "/sessions/arm")) == ["key at the robot", "robot_latched"]
        # Another client's report is not about this robot.
        await Client(other).say("latch", reason=None)
        await Client(other).say("ping", number=1)
        await Client(other).hear("pong")
        assert stats(await server.call("GET", "/sessions/arm")) == ["key at the robot", "robot_latched"]
        for wrong in ({"reason": 7}, {"reasn": None}, {"resaon": "again", "reason": None}, {}):
            await client.say("latch", **wrong)
            assert "reason" in (await client.hear("error"))["detail"]
        assert stats(await server.call("GET", "/sessions/arm")) == ["key at the robot", "robot_latched"]
        await client.say("latch", reason=None)
        await client.say("observation", **server.seen())
        await client.hear("command")
        assert stats(await server.call("GET", "/sessions/arm")) == [None, None]
        await server.call("POST", "/sessions/arm/emergency_stop", json={"reason": "enough"})
        await server.call("POST", "/debug/sessions/arm/reset")
        await client.hear("stopped")
        await until_status(status="stopped", latch=None)
        await client.say("latch", reason="again")
        await client.say("ping", number=2)
        await client.hear("pong")
    # With the client its report is gone.
    async with server.stream() as socket:
        await Client(socket).hear("welcome")
        assert stats(await server.call("GET", "/sessions/arm"))[0] is None


@pytest.mark.parametrize("way", ["commands", "acts", "openpi", "looks on"])
async def test_a_client_whose_key_vanished_leaves_its_robot_latched(serve, tmp_path, monkeypatch, way):
    for module in (stream, openpi):
        monkeypatch.setattr(module, "_KEY_CHECK_INTERVAL", 0.0)
    file = KeyFile(tmp_path / "keys.json")
    key = file.create("alice", Role.OPERATOR, "alice", time.time())
    async with serve(key, keys_file=str(file.path)) as server:
        path = "/sessions/arm/openpi" if way == "openpi" else "/sessions/arm/stream"
        async with server.stream(path, additional_headers={"x-api-key": key}) as socket:
            client = Client(socket)
            seen = server.seen()
            sent = codec.pack_openpi({"observation/image": seen["images"]["front"], "state": seen["state"]})
            if way == "openpi":
                await socket.recv()
                await socket.send(sent)
                await socket.recv()
            elif way == "acts":
                await client.say("act", **seen, number=1)
                await client.hear("chunk")
            elif way == "commands":
                await server.call("POST", "/sessions/arm/start")
                await client.say("observation", **seen)
                await client.hear("command")
            else:
                await client.hear("welcome")
            away = file.path.rename(tmp_path / "away")
            if way == "openpi":
                await socket.send(sent)
            async with asyncio.timeout(30):
                await socket.wait_closed()
            assert socket.close_code == 1008
        away.rename(file.path)
        latch = (await server.call("GET", "/sessions/arm"))[1]["stats"]["emergency_stop"]
        assert latch is None if way == "looks on" else "no longer accepted" in latch
        assert (await server.act(seen))[0] == (200 if way == "looks on" else 409)


async def test_without_a_client_a_started_session_waits_for_one(server):
    assert (await server.call("POST", "/sessions/arm/start"))[1]["status"] == "reconnecting"
    async with server.stream() as socket:
        await Client(socket).say("observation", **server.seen())
        await Client(socket).hear("command")
        assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "running"


async def test_one_client_drives_until_it_is_silent(server):
    async with server.stream() as first, server.stream() as second:
        await Client(first).say("observation", **server.seen())
        await Client(first).say("ping", number=1)
        await Client(first).hear("pong")
        await Client(second).say("observation", **server.seen())
        assert (await Client(second).hear("error"))["code"] == "robot_taken"
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await second.recv()
        assert closed.value.rcvd.code == 4409
        # As if two seconds had gone by.
        link = server.app.ctx.stream_clients.direct.links["arm"]
        link.driver.last_message_at -= 3
        async with server.stream() as third:
            await Client(third).say("observation", **server.seen(number=5))
            await Client(third).say("ping", number=1, time=1.5)
            assert (await Client(third).hear("pong"))["time"] == 1.5
            assert link.driver.last_message_at > time.monotonic() - 2
            assert len(link.listeners) == 2


async def test_acts_are_answered_one_at_a_time_and_the_newest_wins(server):
    gate = threading.Event()
    server.policy.failures.append(gate)
    async with server.client() as client:
        for number in (1, 2, 3):
            await client.say("act", **server.seen(number=number))
        superseded = await client.hear("error")
        gate.set()
        assert (superseded["code"], superseded["number"]) == ("superseded", 2)
        first, last = await client.hear("chunk"), await client.hear("chunk")
        assert (first["number"], last["number"], last["actions"].shape) == (1, 3, (20, 6))
        assert last["time"] > first["time"]


async def test_a_stream_may_be_text(server):
    async with server.client() as client:
        await client.socket.send(json.dumps({"kind": "ping", "number": 4}))
        assert (await client.hear("pong"))["number"] == 4
        await client.socket.send(json.dumps({"kind": "dance"}))
        assert isinstance(await client.socket.recv(), str)


async def test_nonsense_is_answered_and_too_much_of_it_ends_the_socket(server):
    async with server.stream() as socket:
        client = Client(socket)
        for wrong in (b"\xc1", codec.pack({"kind": 1}), codec.pack({"kind": "observation", "age_ms": -1})):
            await socket.send(wrong)
            assert (await client.hear("error"))["code"] == "invalid"
        await client.say("observation", state=np.full(6, np.nan))
        assert "NaN" in (await client.hear("error"))["detail"]
        await client.say("observation", state={"Elbow": 1.0, "elbow_flex.vel": 0.5}, number=3)
        told = await client.hear("error")
        assert (told["number"], "unknown names: 'elbow_flex.vel'; send" in told["detail"]) == (3, True)
        await client.say("observation", state={"elbow_flex.pos": 1.0, "elbow_flex.vel": 0.5}, extra="ignore")
        for name in ("agems", "age"):
            await client.say("observation", **{name: 5})
            assert "did you mean 'age_ms'?" in (await client.hear("error"))["detail"]
        assert server.app.ctx.sessions.get("arm").robot_io.buffer.measured_joints()["Elbow"] == 1.0
        await client.say("ping", number=1)
        await client.hear("pong")
        for _ in range(20):
            await socket.send("[")
        with pytest.raises(websockets.ConnectionClosed):
            await client.hear("nothing")
        assert socket.close_code == 1007
    async with server.stream() as socket:
        with suppress(websockets.ConnectionClosed):
            await socket.send(bytes(17 << 20))
            await Client(socket).hear("nothing")
        assert socket.close_code == 1009


async def test_the_end_of_the_session_ends_its_streams(server):
    async with server.stream() as socket:
        await Client(socket).hear("welcome")
        await server.call("DELETE", "/sessions/arm")
        await socket.wait_closed()
        assert socket.close_code == 1001
    with pytest.raises(websockets.InvalidStatus) as refused:
        await server.stream()
    assert refused.value.response.status_code == 404


async def test_keys_roles_owners_tickets_and_origins_count(serve, tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    keys = {name: file.create(name, Role.OPERATOR, name, time.time()) for name in ("alice", "bob")}
    eve = file.create("eve", Role.VIEWER, "alice", time.time())
    async with serve(key=keys["alice"], keys_file=str(tmp_path / "keys.json")) as server:

        async def refused(status: int, path: str = "/sessions/arm/stream", **headers: str) -> None:
            with pytest.raises(websockets.InvalidStatus) as found:
                await server.stream(path, additional_headers=headers)
            assert found.value.response.status_code == status

        await refused(401)
        await refused(404, **{"x-api-key": keys["bob"]})
        await refused(403, "/sessions/arm/openpi", **{"x-api-key": eve})
        await refused(403, **{"x-api-key": keys["alice"], "origin": "https://evil.example"})
        status, told = await server.act(server.seen(), headers={"x-api-key": eve})
        assert (status, told["code"]) == (403, "forbidden")
        assert (await server.act(server.seen(), headers={"x-api-key": keys["bob"]}))[0] == 404
        ticket = (await server.call("POST", "/tickets"))[1]["ticket"]
        async with server.stream(f"/sessions/arm/stream?ticket={ticket}") as socket:
            await Client(socket).say("act", **server.seen())
            await Client(socket).hear("chunk")
        await refused(401, f"/sessions/arm/stream?ticket={ticket}")
        # A viewer looks on, and may stop.
        async with server.stream(additional_headers={"x-api-key": eve}) as socket:
            await Client(socket).say("observation", **server.seen())
            assert (await Client(socket).hear("error"))["code"] == "forbidden"
            await Client(socket).say("stop")
            await Client(socket).hear("stopped")


async def test_a_client_that_connects_while_the_policy_loads_waits(serve):
    async with serve(create=False) as server, server.loading() as making, server.client() as client:
        first = codec.unpack(await client.socket.recv())
        assert (first["kind"], first["status"], first["reason"]) == ("status", "initializing", "reading")
        for number in range(25):  # more than a client may send that makes no sense
            await client.say("observation", **server.seen(number=number))
            told = await client.hear("error")
            assert (told["code"], told["number"]) == ("loading", number)
        await client.say("act", **server.seen(number=25))
        assert (await client.hear("error"))["code"] == "loading"
        await client.say("ping", number=1)
        assert (await client.hear("pong"))["number"] == 1
        assert server.policy.acted == 0
        server.load.gate.set()
        assert (await client.hear("welcome"))["cameras"] == {"front": [48, 64]}
        assert (await client.hear("status"))["status"] == "ready"
        await client.say("act", **server.seen(number=26))
        assert (await client.hear("chunk"))["number"] == 26
        assert (await making)[0] == 200


async def test_an_act_over_http_while_the_policy_loads_is_503_with_retry_after(serve):
    async with serve(create=False) as server, server.loading():
        body = {"images": {}, "state": []}
        async with server.http.post("/sessions/arm/act", json=body) as answer:
            assert answer.status == 503
            assert 1 <= int(answer.headers["retry-after"]) <= 10
            told = await answer.json()
        assert told["code"] == "loading"
        assert "session 'arm' is initializing (reading); ask again in" in told["detail"]
        server.load.gate.set()
        await until(lambda: server.app.ctx.sessions.get("arm").stage == "ready")
        assert (await server.act(server.seen()))[0] == 200


@pytest.mark.parametrize(
    ("how", "code", "text", "close_code"),
    [("failed", "policy", "the weights are torn", 1011), ("deleted", "unknown_session", "deleted", 1001)],
)
async def test_a_waiting_client_is_closed_with_the_reason(serve, how, code, text, close_code):
    async with serve(create=False) as server:
        server.load.failure = JaxModelsError("the weights are torn") if how == "failed" else None
        async with server.loading(), server.client() as client:
            await client.hear("status")
            if how == "failed":
                server.load.gate.set()
            else:
                assert (await server.call("DELETE", "/sessions/arm"))[0] == 200
            told = await client.hear("error")
            assert (told["code"], text in told["detail"]) == (code, True)
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await client.hear("welcome")
            assert (closed.value.rcvd.code, text in closed.value.rcvd.reason) == (close_code, True)
        if how == "failed":  # the reason is also the answer to a later client
            status, told = await server.act(server.seen())
            assert (status, told["code"]) == (409, "move_refused")
            assert re.search("the weights are torn.*delete it and create it again", told["detail"])


async def test_a_stop_while_the_policy_loads_is_latched_and_shown(serve):
    async with serve(create=False) as server, server.loading(), server.client() as client:
        await client.say("stop", reason="enough")
        while (await client.hear("status"))["reason"] != "enough":
            pass
        server.load.gate.set()
        assert (await client.hear("welcome"))["status"] == "stopped"
        await client.say("act", **server.seen(reset=True))
        assert "emergency stop (enough)" in (await client.hear("error"))["detail"]
        assert server.policy.acted == 0


async def test_robojaxs_own_client_waits_for_the_policy(serve):
    async with serve(create=False) as server, server.loading(), AsyncClient(server.url) as client:
        opening = asyncio.create_task(_open_and_close(client.session("arm").stream()))

        def open_in_thread() -> str:
            with SyncClient(server.url) as other, other.session("arm").stream() as stream:
                return stream.welcome.status

        waiting = asyncio.create_task(asyncio.to_thread(open_in_thread))
        await until(lambda: len(server.app.ctx.stream_clients._socket_owners) == 2)
        assert not opening.done()
        assert not waiting.done()
        server.load.gate.set()
        assert [await opening, await waiting] == ["ready", "ready"]


async def _open_and_close(stream) -> str:
    async with stream as opened:
        return opened.welcome.status


async def test_a_slowly_decoded_picture_does_not_restore_older_joints(server, monkeypatch):
    gate = threading.Event()
    decode = observation.decode_image
    monkeypatch.setattr(observation, "decode_image", lambda *told: gate.wait(30) and decode(*told))
    async with server.client() as client:
        held = io.BytesIO()
        Image.fromarray(server.seen()["images"]["front"]).save(held, "PNG")
        await client.say("observation", **server.seen(images={"front": held.getvalue()}))
        await client.say("observation", state={"Elbow": -30.0})
        await client.say("ping")
        await client.hear("pong")
        gate.set()
        buffer = server.app.ctx.sessions.get("arm").robot_io.buffer
        while not buffer.sizes:  # noqa: ASYNC110, it decodes in a thread
            await asyncio.sleep(0.01)
        assert buffer.measured_joints()["Elbow"] == -30.0


async def test_commands_do_not_pile_up_before_a_client_that_does_not_read(server, monkeypatch):
    async with server.client() as client:
        await client.say("observation", **server.seen())
        await client.say("ping")
        await client.hear("pong")
        link = server.app.ctx.stream_clients.direct.links["arm"]
        command = [JointValue("Elbow", 1.0, 2)]
        assert link.send(command)
        monkeypatch.setattr(type(link.driver.send_command.__self__._socket), "unsent", 4097)
        assert not link.send(command)
        assert link.health()["commands_refused"] == 1


async def test_a_robot_that_replaces_another_gets_nothing_of_its_motion(server):
    async with server.client() as client:
        await server.call("POST", "/sessions/arm/start")
        await client.say("observation", **server.seen())
        await client.hear("command")
        robot_io, link = server.app.ctx.sessions.get("arm").robot_io, server.app.ctx.stream_clients.direct.links["arm"]
        driver, sent = link.driver, link.health()["commands_sent"]
        assert robot_io.controller.queue.left
        link.release_control(driver, "gone")
        link.take_control(driver, 2.0)
        assert not robot_io.controller.queue.left
        # It showed one of its joints; where the other robot's are is nothing to hold it at.
        link.inbox.on_joints({"Elbow": 20.0}, time.monotonic())
        robot_io.halt(always_hold=True)
        assert link.health()["commands_sent"] == sent
