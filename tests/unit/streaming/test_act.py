import asyncio
import base64
import io
import threading
from dataclasses import replace

import numpy as np
from PIL import Image

from jaxmodels import Requirements
from service.streaming import codec
from service.testing import ScriptedPolicy


def jpeg(height: int = 48, width: int = 64, form: str = "JPEG") -> bytes:
    held = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 200, np.uint8)).save(held, form)
    return held.getvalue()


async def test_a_direct_session_has_no_rooms(serve):
    async with serve() as server:
        told = await server.create()
        assert told["camera_room_ids"] == {}
        assert told["joint_input_room_id"] == told["joint_output_room_id"] == ""
        assert (await server.call("DELETE", "/sessions/arm"))[0] == 200
        assert (await server.act(server.seen()))[0] == 404


async def test_a_chunk_comes_back_for_an_observation(server):
    status, told = await server.act(server.seen(number=7))
    assert status == 200
    assert (told["number"], told["actions"].shape, told["action_steps"], told["clamped"]) == (7, (20, 6), 20, [])
    np.testing.assert_allclose(told["actions"][0], np.add(server.pose, 0.1), atol=1e-5)
    assert set(told["timings_ms"]) == {"decode", "queue", "to_device", "compute", "to_host", "total"}
    stats = (await server.call("GET", "/sessions/arm"))[1]["stats"]
    assert stats["inference_count"] == 0 or stats["images_received"] == {"front": 1}


async def test_json_has_pictures_in_base64_and_joints_by_any_of_their_names(server):
    state = dict(
        zip(("shoulder_pan", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "gripper"), server.pose, strict=True)
    )
    for form in ("JPEG", "PNG"):
        body = {"images": {"front": base64.b64encode(jpeg(form=form)).decode()}, "state": state}
        status, told = await server.call("POST", "/sessions/arm/act", json=body)
        assert status == 200, told
        assert np.allclose(told["actions"][0], np.add(server.pose, 0.1), atol=1e-4)
        status, told = await server.act(
            server.seen(images={"front": jpeg(form=form)}), headers={"accept": "application/json"}
        )
        assert (status, len(told["actions"])) == (200, 20)


async def test_single_actions_come_from_one_chunk_until_it_is_used_up(serve):
    needs = Requirements(policy_type="act", cameras={"front": (48, 64)}, state=6, action=6, chunk=4, action_steps=2)
    async with serve(policy=ScriptedPolicy(needs)) as server:
        await server.create()
        left = [(await server.act(server.seen(want="action")))[1]["left"] for _ in range(4)]
        assert left == [1, 0, 1, 0]
        assert server.policy.acted == 2
        told = (await server.act(server.seen(want="action", reset=True)))[1]
        assert (told["left"], server.policy.acted) == (1, 3)


async def test_single_actions_go_on_after_a_failure_from_where_the_arm_is(serve):
    needs = Requirements(policy_type="act", cameras={"front": (48, 64)}, state=6, action=6, chunk=2, action_steps=2)
    async with serve(policy=ScriptedPolicy(needs, step=5.0), max_relative_target=1.0) as server:
        await server.create()
        for _ in range(2):
            assert (await server.act(server.seen(want="action")))[0] == 200
        server.policy.failures.append(ValueError("broken"))
        assert (await server.act(server.seen(want="action")))[0] == 500
        told = (await server.act(server.seen(want="action")))[1]
        np.testing.assert_allclose(told["action"], np.add(server.pose, 1.0), atol=1e-4)


async def test_an_action_that_was_planned_before_a_pause_or_before_the_loop_drove_is_never_told(server):
    assert (await server.act(server.seen(want="action")))[0] == 200
    ((_, client),) = server.app.ctx.stream_clients._inferences.items()
    moved = np.add(server.pose, -7.0).astype(np.float32)

    async def told() -> np.ndarray:
        return (await server.act(server.seen(want="action", state=moved)))[1]["action"]

    client._action_at -= 2.1
    np.testing.assert_allclose(await told(), moved + 0.1, atol=1e-4)
    np.testing.assert_allclose(await told(), moved + 0.2, atol=1e-4)
    client.session.robot_io.controller.ticks += 1
    np.testing.assert_allclose(await told(), moved + 0.1, atol=1e-4)


