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


async def test_the_control_loop_commands_the_connected_client(server):
    async with server.client() as client:
        welcome = await client.receive("welcome")
        assert welcome["cameras"] == {"front": [48, 64]}
        assert (welcome["chunk"], welcome["silence_s"], welcome["joint_ranges"]["Jaw"]) == (20, 2.0, [0, 100])
        await server.call("POST", "/sessions/arm/start")
        await client.send("observation", **server.observe(number=1))
        first = await client.receive("command")
        assert (first["number"], first["observation"]) == (1, 1)
        assert set(first["joints"]) == set(welcome["joint_names"])
        # Joints that are not sent again keep their values.
        await client.send("observation", state={"Elbow": -21.0}, images={"front": server.observe()["images"]["front"]})
        assert (await client.receive("command"))["number"] == 2
        status = (await server.call("GET", "/sessions/arm"))[1]
        assert (status["status"], status["stats"]["measured_joints"]["Elbow"]) == ("running", -21.0)
        assert status["stats"]["protocol"] == "stream"
        await client.send("stop", reason="enough")
        assert (await client.receive("stopped"))["reason"] == "enough"
        await client.send("observation", **server.observe(number=2))
        assert (await client.receive("status"))["status"] == "stopped"
    status = (await server.call("GET", "/sessions/arm"))[1]
    assert status["stats"]["emergency_stop"] == "enough"
    assert status["stats"]["watch"]["links_lost"] == {"stream": "the client on the stream is gone"}


async def test_a_robot_with_its_own_latch_is_shown_as_held(server):
    def stats(answer):
        return [answer[1]["stats"][name] for name in ("robot_latched", "hold_code")]

    async def until_status(**expected):
        while (status := await client.receive("status")) | expected != status:
            pass

    async with server.stream() as socket, server.stream() as other:
        client = Client(socket)
        assert (await client.receive("status"))["latch"] is None
        await client.send("latch", reason="key at the robot")
        await client.send("observation", **server.observe())
        await server.call("POST", "/sessions/arm/start")
        await until_status(status="running", hold_code="robot_latched", latch=None)
        assert stats(await server.call("GET", "/sessions/arm")) == ["key at the robot", "robot_latched"]
        # A report of another client does not concern this robot.
        await Client(other).send("latch", reason=None)
        await Client(other).send("ping", number=1)
        await Client(other).receive("pong")
        assert stats(await server.call("GET", "/sessions/arm")) == ["key at the robot", "robot_latched"]
        for fields in ({"reason": 7}, {"reasn": None}, {"resaon": "again", "reason": None}, {}):
            await client.send("latch", **fields)
            assert "reason" in (await client.receive("error"))["detail"]
        assert stats(await server.call("GET", "/sessions/arm")) == ["key at the robot", "robot_latched"]
        await client.send("latch", reason=None)
        await client.send("observation", **server.observe())
        await client.receive("command")
        assert stats(await server.call("GET", "/sessions/arm")) == [None, None]
        await server.call("POST", "/sessions/arm/emergency_stop", json={"reason": "enough"})
        await server.call("POST", "/debug/sessions/arm/reset")
        await client.receive("stopped")
        await until_status(status="stopped", latch=None)
        await client.send("latch", reason="again")
        await client.send("ping", number=2)
        await client.receive("pong")
    # The report ends with its client.
    async with server.stream() as socket:
        await Client(socket).receive("welcome")
        assert stats(await server.call("GET", "/sessions/arm"))[0] is None


