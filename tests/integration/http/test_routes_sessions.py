import asyncio
import threading
from dataclasses import replace

import pytest

from service.errors import TransportError
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
from tests.testing.rig import expect_refusal


async def test_session_is_created_listed_shown_and_deleted(server):
    status, made = await server.create("arm", camera_names=["front"], workspace_id="shop")
    assert (status, made) == (
        200,
        {
            "workspace_id": "shop",
            "camera_room_ids": {"front": "arm-front"},
            "joint_input_room_id": "arm-joint-input",
            "joint_output_room_id": "arm-joint-output",
        },
    )
    status, listed = await server.call("GET", "/sessions")
    assert [(one["session_id"], one["status"], one["workspace_id"]) for one in listed] == [("arm", "ready", "shop")]
    assert set(listed[0]) == {
        *("session_id", "status", "policy_path", "policy_type", "camera_names"),
        *("workspace_id", "rooms", "stats", "inference_stats", "error_message"),
    }
    status, one = await server.call("GET", "/sessions/arm")
    assert (status, one["rooms"]["joint_input_room_id"]) == (200, "arm-joint-input")
    assert await server.call("DELETE", "/sessions/arm") == (200, {"message": "Session arm deleted"})
    assert await server.call("GET", "/sessions") == (200, [])
    assert server.transport.links[-1].is_closed


async def test_workspace_is_created_by_default(server):
    first, second = [(await server.create(name))[1]["workspace_id"] for name in ("a", "b")]
    assert first
    assert second
    assert first != second


async def test_start_stop_and_restart_return_the_new_status(server):
    await server.create()
    for move, stage in (("start", "running"), ("stop", "stopped"), ("restart", "running")):
        status, reply = await server.call("POST", f"/sessions/arm/{move}")
        assert (status, reply["session_id"], reply["status"]) == (200, "arm", stage)
        assert "arm" in reply["message"]


async def test_unknown_session_is_404(server):
    moves = [("POST", f"/sessions/nobody/{move}") for move in ("start", "stop", "restart")]
    debug = [("POST", "/debug/sessions/nobody/reset"), ("GET", "/debug/sessions/nobody/queue")]
    for method, path in [("GET", "/sessions/nobody"), ("DELETE", "/sessions/nobody"), *moves, *debug]:
        status, reply = await server.call(method, path)
        assert (status, reply) == (404, {"detail": "Session nobody not found", "code": "unknown_session"}), path


async def test_forbidden_move_is_409_and_names_the_allowed_moves(server):
    await server.create()
    await server.call("POST", "/sessions/arm/start")
    expect_refusal(await server.call("POST", "/sessions/arm/start"), 409, "move_refused", "stop", "restart")


async def test_create_may_take_longer_than_other_requests(serve):
    async with serve(answer_deadline=0.2) as server:
        server.load.gate = threading.Event()
        create = asyncio.create_task(server.create())
        await asyncio.sleep(0.8)
        assert not create.done()
        server.load.gate.set()
        assert (await create)[0] == 200


async def test_session_of_a_disconnected_client_is_listed(server):
    server.load.gate = threading.Event()
    create = asyncio.create_task(server.create())
    await server.until_loading()
    assert (await server.call("GET", "/sessions"))[1][0]["status"] == "initializing"
    create.cancel()
    await asyncio.gather(create, return_exceptions=True)
    server.load.gate.set()
    for _ in range(3000):
        _, listed = await server.call("GET", "/sessions")
        if listed[0]["status"] == "ready":
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"still {listed}")


async def test_unloadable_policy_is_422_and_stays_listed(server):
    from jaxmodels.errors import CheckpointError

    server.load.failure = CheckpointError("config.json is missing")
    status, reply = await server.create(policy_path="/models/act")
    assert status == 422
    [entry] = reply["detail"]
    assert (entry["loc"], entry["type"]) == (["body", "policy_path"], "policy")
    assert "config.json is missing" in entry["msg"]
    assert "'/models/act'" in entry["msg"]
    _, [listed] = await server.call("GET", "/sessions")
    assert (listed["status"], "config.json" in listed["error_message"]) == ("error", True)
    server.load.failure = None
    assert (await server.create())[0] == 200


def one_camera(camera, **more):
    return {"camera_names": [camera], "rename": {"front": camera}, "workspace_id": "lab"} | more