async def test_what_was_done_of_a_chunk_may_be_said_again(serve):
    async with serve(policy=ScriptedPolicy(step=5.0), max_relative_target=1.0) as server:
        await server.create()
        assert (await server.act(server.seen()))[0] == 200
        server.policy.failures.append(ValueError("broken"))
        assert (await server.act(server.seen(executed=4)))[0] == 500
        moved = np.array(server.pose, np.float32) + 1.0
        told = (await server.act(server.seen(state=moved, executed=5)))[1]
        # The policy wants 6, from the fifth action on.
        np.testing.assert_allclose(told["actions"][:2, 0], [6, 7], atol=1e-4)


async def test_a_chunk_is_held_to_the_limits_from_the_measured_pose_or_from_what_was_done(serve):
    async with serve(policy=ScriptedPolicy(step=5.0), max_relative_target=1.0) as server:
        await server.create()
        told = (await server.act(server.seen()))[1]
        assert "seam" in told["clamped"]
        np.testing.assert_allclose(told["actions"][:3, 0], [1, 2, 3], atol=1e-4)
        moved = np.array(server.pose, np.float32) + 1.0
        told = (await server.act(server.seen(state=moved, executed=10)))[1]
        # The arm lags behind and the policy wants 6: its motion goes there from the tenth action, not from the pose.
        np.testing.assert_allclose(told["actions"][:2, 0], [9, 10], atol=1e-4)
        assert (await server.act(server.seen(executed=21)))[0] == 422


async def test_a_chunk_that_cannot_be_done_is_never_told(server):
    for bad in (np.nan, np.inf, 1e30):
        server.policy.failures.append(np.full((1, 20, 6), bad, np.float32))
        status, told = await server.act(server.seen())
        assert (status, told["code"]) == (500, "policy_failed")
        assert "actions" not in told
    assert (await server.act(server.seen()))[0] == 200


async def test_everything_that_is_wrong_is_said_at_once(server):
    status, told = await server.act({"images": {"side": b""}, "prompt": 3})
    text = told["detail"][0]["msg"]
    assert status == 422
    assert all(part in text for part in ("camera 'side' is unknown", "front are missing", "state is missing", "prompt"))


NAN = np.array([0, 0, 0, 0, 0, np.nan], np.float32)


UNUSABLE = [
    ({"state": NAN}, 422),
    ({"state": np.zeros(5)}, 422),
    ({"state": np.zeros((6, 6))}, 422),
    ({"state": b"\0\0\0\0\0\0"}, 422),
    ({"state": [[1, 2], [3]]}, 422),
    ({"state": [0, 0, 0, 0, 0, "x"]}, 422),
    ({"state": {"Rotation": 0.0}}, 422),
    ({"state": {"Elbow": float("nan")}}, 422),
    ({"images": {"front": np.zeros((48, 64, 3))}}, 422),
    ({"images": {"front": np.zeros((48, 64), np.uint8)}}, 422),
    ({"images": {"front": b"no picture"}}, 422),
    ({"images": {"front": jpeg()[:200]}}, 422),
    ({"images": {"front": jpeg(2000, 2000)}}, 413),
    ({"images": [1]}, 422),
    ({"want": "all"}, 422),
    ({"want": np.zeros(2)}, 422),
    ({"images": {"front": {"dtype": "uint8", "shape": [0, 2**63], "data": b""}}}, 422),
    ({"prompt": "\x1b[31m"}, 422),
    ({"executed": 1.5}, 422),
    ({"number": "7"}, 422),
    ({"reset": 1, "want": "action"}, 422),
]