@pytest.mark.parametrize("usage", ["commands", "acts", "openpi", "watches"])
async def test_a_client_with_a_revoked_key_leaves_its_robot_latched(serve, tmp_path, monkeypatch, usage):
    for module in (stream, openpi):
        monkeypatch.setattr(module, "_KEY_CHECK_INTERVAL", 0.0)
    file = KeyFile(tmp_path / "keys.json")
    key = file.create("alice", Role.OPERATOR, "alice", time.time())
    async with serve(key, keys_file=str(file.path)) as server:
        path = "/sessions/arm/openpi" if usage == "openpi" else "/sessions/arm/stream"
        async with server.stream(path, additional_headers={"x-api-key": key}) as socket:
            client = Client(socket)
            observed = server.observe()
            sent = codec.pack_openpi({"observation/image": observed["images"]["front"], "state": observed["state"]})
            if usage == "openpi":
                await socket.recv()
                await socket.send(sent)
                await socket.recv()
            elif usage == "acts":
                await client.send("act", **observed, number=1)
                await client.receive("chunk")
            elif usage == "commands":
                await server.call("POST", "/sessions/arm/start")
                await client.send("observation", **observed)
                await client.receive("command")
            else:
                await client.receive("welcome")
            away = file.path.rename(tmp_path / "away")
            if usage == "openpi":
                await socket.send(sent)
            async with asyncio.timeout(30):
                await socket.wait_closed()
            assert socket.close_code == 1008
        away.rename(file.path)
        latch = (await server.call("GET", "/sessions/arm"))[1]["stats"]["emergency_stop"]
        assert latch is None if usage == "watches" else "no longer accepted" in latch
        assert (await server.act(observed))[0] == (200 if usage == "watches" else 409)


async def test_a_started_session_waits_for_a_client(server):
    assert (await server.call("POST", "/sessions/arm/start"))[1]["status"] == "reconnecting"
    async with server.stream() as socket:
        await Client(socket).send("observation", **server.observe())
        await Client(socket).receive("command")
        assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "running"


async def test_one_client_drives_until_it_is_silent(server):
    async with server.stream() as first, server.stream() as second:
        await Client(first).send("observation", **server.observe())
        await Client(first).send("ping", number=1)
        await Client(first).receive("pong")
        await Client(second).send("observation", **server.observe())
        assert (await Client(second).receive("error"))["code"] == "robot_taken"
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await second.recv()
        assert closed.value.rcvd.code == 4409
        # Simulate a silence of more than two seconds.
        link = server.app.ctx.stream_clients.direct.links["arm"]
        link.driver.last_message_at -= 3
        async with server.stream() as third:
            await Client(third).send("observation", **server.observe(number=5))
            await Client(third).send("ping", number=1, time=1.5)
            assert (await Client(third).receive("pong"))["time"] == 1.5
            assert link.driver.last_message_at > time.monotonic() - 2
            assert len(link.listeners) == 2


async def test_acts_are_answered_one_at_a_time_and_only_the_newest_waits(server):
    gate = threading.Event()
    server.policy.failures.append(gate)
    async with server.client() as client:
        for number in (1, 2, 3):
            await client.send("act", **server.observe(number=number))
        superseded = await client.receive("error")
        gate.set()
        assert (superseded["code"], superseded["number"]) == ("superseded", 2)
        first, last = await client.receive("chunk"), await client.receive("chunk")
        assert (first["number"], last["number"], last["actions"].shape) == (1, 3, (20, 6))
        assert last["time"] > first["time"]


async def test_a_stream_may_be_text(server):
    async with server.client() as client:
        await client.socket.send(json.dumps({"kind": "ping", "number": 4}))
        assert (await client.receive("pong"))["number"] == 4
        await client.socket.send(json.dumps({"kind": "dance"}))
        assert isinstance(await client.socket.recv(), str)


async def test_invalid_messages_are_answered_and_too_many_close_the_socket(server):
    async with server.stream() as socket:
        client = Client(socket)
        for invalid in (b"\xc1", codec.pack({"kind": 1}), codec.pack({"kind": "observation", "age_ms": -1})):
            await socket.send(invalid)
            assert (await client.receive("error"))["code"] == "invalid"
        await client.send("observation", state=np.full(6, np.nan))
        assert "NaN" in (await client.receive("error"))["detail"]
        await client.send("observation", state={"Elbow": 1.0, "elbow_flex.vel": 0.5}, number=3)
        answer = await client.receive("error")
        assert (answer["number"], "unknown names: 'elbow_flex.vel'; send" in answer["detail"]) == (3, True)
        await client.send("observation", state={"elbow_flex.pos": 1.0, "elbow_flex.vel": 0.5}, extra="ignore")
        for name in ("agems", "age"):
            await client.send("observation", **{name: 5})
            assert "did you mean 'age_ms'?" in (await client.receive("error"))["detail"]
        assert server.app.ctx.sessions.get("arm").robot_io.buffer.measured_joints()["Elbow"] == 1.0
        await client.send("ping", number=1)
        await client.receive("pong")
        for _ in range(20):
            await socket.send("[")
        with pytest.raises(websockets.ConnectionClosed):
            await client.receive("nothing")
        assert socket.close_code == 1007
    async with server.stream() as socket:
        with suppress(websockets.ConnectionClosed):
            await socket.send(bytes(17 << 20))
            await Client(socket).receive("nothing")
        assert socket.close_code == 1009


