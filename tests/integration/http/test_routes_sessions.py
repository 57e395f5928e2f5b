import asyncio
import threading
from dataclasses import replace

import pytest

from service.errors import TransportError
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
from tests.testing.rig import expect_refusal


async def test_a_session_is_made_listed_looked_at_and_deleted(server):
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


async def test_a_workspace_is_made_when_none_is_given(server):
    first, second = [(await server.create(name))[1]["workspace_id"] for name in ("a", "b")]
    assert first
    assert second
    assert first != second


async def test_start_stop_and_restart_say_what_became_of_the_session(server):
    await server.create()
    for move, stage in (("start", "running"), ("stop", "stopped"), ("restart", "running")):
        status, told = await server.call("POST", f"/sessions/arm/{move}")
        assert (status, told["session_id"], told["status"]) == (200, "arm", stage)
        assert "arm" in told["message"]


async def test_an_unknown_session_is_404(server):
    moves = [("POST", f"/sessions/nobody/{move}") for move in ("start", "stop", "restart")]
    debug = [("POST", "/debug/sessions/nobody/reset"), ("GET", "/debug/sessions/nobody/queue")]
    for method, path in [("GET", "/sessions/nobody"), ("DELETE", "/sessions/nobody"), *moves, *debug]:
        status, told = await server.call(method, path)
        assert (status, told) == (404, {"detail": "Session nobody not found", "code": "unknown_session"}), path


async def test_a_forbidden_move_is_409_and_names_the_allowed_ones(server):
    await server.create()
    await server.call("POST", "/sessions/arm/start")
    expect_refusal(await server.call("POST", "/sessions/arm/start"), 409, "move_refused", "stop", "restart")


async def test_a_create_may_take_longer_than_other_answers(serve):
    async with serve(answer_deadline=0.2) as server:
        server.load.gate = threading.Event()
        create = asyncio.create_task(server.create())
        await asyncio.sleep(0.8)
        assert not create.done()
        server.load.gate.set()
        assert (await create)[0] == 200


async def test_a_client_that_gives_up_finds_its_session_in_the_list(server):
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


async def test_an_unloadable_policy_is_422_and_stays_listed(server):
    from jaxmodels.errors import CheckpointError

    server.load.failure = CheckpointError("config.json is missing")
    status, told = await server.create(policy_path="/models/act")
    assert status == 422
    [entry] = told["detail"]
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
    # The first session keeps its rooms, and each of these has rooms of its own.
    assert (await server.call("GET", f"/sessions/{first[0]}"))[1]["rooms"]["camera_room_ids"] == made["camera_room_ids"]
    assert (await server.create(second[0], **one_camera(second[1], workspace_id="other")))[0] == 200
    assert (await server.create("third", **one_camera(second[1])))[0] == 200
    assert (await server.create("joint", **one_camera("joint_input")))[0] == 200
    assert (await server.call("DELETE", f"/sessions/{first[0]}"))[0] == 200
    assert (await server.call("DELETE", f"/sessions/{second[0]}"))[0] == 200
    assert (await server.create(second[0], **one_camera(second[1])))[0] == 200


async def test_of_two_creates_at_once_one_gets_the_room(server):
    names = [("arm-left", "wrist"), ("arm", "left-wrist")]
    found = await asyncio.gather(*(server.create(name, **one_camera(camera)) for name, camera in names))
    assert sorted(status for status, _ in found) == [200, 409]


async def test_rooms_are_compared_among_sessions_that_have_rooms(server):
    assert (await server.create("arm-left", **one_camera("wrist", transport_server_url="direct")))[0] == 200
    assert (await server.create("arm", **one_camera("left-wrist")))[0] == 200
    assert (await server.create("leg-left", **one_camera("wrist", policy_type="diffusion")))[0] == 422
    assert (await server.create("leg", **one_camera("left-wrist")))[0] == 200, "a failed session has no rooms"


async def test_a_session_renames_a_camera_with_any_name(serve):
    needs = replace(SO100_REQUIREMENTS, cameras={"Top Cam": (48, 64), "caméra": (48, 64)})
    async with serve(load=ScriptedLoader(lambda: ScriptedPolicy(needs))) as server:
        rename = {"Top Cam": "top", "caméra": "side"}
        status, told = await server.create(camera_names=["top", "side"], rename=rename, workspace_id="lab")
        assert (status, told["camera_room_ids"]) == (200, {"top": "arm-top", "side": "arm-side"})
        status, told = await server.create("other", camera_names=["top", "side"])
        assert (status, "send rename" in told["detail"][0]["msg"]) == (422, True)
        status, told = await server.create("other", camera_names=["Top Cam", "side"])
        assert (status, told["detail"][0]["loc"]) == (422, ["body", "camera_names", 0])


async def test_a_transport_that_fails_is_502(server):
    server.transport.refuse = TransportError("rooms.example: connection refused")
    expect_refusal(await server.create(), 502, "transport", "connection refused")


async def test_a_bug_of_the_loader_is_reported_by_its_kind_only(server):
    server.load.failure = RuntimeError("token hf_abcdefgh in /root/secrets")
    status, told = await server.create()
    assert status == 422
    assert "RuntimeError" in str(told)
    assert "hf_" not in str(told)
    assert "/root" not in str(told)


async def test_no_more_sessions_than_the_settings_allow(serve):
    async with serve(max_sessions=1) as server:
        assert (await server.create("a"))[0] == 200
        expect_refusal(await server.create("b"), 429, "too_many_sessions")


async def test_names_in_paths_may_be_percent_encoded(server):
    await server.create("arm.1")
    assert (await server.call("GET", "/sessions/arm%2E1"))[0] == 200
    status, told = await server.call("GET", "/sessions/no%20such%2Fname")
    assert (status, told["detail"]) == (404, "Session no such/name not found")