async def test_what_cannot_be_used_is_refused_without_a_traceback(server):
    for more, status in UNUSABLE:
        found, told = await server.act(server.seen(**more))
        assert found == status, (more, told)
        assert "Traceback" not in str(told)
    assert server.policy.acted == 0


async def test_bodies_are_held_to_forms_and_sizes(server):
    assert (await server.act(b"\xc1"))[0] == 422
    assert (await server.act(b"\x90"))[0] == 422
    assert (await server.act(server.seen(), headers={"content-type": "text/plain"}))[0] == 415
    assert (await server.act(server.seen(), headers={"accept": "text/html"}))[0] == 406
    assert (await server.act(io.BytesIO(bytes(17 << 20))))[0] == 413


async def test_a_stop_ends_what_a_client_does_until_it_says_that_it_begins_anew(server):
    assert (await server.act(server.seen()))[0] == 200
    assert (await server.call("POST", "/sessions/arm/stop"))[0] == 200
    for want in ("chunk", "action"):
        status, told = await server.act(server.seen(want=want))
        assert (status, told["code"]) == (409, "move_refused")
        assert '"reset": true' in told["detail"]
    assert (await server.act(server.seen(reset=True)))[0] == 200
    assert (await server.act(server.seen(executed=1)))[0] == 200


async def test_a_client_that_asked_in_vain_while_the_loop_drove_moves_nothing_when_that_is_stopped(server):
    assert (await server.call("POST", "/sessions/arm/start"))[0] == 200
    assert "its own control loop" in (await server.act(server.seen()))[1]["detail"]
    assert (await server.call("POST", "/sessions/arm/stop"))[0] == 200
    assert (await server.act(server.seen()))[0] == 409


async def test_a_session_that_was_stopped_may_be_asked_by_whoever_comes_after(server):
    assert (await server.call("POST", "/sessions/arm/stop"))[0] == 200
    assert (await server.act(server.seen()))[0] == 200


async def test_a_latch_holds_against_clients_that_begin_anew_and_nothing_moves_by_a_reset(server):
    assert (await server.act(server.seen()))[0] == 200
    assert (await server.call("POST", "/sessions/arm/emergency_stop"))[0] == 200
    status, told = await server.act(server.seen(reset=True))
    assert status == 409
    assert "/debug/sessions/arm/reset" in told["detail"]
    assert (await server.call("POST", "/debug/sessions/arm/reset"))[0] == 200
    assert (await server.act(server.seen()))[0] == 409
    assert (await server.act(server.seen(reset=True)))[0] == 200


async def test_a_stop_while_the_policy_thinks_keeps_its_answer_back(server):
    gate = threading.Event()
    server.policy.failures.append(gate)
    asked = asyncio.create_task(server.act(server.seen()))
    while not server.policy.acted:  # noqa: ASYNC110, it acts in a thread
        await asyncio.sleep(0.005)
    await server.call("POST", "/sessions/arm/emergency_stop")
    gate.set()
    assert (await asked)[0] == 409


async def test_nobody_acts_while_the_sessions_own_loop_drives_or_in_a_dry_run_or_where_rooms_are(server):
    await server.call("POST", "/sessions/arm/start")
    assert "its own control loop drives" in (await server.act(server.seen()))[1]["detail"]
    await server.create("dry", dry_run=True)
    assert "dry run" in (await server.act(server.seen(), "dry"))[1]["detail"]
    await server.create("rooms", transport_server_url="http://rooms.example")
    assert "has rooms" in (await server.act(server.seen(), "rooms"))[1]["detail"]


async def test_a_direct_session_outlives_its_server(serve, tmp_path):
    async with serve(state=str(tmp_path)) as server:
        await server.create(workspace_id="lab")
    async with serve(state=str(tmp_path)) as server:
        status = (await server.call("GET", "/sessions/arm"))[1]
        assert (status["status"], status["rooms"]["camera_room_ids"]) == ("interrupted", {})
        assert (await server.act(server.seen()))[0] == 409
        assert (await server.call("POST", "/sessions/arm/restart"))[0] == 200
        assert (await server.act(server.seen()))[0] == 200