async def test_the_end_of_a_session_closes_its_streams(server):
    async with server.stream() as socket:
        await Client(socket).receive("welcome")
        await server.call("DELETE", "/sessions/arm")
        await socket.wait_closed()
        assert socket.close_code == 1001
    with pytest.raises(websockets.InvalidStatus) as refused:
        await server.stream()
    assert refused.value.response.status_code == 404


async def test_streams_check_keys_roles_owners_tickets_and_origins(serve, tmp_path):
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
        status, answer = await server.act(server.observe(), headers={"x-api-key": eve})
        assert (status, answer["code"]) == (403, "forbidden")
        assert (await server.act(server.observe(), headers={"x-api-key": keys["bob"]}))[0] == 404
        ticket = (await server.call("POST", "/tickets"))[1]["ticket"]
        async with server.stream(f"/sessions/arm/stream?ticket={ticket}") as socket:
            await Client(socket).send("act", **server.observe())
            await Client(socket).receive("chunk")
        await refused(401, f"/sessions/arm/stream?ticket={ticket}")
        # A viewer may watch and stop.
        async with server.stream(additional_headers={"x-api-key": eve}) as socket:
            await Client(socket).send("observation", **server.observe())
            assert (await Client(socket).receive("error"))["code"] == "forbidden"
            await Client(socket).send("stop")
            await Client(socket).receive("stopped")


async def test_a_client_that_connects_during_a_load_waits(serve):
    async with serve(create=False) as server, server.loading() as creating, server.client() as client:
        first = codec.unpack(await client.socket.recv())
        assert (first["kind"], first["status"], first["reason"]) == ("status", "initializing", "reading")
        for number in range(25):  # The number exceeds the limit of invalid messages.
            await client.send("observation", **server.observe(number=number))
            answer = await client.receive("error")
            assert (answer["code"], answer["number"]) == ("loading", number)
        await client.send("act", **server.observe(number=25))
        assert (await client.receive("error"))["code"] == "loading"
        await client.send("ping", number=1)
        assert (await client.receive("pong"))["number"] == 1
        assert server.policy.acted == 0
        server.load.gate.set()
        assert (await client.receive("welcome"))["cameras"] == {"front": [48, 64]}
        assert (await client.receive("status"))["status"] == "ready"
        await client.send("act", **server.observe(number=26))
        assert (await client.receive("chunk"))["number"] == 26
        assert (await creating)[0] == 200


async def test_an_http_act_during_a_load_is_503_with_retry_after(serve):
    async with serve(create=False) as server, server.loading():
        body = {"images": {}, "state": []}
        async with server.http.post("/sessions/arm/act", json=body) as answer:
            assert answer.status == 503
            assert 1 <= int(answer.headers["retry-after"]) <= 10
            answer = await answer.json()
        assert answer["code"] == "loading"
        assert "session 'arm' is initializing (reading); ask again in" in answer["detail"]
        server.load.gate.set()
        await until(lambda: server.app.ctx.sessions.get("arm").stage == "ready")
        assert (await server.act(server.observe()))[0] == 200


@pytest.mark.parametrize(
    ("how", "code", "text", "close_code"),
    [("failed", "policy", "the weights are torn", 1011), ("deleted", "unknown_session", "deleted", 1001)],
)
async def test_a_waiting_client_is_closed_with_the_reason(serve, how, code, text, close_code):
    async with serve(create=False) as server:
        server.load.failure = JaxModelsError("the weights are torn") if how == "failed" else None
        async with server.loading(), server.client() as client:
            await client.receive("status")
            if how == "failed":
                server.load.gate.set()
            else:
                assert (await server.call("DELETE", "/sessions/arm"))[0] == 200
            answer = await client.receive("error")
            assert (answer["code"], text in answer["detail"]) == (code, True)
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await client.receive("welcome")
            assert (closed.value.rcvd.code, text in closed.value.rcvd.reason) == (close_code, True)
        if how == "failed":  # A later client also gets the reason.
            status, answer = await server.act(server.observe())
            assert (status, answer["code"]) == (409, "move_refused")
            assert re.search("the weights are torn.*delete it and create it again", answer["detail"])


