"""Only its session moves a robot, and a stopped session does not move it: strangers in its rooms are refused."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.transport.client.connection import TransportTimeouts
from service.transport.client.robot import Robot, connect_robot
from service.transport.link import EmergencyStop, JointValue, Rooms
from tests.testing import rig
from tests.testing.rig import expect_ok, expect_refusal
from tests.testing.rooms_server import serve_transport
from tests.testing.waiting import until

POSE = {"Rotation": 1.0, "Pitch": 2.0, "Elbow": 3.0, "Wrist_Pitch": 4.0, "Wrist_Roll": 5.0, "Jaw": 6.0}
EVIL = [{"name": "Rotation", "value": 340.0}]
NEAR = [{"name": "Rotation", "value": 90.0}]  # In range: only the sender is wrong.
ROOMS = "/robotics/workspaces/w/rooms"
OUTPUT, INPUT = f"{ROOMS}/arm-joint-output", f"{ROOMS}/arm-joint-input"
ROBOT_ROOMS = Rooms("w", {}, "arm-joint-input", "arm-joint-output")
QUICK = TransportTimeouts(retry_first=0.02, retry_longest=0.05, heartbeat=0.5, greet=0.05)


@dataclass
class Scene(rig.Server):
    """Server, a robot in the rooms of its session ``arm``, and a stranger."""

    got: list[dict[str, float]] = field(default_factory=list)
    stops: list[EmergencyStop] = field(default_factory=list)
    robot: Robot | None = None
    rooms: Rooms = ROBOT_ROOMS

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await super().call(method, path, json=body)

    async def ask(self, path: str) -> None:
        expect_ok(await self.call("POST", path))

    @property
    def stats(self) -> Any:
        return self.app.ctx.sessions.get("arm").status().stats

    @property
    def link(self) -> Any:
        return self.app.ctx.sessions.get_live("arm").robot_io._link

    async def create(self) -> None:
        body = {"session_id": "arm", "policy_path": "p", "workspace_id": "w", "rate": 50}
        expect_ok(await self.call("POST", "/sessions", body | {"transport_server_url": self.url}))

    @asynccontextmanager
    async def with_robot(self) -> AsyncIterator[Robot]:
        async with connect_robot(
            self.url,
            self.rooms,
            on_command=lambda values, at: self.got.append(dict(values)),
            on_emergency_stop=self.stops.append,
            pace=QUICK,
        ) as robot:
            robot.send_joints(POSE)
            robot_io = self.app.ctx.sessions.get_live("arm").robot_io
            await until(lambda: robot_io.buffer.is_pose_current)
            self.robot = robot
            yield robot

    async def bring(self, stage: str) -> None:
        if stage == "ready":
            return
        await self.ask("/sessions/arm/start")
        if stage == "stopped":
            await self.ask("/sessions/arm/stop")
        if stage in ("latched", "deleted"):
            await self.ask("/sessions/arm/emergency_stop")
        if stage == "deleted":
            await self.call("DELETE", "/sessions/arm")

    async def settle(self) -> None:
        """Wait for commands under way: the robot receives its own stop after them."""
        async with self.http.ws_connect(self.url + OUTPUT + "/ws") as there:
            await there.send_json({"participant_id": "witness", "role": "consumer"})
            await there.send_json({"type": "heartbeat"})
            while (frame := await there.receive(30)).type is aiohttp.WSMsgType.TEXT:
                if json.loads(frame.data)["type"] == "heartbeat_ack":
                    break
        await asyncio.sleep(0.05)


@asynccontextmanager
async def scene(tmp_path: Path | None = None, *, keeps_rooms: bool = True, port: int = 0) -> AsyncIterator[Scene]:
    state = "off" if tmp_path is None else str(tmp_path)
    async with rig.started(Scene, transport=rig.REAL, state=state, port=port) as made:
        if keeps_rooms:  # Rooms that exist before and after the session.
            for room in ("arm-joint-output", "arm-joint-input"):
                await made.call("POST", ROOMS, {"room_id": room})
        yield made


@pytest.fixture
async def moving() -> AsyncIterator[Scene]:
    async with scene() as made:
        await made.create()
        async with made.with_robot():
            await made.ask("/sessions/arm/start")
            yield made


async def over_rest(scene: Scene, prefix: str, joints: list[dict[str, Any]]) -> None:
    status, reply = await scene.call("POST", f"{prefix}{OUTPUT}/command", {"joints": joints})
    assert (status, reply["code"]) == (409, "robot_taken") or reply["code"] == "latched", reply


async def over_a_socket(scene: Scene, prefix: str, joints: list[dict[str, Any]], role: str, kind: str) -> None:
    async with scene.http.ws_connect(scene.url + prefix + OUTPUT + "/ws") as there:
        await there.send_json({"participant_id": "stranger", "role": role})
        first = await there.receive_json(timeout=30)
        if role == "producer":
            assert first["type"] == "error"
            assert first["message"].startswith("Cannot join room")
            return
        data = joints if kind == "joint_update" else {joint["name"]: joint["value"] for joint in joints}
        await there.send_json({"type": kind, "data": data})


async def by_deleting(scene: Scene, prefix: str, joints: list[dict[str, Any]]) -> None:
    status, reply = await scene.call("DELETE", prefix + OUTPUT)
    assert (status, reply["code"]) in ((409, "robot_taken"), (409, "latched")), reply
    await scene.call("POST", prefix + ROOMS, {"room_id": "arm-joint-output"})
    await over_a_socket(scene, prefix, joints, "producer", "joint_update")
    await over_rest(scene, prefix, joints)


async def by_a_false_pose(scene: Scene, prefix: str, joints: list[dict[str, Any]]) -> None:
    """Report a false pose of the robot, then request a hold at that pose."""
    joints = [joint | {"value": min(joint["value"], 77.0)} for joint in joints]
    await scene.call("POST", f"{prefix}{INPUT}/command", {"joints": joints})
    async with scene.http.ws_connect(scene.url + prefix + INPUT + "/ws") as there:
        await there.send_json({"participant_id": "stranger", "role": "consumer"})
        await there.send_json({"type": "emergency_stop", "reason": "go there"})
        while (await there.receive_json(timeout=30))["type"] != "emergency_stop":
            pass


WAYS: tuple[Callable[..., Any], ...] = (
    over_rest,
    lambda *where: over_a_socket(*where, "producer", "joint_update"),
    lambda *where: over_a_socket(*where, "consumer", "joint_update"),
    lambda *where: over_a_socket(*where, "consumer", "state_sync"),
    by_deleting,
)


@pytest.mark.parametrize("stage", ["ready", "running", "stopped", "latched", "deleted"])
async def test_stranger_cannot_move_the_robot_of_a_session(stage: str) -> None:
    async with scene() as made:
        await made.create()
        async with made.with_robot():
            await made.bring(stage)
            for prefix in ("", "/api"):
                for joints in (EVIL, NEAR):
                    for way in WAYS:
                        await way(made, prefix, joints)
            await by_a_false_pose(made, "", NEAR)  # Last, because it stops the session.
            await made.settle()
            assert [one for one in made.got if not one.items() <= POSE.items()] == []
            if stage != "deleted":
                assert made.stats["refused_at_room"]["robot_taken"] >= 12
                assert made.app.ctx.sessions.get("arm").is_latched, "a stranger may always stop the robot"


async def test_room_passes_only_commands_of_its_session_in_range(moving: Scene) -> None:
    for value in (340.0, -100.5):  # As if the action guard had failed.
        assert moving.link.send([JointValue("Rotation", value), JointValue("Jaw", 9.0)])
    assert moving.link.send([JointValue("Tail", 0.0)])
    assert moving.link.send([JointValue("Rotation", 12.0)])
    await until(lambda: {"Rotation": 12.0} in moving.got)
    assert moving.got == [{"Rotation": 12.0}], "a command is refused whole"
    assert moving.stats["refused_at_room"] == {"position": 2, "unknown_joint": 1}


async def test_latched_room_refuses_its_own_session(moving: Scene) -> None:
    robot = moving.robot
    await moving.ask("/sessions/arm/emergency_stop")
    await until(lambda: robot.latch)
    moving.got.clear()
    moving.link.send([JointValue("Rotation", 12.0)])
    await until(lambda: moving.stats["refused_at_room"].get("latched"))
    assert (moving.got, robot.refused) == ([], 0), "the room refuses the command before the robot does"


async def test_seat_is_kept_during_reconnection_and_after_a_restart(tmp_path) -> None:
    async with scene(tmp_path, keeps_rooms=False) as made:
        await made.create()
        connection = made.link._output
        connection._membership._transport.abort()
        for _ in range(5):
            await over_a_socket(made, "", EVIL, "producer", "joint_update")
        await made.ask("/debug/emergency_stop")
        port = int(made.url.rsplit(":", 1)[1])
    async with scene(tmp_path, port=port) as made:
        _, reply = await made.call("GET", "/sessions/arm")
        assert reply["status"] == "interrupted"
        await over_rest(made, "", NEAR)
        await over_a_socket(made, "/api", NEAR, "producer", "joint_update")
        async with made.http.ws_connect(made.url + OUTPUT + "/ws") as there:
            await there.send_json({"participant_id": "robot", "role": "consumer"})
            received = [await there.receive_json(timeout=30) for _ in range(3)]
        assert [one["type"] for one in received] == ["state_sync", "joined", "emergency_stop"]
        assert received[0]["data"] == {}
        await made.ask("/debug/sessions/arm/reset")
        await made.ask("/sessions/arm/restart")
        assert made.link._output.participant_id, "the session joins its own room"


async def test_rooms_without_a_session_keep_the_wire_rules() -> None:
    async with scene() as made:
        path = f"{ROOMS}/mine"
        await made.call("POST", ROOMS, {"room_id": "mine"})
        for room in (path, OUTPUT):
            status, reply = await made.call("POST", f"{room}/command", {"joints": EVIL})
            assert (status, reply["joints_updated"]) == (200, 1)
        async with made.http.ws_connect(made.url + OUTPUT + "/ws") as there:
            await there.send_json({"participant_id": "mine", "role": "producer"})
            assert (await there.receive_json(timeout=30))["type"] == "joined"
            body = {"session_id": "arm", "policy_path": "p", "workspace_id": "w", "transport_server_url": made.url}
            expect_refusal(await made.call("POST", "/sessions", body), 409, "robot_taken")
            assert (await made.call("POST", f"{OUTPUT}/command", {"joints": NEAR}))[0] == 200


async def test_robot_refuses_commands_until_its_server_clears_the_latch(moving: Scene, caplog) -> None:
    caplog.set_level(logging.WARNING)
    robot = moving.robot
    await moving.ask("/sessions/arm/emergency_stop")
    await until(lambda: robot.latch)
    assert moving.stops, "the robot is notified of a stop over HTTP"
    # A server that lets each client command would pass this on.
    robot._take_command({"Rotation": 90.0}, 0.0)
    robot._take_command({"Rotation": POSE["Rotation"]}, 0.0)
    assert robot.refused == 1
    assert "a command is refused: an emergency stop is latched" in caplog.text
    assert robot.health()["latch"] == robot.latch
    assert all(one.items() <= POSE.items() for one in moving.got)
    robot._output.rejoin("a test")
    await until(lambda: robot._output.participant_id is None)
    await until(lambda: robot.is_connected)
    await asyncio.sleep(0.1)
    assert robot.latch, "a new connection keeps the latch"
    await moving.ask("/debug/sessions/arm/reset")
    await until(lambda: robot.latch is None)
    robot._take_command({"Rotation": 90.0}, 0.0)
    assert {"Rotation": 90.0} in moving.got


async def test_robot_that_joins_during_a_latch_is_latched() -> None:
    async with scene() as made:
        await made.create()
        await made.ask("/sessions/arm/emergency_stop")
        async with made.with_robot() as robot:
            assert robot.latch == "asked for over HTTP"
            assert made.stops
            await made.ask("/debug/sessions/arm/reset")
            await until(lambda: robot.latch is None)
            robot.emergency_stop("a hand")
            assert robot.latch == "a hand"
            await until(lambda: made.app.ctx.sessions.get("arm").is_latched)
            await until(lambda: robot._is_confirmed)


async def test_stop_missed_by_the_session_reaches_its_server(monkeypatch) -> None:
    monkeypatch.setattr("service.transport.client.robot.STOP_REPORT_DELAY", 0.1)
    async with scene() as made:
        await made.create()
        async with made.with_robot() as robot:
            robot._latch_stop("pressed at the robot")
            await until(lambda: made.app.ctx.sessions.get("arm").is_latched)
            assert made.app.ctx.sessions.get("arm").latch == "pressed at the robot"
            assert robot.latch


async def test_session_keeps_and_returns_its_room_on_a_rooms_server() -> None:
    async with serve_transport() as rooms, scene() as made, aiohttp.ClientSession() as http:

        async def command() -> int:
            async with http.post(f"{rooms}{OUTPUT}/command", json={"joints": NEAR}) as answer:
                return answer.status

        for room in ("arm-joint-output", "arm-joint-input"):
            async with http.post(f"{rooms}{ROOMS}", json={"room_id": room}) as answer:
                assert answer.status == 200
        assert await command() == 200
        body = {"session_id": "arm", "policy_path": "p", "workspace_id": "w", "transport_server_url": rooms}
        expect_ok(await made.call("POST", "/sessions", body))
        assert await command() == 409
        await made.ask("/sessions/arm/emergency_stop")
        output = made.link._output
        output._membership._transport.abort()  # The session disconnects briefly.
        async with http.ws_connect(f"{rooms}{OUTPUT}/ws") as there:
            await there.send_json({"participant_id": "stranger", "role": "producer"})
            assert (await there.receive_json(timeout=30))["message"].startswith("Cannot join room")
        async with http.ws_connect(f"{rooms}{OUTPUT}/ws") as there:
            await there.send_json({"participant_id": "robot", "role": "consumer"})
            while (received := await there.receive_json(timeout=30))["type"] != "emergency_stop":
                pass
            assert received["reason"] == "asked for over HTTP"
        await made.call("DELETE", "/sessions/arm")
        assert await command() == 200