LEARNED = replace(
    ScriptedPolicy().requirements,
    chunk=4,
    action_steps=4,
    state_statistics={"min": (-33.0, -46.0, -76.0, 59.0, -26.0, 17.0), "max": (37.0, 37.0, 47.0, 100.0, 23.0, 63.0)},
)
TICKS = np.full(6, 2048, np.float32)


async def test_no_client_gets_actions_for_a_state_in_another_unit(serve):
    words = "joint 'Rotation' is at 2048, the checkpoint's statistics are min -33, max 37"
    async with serve(policy=ScriptedPolicy(LEARNED)) as server:
        await server.create()
        for want in ("chunk", "action"):
            status, answer = await server.act(server.seen(state=TICKS, want=want))
            assert status == 422
            assert (answer["detail"][0]["loc"], words in answer["detail"][0]["msg"]) == (["body", "state"], True)
        named = dict.fromkeys(("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw"), 2048.0)
        body = {"images": {"front": base64.b64encode(jpeg()).decode()}, "state": named}
        assert (await server.call("POST", "/sessions/arm/act", json=body))[0] == 422
        # A plan from before is not given out, either.
        assert (await server.act(server.seen(want="action")))[0] == 200
        assert (await server.act(server.seen(state=TICKS, want="action")))[0] == 422
        assert server.policy.acted == 1
        async with server.stream() as socket:
            await socket.send(codec.pack({"kind": "act"} | server.seen(state=TICKS)))
            answers = [codec.unpack(await socket.recv()) for _ in range(3)]
            [error] = [answer for answer in answers if answer["kind"] == "error"]
            assert (error["code"], words in error["detail"]) == ("joints_units", True)
        async with server.stream("/sessions/arm/openpi") as socket:
            await socket.recv()
            await socket.send(codec.pack_openpi({"image": server.seen()["images"]["front"], "state": TICKS}))
            assert str(await socket.recv()).startswith("joints_units: the state is far outside")


async def test_a_client_whose_units_are_accepted_gets_actions(serve):
    # Joints without a range, in which the guard would refuse ticks.
    names = tuple(f"joint_{number}" for number in range(6))
    async with serve(policy=ScriptedPolicy(replace(LEARNED, joint_names=names))) as server:
        await server.create(accept_units=True)
        assert (await server.act(server.seen(state=TICKS)))[0] == 200
        status, answer = await server.call("PATCH", "/sessions/arm", json={"accept_units": False})
        assert (status, answer["accept_units"]) == (200, False)
        assert (await server.act(server.seen(state=TICKS)))[0] == 422
        await server.call("PATCH", "/sessions/arm", json={"accept_units": True})
        assert (await server.act(server.seen(state=TICKS)))[0] == 200


async def test_a_state_that_may_be_in_radians_is_answered_with_a_warning(serve):
    async with serve(policy=ScriptedPolicy(LEARNED)) as server:
        await server.create()
        status, answer = await server.act(server.seen(state=np.zeros(6, np.float32)))
        assert status == 200
        [warning] = answer["warnings"]
        assert "as in radians: joint 'Wrist_Pitch' is at 0, the checkpoint's statistics are min 59, max 100" in warning
        status, answer = await server.act(server.seen(state=np.array([0, -40, 40, 80, 0, 20], np.float32)))
        assert (status, answer.get("warnings")) == (200, None)
        stats = (await server.call("GET", "/sessions/arm"))[1]["stats"]
        assert stats["watch"]["units"] == "checked"


async def test_every_moment_of_a_window_is_compared_with_the_statistics(serve):
    async with serve(policy=ScriptedPolicy(replace(LEARNED, observation_steps=2))) as server:
        await server.create()
        pictures = np.full((2, 48, 64, 3), 7, np.uint8)
        states = np.stack([TICKS, np.array(server.pose, np.float32)])
        assert (await server.act(server.seen(images={"front": pictures}, state=states)))[0] == 422