async def test_a_stop_during_a_load_is_latched_and_shown(serve):
    async with serve(create=False) as server, server.loading(), server.client() as client:
        await client.send("stop", reason="enough")
        while (await client.receive("status"))["reason"] != "enough":
            pass
        server.load.gate.set()
        assert (await client.receive("welcome"))["status"] == "stopped"
        await client.send("act", **server.observe(reset=True))
        assert "emergency stop (enough)" in (await client.receive("error"))["detail"]
        assert server.policy.acted == 0


async def test_the_python_clients_wait_for_the_policy(serve):
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


async def test_a_slowly_decoded_image_does_not_restore_older_joints(server, monkeypatch):
    gate = threading.Event()
    decode = observation.decode_image
    monkeypatch.setattr(observation, "decode_image", lambda *arguments: gate.wait(30) and decode(*arguments))
    async with server.client() as client:
        file = io.BytesIO()
        Image.fromarray(server.observe()["images"]["front"]).save(file, "PNG")
        await client.send("observation", **server.observe(images={"front": file.getvalue()}))
        await client.send("observation", state={"Elbow": -30.0})
        await client.send("ping")
        await client.receive("pong")
        gate.set()
        buffer = server.app.ctx.sessions.get("arm").robot_io.buffer
        while not buffer.sizes:  # noqa: ASYNC110, the decoder runs in a thread
            await asyncio.sleep(0.01)
        assert buffer.measured_joints()["Elbow"] == -30.0


async def test_a_slow_decode_delays_neither_a_stop_nor_other_robots(server, monkeypatch):
    gate, decode = threading.Event(), observation.decode_image
    monkeypatch.setattr(observation, "decode_image", lambda *arguments: gate.wait(30) and decode(*arguments))
    await server.create("other")
    file = io.BytesIO()
    Image.fromarray(server.observe()["images"]["front"]).save(file, "JPEG")
    async with server.client() as slow, server.stream("/sessions/other/stream") as socket:
        await slow.send("act", **server.observe(images={"front": file.getvalue()}))
        other = Client(socket)
        await other.send("act", **server.observe())
        assert (await other.receive("chunk"))["actions"].shape == (20, 6)
        await slow.send("stop", reason="enough")
        assert (await slow.receive("stopped"))["reason"] == "enough"
        gate.set()
        assert (await slow.receive("error"))["code"] == "move_refused"


async def test_commands_to_a_client_that_does_not_read_are_refused(server, monkeypatch):
    async with server.client() as client:
        await client.send("observation", **server.observe())
        await client.send("ping")
        await client.receive("pong")
        link = server.app.ctx.stream_clients.direct.links["arm"]
        command = [JointValue("Elbow", 1.0, 2)]
        assert link.send(command)
        monkeypatch.setattr(type(link.driver.send_command.__self__._socket), "unsent", 4097)
        assert not link.send(command)
        assert link.health()["commands_refused"] == 1


async def test_a_new_robot_does_not_continue_the_motion_of_another(server):
    async with server.client() as client:
        await server.call("POST", "/sessions/arm/start")
        await client.send("observation", **server.observe())
        await client.receive("command")
        robot_io, link = server.app.ctx.sessions.get("arm").robot_io, server.app.ctx.stream_clients.direct.links["arm"]
        driver, sent = link.driver, link.health()["commands_sent"]
        assert robot_io.controller.queue.left
        link.release_control(driver, "gone")
        link.take_control(driver, 2.0)
        assert not robot_io.controller.queue.left
        # The new robot has sent one joint. The pose of the old robot must not be used for a hold.
        link.inbox.on_joints({"Elbow": 20.0}, time.monotonic())
        robot_io.halt(always_hold=True)
        assert link.health()["commands_sent"] == sent