SHARED_ROOMS = [
    (("arm-left", "wrist"), ("arm", "left-wrist"), "arm-left-wrist"),
    (("arm", "left-wrist"), ("arm-left", "wrist"), "arm-left-wrist"),
    (("arm", "front"), ("arm-joint", "input"), "arm-joint-input"),
    (("arm-joint", "output"), ("arm", "front"), "arm-joint-output"),
]


@pytest.mark.parametrize(("first", "second", "room"), SHARED_ROOMS)
async def test_two_sessions_never_share_a_room(server, first, second, room):
    status, made = await server.create(first[0], **one_camera(first[1]))
    assert status == 200
    names = map(repr, (room, "lab", first[0], second[0]))
    expect_refusal(await server.create(second[0], **one_camera(second[1])), 409, "rooms_taken", *names)
    # The first session keeps its rooms, and each second session has other rooms.
    assert (await server.call("GET", f"/sessions/{first[0]}"))[1]["rooms"]["camera_room_ids"] == made["camera_room_ids"]
    assert (await server.create(second[0], **one_camera(second[1], workspace_id="other")))[0] == 200
    assert (await server.create("third", **one_camera(second[1])))[0] == 200
    assert (await server.create("joint", **one_camera("joint_input")))[0] == 200
    assert (await server.call("DELETE", f"/sessions/{first[0]}"))[0] == 200
    assert (await server.call("DELETE", f"/sessions/{second[0]}"))[0] == 200
    assert (await server.create(second[0], **one_camera(second[1])))[0] == 200


async def test_one_of_two_concurrent_creates_gets_the_room(server):
    names = [("arm-left", "wrist"), ("arm", "left-wrist")]
    found = await asyncio.gather(*(server.create(name, **one_camera(camera)) for name, camera in names))
    assert sorted(status for status, _ in found) == [200, 409]


async def test_failed_session_does_not_reserve_rooms(server):
    assert (await server.create("arm-left", **one_camera("wrist", transport_server_url="direct")))[0] == 200
    assert (await server.create("arm", **one_camera("left-wrist")))[0] == 200
    assert (await server.create("leg-left", **one_camera("wrist", policy_type="diffusion")))[0] == 422
    assert (await server.create("leg", **one_camera("left-wrist")))[0] == 200, "a failed session has no rooms"


async def test_session_renames_a_camera_with_any_name(serve):
    needs = replace(SO100_REQUIREMENTS, cameras={"Top Cam": (48, 64), "caméra": (48, 64)})
    async with serve(load=ScriptedLoader(lambda: ScriptedPolicy(needs))) as server:
        rename = {"Top Cam": "top", "caméra": "side"}
        status, reply = await server.create(camera_names=["top", "side"], rename=rename, workspace_id="lab")
        assert (status, reply["camera_room_ids"]) == (200, {"top": "arm-top", "side": "arm-side"})
        status, reply = await server.create("other", camera_names=["top", "side"])
        assert (status, "send rename" in reply["detail"][0]["msg"]) == (422, True)
        status, reply = await server.create("other", camera_names=["Top Cam", "side"])
        assert (status, reply["detail"][0]["loc"]) == (422, ["body", "camera_names", 0])


async def test_failed_transport_is_502(server):
    server.transport.refuse = TransportError("rooms.example: connection refused")
    expect_refusal(await server.create(), 502, "transport", "connection refused")


async def test_bug_of_the_loader_shows_only_the_type_of_its_error(server):
    server.load.failure = RuntimeError("token hf_abcdefgh in /root/secrets")
    status, reply = await server.create()
    assert status == 422
    assert "RuntimeError" in str(reply)
    assert "hf_" not in str(reply)
    assert "/root" not in str(reply)


async def test_number_of_sessions_is_limited(serve):
    async with serve(max_sessions=1) as server:
        assert (await server.create("a"))[0] == 200
        expect_refusal(await server.create("b"), 429, "too_many_sessions")


async def test_names_in_paths_may_be_percent_encoded(server):
    await server.create("arm.1")
    assert (await server.call("GET", "/sessions/arm%2E1"))[0] == 200
    status, reply = await server.call("GET", "/sessions/no%20such%2Fname")
    assert (status, reply["detail"]) == (404, "Session no such/name not found")
