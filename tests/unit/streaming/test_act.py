import asyncio
import base64
import io
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmodels import Requirements
from service.rollout.rollout import _grey_observation
from service.streaming import codec
from tests.testing import rig
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy


def jpeg(height: int = 48, width: int = 64, form: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 200, np.uint8)).save(file, form)
    return file.getvalue()


async def test_a_direct_session_has_no_rooms(serve):
    async with serve(create=False) as server:
        answer = await server.create()
        assert answer["camera_room_ids"] == {}
        assert answer["joint_input_room_id"] == answer["joint_output_room_id"] == ""
        assert (await server.call("GET", "/sessions/arm"))[1]["stats"]["protocol"] is None
        assert (await server.call("DELETE", "/sessions/arm"))[0] == 200
        assert (await server.act(server.observe()))[0] == 404


async def test_an_act_answers_an_observation_with_a_chunk(server):
    answer = await server.acted(server.observe(number=7))
    assert (answer["number"], answer["action_steps"], answer["clamped"]) == (7, 20, [])
    assert answer["actions"].shape == (20, 6)
    np.testing.assert_allclose(answer["actions"][0], np.add(server.pose, 0.1), atol=1e-5)
    assert set(answer["timings_ms"]) == {"decode", "queue", "to_device", "compute", "to_host", "total"}
    stats = (await server.call("GET", "/sessions/arm"))[1]["stats"]
    assert stats["protocol"] == "http"
    assert stats["inference_count"] == 0 or stats["images_received"] == {"front": 1}


async def test_json_has_base64_images_and_joints_by_any_name(server):
    names = ("shoulder_pan", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "gripper")
    state = dict(zip(names, server.pose, strict=True))
    for form in ("JPEG", "PNG"):
        body = {"images": {"front": base64.b64encode(jpeg(form=form)).decode()}, "state": state}
        status, answer = await server.call("POST", "/sessions/arm/act", json=body)
        assert status == 200, answer
        assert np.allclose(answer["actions"][0], np.add(server.pose, 0.1), atol=1e-4)
        observation = server.observe(images={"front": jpeg(form=form)})
        status, answer = await server.act(observation, headers={"accept": "application/json"})
        assert (status, len(answer["actions"])) == (200, 20)


LEROBOT = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


async def test_a_state_may_use_any_names_of_the_joints(server):
    named = dict(zip(LEROBOT, server.pose, strict=True))
    for state in (
        named,
        {f"{name}.pos": value for name, value in named.items()},
        {f"main_{name}": value for name, value in named.items()},
        named | {f"{name}.pos": value for name, value in named.items()},
    ):
        answer = await server.acted(server.observe(state=state, reset=True))
        np.testing.assert_allclose(answer["actions"][0], np.add(server.pose, 0.1), atol=1e-5)


MORE = {f"{name}.vel": 0.5 for name in LEROBOT} | {"timestamp": 1e9, "gripper.eff": float("nan"), "note": "x"}
INVALID_STATES = [
    ({"timestamp": 1.0}, [], "state has unknown names: 'timestamp'; send"),
    ({"shoulder_pan.vel": 1.0}, ["elbow_flex"], "state has unknown names: 'shoulder_pan.vel'; send"),
    ({}, ["elbow_flex", "gripper"], "state lacks Elbow, Jaw;"),
    ({"timestamp": 1.0}, ["gripper"], "state lacks Jaw;"),
    ({"gripper.pos": 51.0}, [], "'gripper' is 50.0, 'gripper.pos' is 51.0 (contradicting)"),
    ({"gripper.pos": 51.0, "Jaw": 50.0}, [], "'Jaw' is 50.0 (contradicting)"),
    ({"gripper": float("inf")}, [], "'gripper' is inf (not_finite)"),
    ({"gripper": "open"}, [], "'gripper' is 'open' (not_a_number)"),
    (MORE, [], "and 1 more; send"),
]


async def test_an_error_about_a_state_names_only_the_invalid_joints(server):
    named = dict(zip(LEROBOT, server.pose, strict=True))
    for more, left_out, message in INVALID_STATES:
        state = {name: value for name, value in (named | more).items() if name not in left_out}
        status, answer = await server.act(server.observe(state=state))
        text = answer["detail"][0]["msg"].partition("wanted cameras")[0]
        assert status == 422
        assert message in text
        assert "shoulder_lift" not in text.replace("shoulder_lift.vel", ""), "a valid name is not in the error"


async def test_extra_names_are_ignored_on_request_of_the_client(server):
    state = dict(zip(LEROBOT, server.pose, strict=True)) | MORE
    answer = await server.acted(server.observe(state=state, extra="ignore"))
    np.testing.assert_allclose(answer["actions"][0], np.add(server.pose, 0.1), atol=1e-5)
    del state["gripper"]
    assert "state lacks Jaw" in str(await server.act(server.observe(state=state, extra="ignore")))
    for bad in ("drop", True, np.zeros(2)):
        assert "extra: got" in str(await server.act(server.observe(extra=bad)))


async def test_an_unknown_field_is_refused_with_the_nearest_name(server):
    for field, near in (("exectued", "executed"), ("resett", "reset"), ("image", "images"), ("promt", "prompt")):
        status, answer = await server.act(server.observe(**{field: 1}))
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", field])
        assert f"did you mean {near!r}?" in answer["detail"][0]["msg"]
    assert server.policy.acted == 0


def wide(action: int, **more: Any) -> Requirements:
    """Return the requirements of a policy whose state has eight values, as in LIBERO."""
    return Requirements("act", {"front": (48, 64)}, 8, None, action, 5, 5, **more)


@pytest.mark.parametrize("action", [6, 7])
async def test_a_policy_with_a_wider_state_is_served_without_rooms(serve, action):
    state = np.arange(8, dtype=np.float32)
    async with serve(policy=ScriptedPolicy(wide(action))) as server:
        status, answer = await server.act(server.observe(state=state))
        assert (status, answer["actions"].shape, answer["clamped"]) == (200, (5, action), [])
        np.testing.assert_allclose(answer["actions"][0], state[:action] + 0.1, atol=1e-5)
        assert answer["joint_names"] == [f"action_{number + 1}" for number in range(action)]
        named = {f"state_{number + 1}": float(value) for number, value in enumerate(state)}
        status, answer = await server.act(server.observe(state=named, want="action", reset=True))
        np.testing.assert_allclose(answer["action"], state[:action] + 0.1, atol=1e-5)
        assert "wanted 8 numbers" in str(await server.act(server.observe(state=state[:action])))
        async with server.client() as client:
            assert (await client.receive("welcome"))["joint_names"] == [f"action_{n + 1}" for n in range(action)]
            await client.send("act", **server.observe(state=state))
            assert (await client.receive("chunk"))["actions"].shape == (5, action)
        # A trial of a pushed policy uses the width of the state.
        robot_io = server.app.ctx.sessions.get("arm").robot_io
        assert _grey_observation(robot_io, robot_io.runner.loaded)["observation.state"].shape == (1, 8)
        # The control loop of the server could not limit the motion.
        status, answer = await server.call("POST", "/sessions/arm/start")
        assert (status, answer["code"]) == (409, "move_refused")
        assert f"actions ({action} values)" in answer["detail"]
        assert "state (8 values)" in answer["detail"]
        assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "ready"


async def test_a_policy_with_a_wider_state_has_no_rooms_and_no_step_limit(serve):
    async with serve(policy=ScriptedPolicy(wide(7, joint_names=tuple("abcdefg"))), create=False) as server:
        status, answer = await rig.Server.create(server, "rooms")
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", "policy_path"])
        assert "its state has 8 values and its actions 7" in answer["detail"][0]["msg"]
        assert '"transport_server_url": "direct"' in answer["detail"][0]["msg"]
        status, answer = await rig.Server.create(server, transport_server_url="direct", max_relative_target=1.0)
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", "max_relative_target"])
        await server.create("named")
        status, answer = await server.act(server.observe(state=np.zeros(8, np.float32)), "named")
        assert answer["joint_names"] == [*"abcdefg"]


async def test_single_actions_are_taken_from_one_chunk_until_its_end(serve):
    needs = replace(SO100_REQUIREMENTS, chunk=4, action_steps=2)
    async with serve(policy=ScriptedPolicy(needs)) as server:
        left = [(await server.acted(server.observe(want="action")))["left"] for _ in range(4)]
        assert left == [1, 0, 1, 0]
        assert server.policy.acted == 2
        answer = (await server.act(server.observe(want="action", reset=True)))[1]
        assert (answer["left"], server.policy.acted) == (1, 3)


async def test_single_actions_after_a_failure_begin_at_the_pose(serve):
    needs = replace(SO100_REQUIREMENTS, chunk=2, action_steps=2)
    async with serve(policy=ScriptedPolicy(needs, step=5.0), max_relative_target=1.0) as server:
        for _ in range(2):
            assert (await server.act(server.observe(want="action")))[0] == 200
        server.policy.failures.append(ValueError("broken"))
        assert (await server.act(server.observe(want="action")))[0] == 500
        answer = (await server.act(server.observe(want="action")))[1]
        np.testing.assert_allclose(answer["action"], np.add(server.pose, 1.0), atol=1e-4)


async def test_an_action_from_before_a_pause_is_never_returned(server):
    assert (await server.act(server.observe(want="action")))[0] == 200
    ((_, client),) = server.app.ctx.stream_clients._inferences.items()
    moved = np.add(server.pose, -7.0).astype(np.float32)

    async def next_action() -> np.ndarray:
        return (await server.act(server.observe(want="action", state=moved)))[1]["action"]

    client._action_at -= 2.1
    np.testing.assert_allclose(await next_action(), moved + 0.1, atol=1e-4)
    np.testing.assert_allclose(await next_action(), moved + 0.2, atol=1e-4)
    client.session.robot_io.controller.ticks += 1
    np.testing.assert_allclose(await next_action(), moved + 0.1, atol=1e-4)


async def test_executed_may_be_sent_again_after_a_failure(serve):
    async with serve(policy=ScriptedPolicy(step=5.0), max_relative_target=1.0) as server:
        assert (await server.act(server.observe()))[0] == 200
        server.policy.failures.append(ValueError("broken"))
        assert (await server.act(server.observe(executed=4)))[0] == 500
        moved = np.array(server.pose, np.float32) + 1.0
        answer = (await server.act(server.observe(state=moved, executed=5)))[1]
        # The policy returns 6. The chunk continues from the fifth action.
        np.testing.assert_allclose(answer["actions"][:2, 0], [6, 7], atol=1e-4)


async def test_a_chunk_is_limited_from_the_pose_or_executed_actions(serve):
    async with serve(policy=ScriptedPolicy(step=5.0), max_relative_target=1.0) as server:
        answer = (await server.act(server.observe()))[1]
        assert "seam" in answer["clamped"]
        np.testing.assert_allclose(answer["actions"][:3, 0], [1, 2, 3], atol=1e-4)
        moved = np.array(server.pose, np.float32) + 1.0
        answer = (await server.act(server.observe(state=moved, executed=10)))[1]
        # The arm lags behind and the policy returns 6. The motion continues from the tenth action, not from the pose.
        np.testing.assert_allclose(answer["actions"][:2, 0], [9, 10], atol=1e-4)
        assert (await server.act(server.observe(executed=21)))[0] == 422


async def test_a_policy_gets_joints_outside_their_range_as_measured(serve):
    class RecordingPolicy(ScriptedPolicy):
        def act(self, observation):
            states.append(observation["observation.state"][0].tolist())
            return super().act(observation)

    states = []
    pose = [-115.0, 103.0, 0.0, 0.0, 0.0, -3.0]
    named = dict(zip(("Rotation", "shoulder_lift", "Elbow", "Wrist_Pitch", "Wrist_Roll", "gripper"), pose, strict=True))
    async with serve(policy=RecordingPolicy()) as server:
        for state in (pose, named):
            answer = await server.acted(server.observe(state=state))
            assert "warnings" not in answer
            np.testing.assert_allclose(answer["actions"][0], [-100, 100, 0.1, 0.1, 0.1, 0], atol=1e-5)
        async with server.stream("/sessions/arm/openpi") as socket:
            await socket.recv()
            for _ in range(2):
                image = np.zeros((48, 64, 3), np.uint8)
                await socket.send(codec.pack_openpi({"observation/image": image, "state": np.array(pose, np.float32)}))
                await socket.recv()
        assert states == 4 * [pose]
        answer = (await server.act(server.observe(state=[-121.0, *pose[1:]])))[1]
        assert answer["warnings"] == ["joint Rotation is far outside of its range; does the robot use another unit?"]


async def test_an_invalid_chunk_is_never_returned(server):
    for bad in (np.nan, np.inf, 1e30):
        server.policy.failures.append(np.full((1, 20, 6), bad, np.float32))
        status, answer = await server.act(server.observe())
        assert (status, answer["code"]) == (500, "policy_failed")
        assert "actions" not in answer
    assert (await server.act(server.observe()))[0] == 200


async def test_one_error_names_all_faults_of_an_observation(server):
    status, answer = await server.act({"images": {"side": b""}, "prompt": 3})
    assert status == 422
    for part in ("camera 'side' is unknown", "no picture of camera 'front'", "state is missing", "prompt"):
        assert part in answer["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"images": {"front": np.zeros((48, 64, 1), np.uint8)}}, "1 channel, wanted 3: RGB"),
        ({"images": {"front": np.zeros((3, 48, 64), np.uint8)}}, "move the channels to the end"),
        ({"images": {"front": 5}}, "camera 'front' is 5; wanted an array, or a JPEG or PNG file"),
        ({"images": {"front": np.zeros((48, 64, 4), np.uint8)}}, "4 channels, wanted 3: RGB; drop the alpha channel"),
        ({"images": {"front": np.zeros((48, 64), np.uint8)}}, "no axis of channels; a gray picture is np.stack"),
        ({"images": {"front": np.zeros((48, 64), np.uint8)}}, "uint8 [48, 64]; wanted uint8 [height, width, 3]"),
        ({"images": {"front": np.zeros((48, 64, 3), np.float32)}}, "float32 [48, 64, 3]; wanted uint8"),
        ({"images": {"front": np.zeros((1, 16_385, 3), np.uint8)}}, "16385 x 1 has a side of more than 16384 pixels"),
        ({"images": {"front": jpeg(32_768, 1)}}, "1 x 32768 has a side of more than 16384 pixels"),
        ({"state": np.zeros(5, np.float32)}, "float32 [5]; wanted 6 numbers"),
        ({"state": np.zeros((0, 6), np.float32)}, "float32 [0, 6]; wanted 6 numbers"),
    ],
)
async def test_refused_arrays_are_described(server, more, message):
    status, answer = await server.act(server.observe(**more))
    assert status == 422
    assert message in answer["detail"][0]["msg"]
    async with server.client() as client:
        await client.send("act", **server.observe(**more))
        assert message in (await client.receive("error"))["detail"]


NAN = np.array([0, 0, 0, 0, 0, np.nan], np.float32)


UNUSABLE = [
    ({"state": NAN}, 422),
    ({"state": np.zeros((6, 6))}, 422),
    ({"state": b"\0\0\0\0\0\0"}, 422),
    ({"state": [[1, 2], [3]]}, 422),
    ({"state": [0, 0, 0, 0, 0, "x"]}, 422),
    ({"state": {"Rotation": 0.0}}, 422),
    ({"state": {"Elbow": float("nan")}}, 422),
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


async def test_unusable_input_is_refused_without_a_traceback(server):
    for more, status in UNUSABLE:
        found, answer = await server.act(server.observe(**more))
        assert found == status, (more, answer)
        assert "Traceback" not in str(answer)
    assert server.policy.acted == 0


async def test_a_depth_image_is_refused_in_every_form(server):
    file = io.BytesIO()
    Image.fromarray(np.linspace(300, 4000, 48 * 64).reshape(48, 64).astype(np.uint16)).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    answers = [await server.act(server.observe(images={"front": file.getvalue()}))]
    for image in (text, f"data:image/png;base64,{text}"):
        body = {"images": {"front": image}, "state": list(server.pose)}
        answers.append(await server.call("POST", "/sessions/arm/act", json=body))
    for status, answer in answers:
        assert status == 422
        assert "camera 'front': a 16-bit gray picture (a depth picture?)" in str(answer["detail"])
        assert "wanted 8-bit RGB or gray" in str(answer["detail"])
    assert server.policy.acted == 0


async def test_a_rotated_image_is_turned_upright(server):
    upright, file = np.arange(48 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(48, 64, 3), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # This orientation means a rotation by 90 degrees clockwise.
    Image.fromarray(np.rot90(upright)).save(file, "PNG", exif=exif)
    assert (await server.act(server.observe(images={"front": file.getvalue()})))[0] == 200
    inputs, _ = server.app.ctx.sessions.get("arm").robot_io.runner.recent[-1]
    np.testing.assert_array_equal(inputs["observation.images.front"][0], upright)


async def test_bodies_of_other_forms_or_sizes_are_refused(server):
    assert (await server.act(b"\xc1"))[0] == 422
    assert (await server.act(b"\x90"))[0] == 422
    assert (await server.act(server.observe(), headers={"content-type": "text/plain"}))[0] == 415
    assert (await server.act(server.observe(), headers={"accept": "text/html"}))[0] == 406
    assert (await server.act(io.BytesIO(bytes(17 << 20))))[0] == 413


async def test_a_stop_ends_acts_until_the_client_sends_a_reset(server):
    assert (await server.act(server.observe()))[0] == 200
    assert (await server.call("POST", "/sessions/arm/stop"))[0] == 200
    for want in ("chunk", "action"):
        status, answer = await server.act(server.observe(want=want))
        assert (status, answer["code"]) == (409, "move_refused")
        assert '"reset": true' in answer["detail"]
    assert (await server.act(server.observe(reset=True)))[0] == 200
    assert (await server.act(server.observe(executed=1)))[0] == 200


@pytest.mark.parametrize(("is_refused", "status"), [(True, 409), (False, 200)])
async def test_a_client_refused_during_the_loop_needs_a_reset(server, is_refused, status):
    if is_refused:
        assert (await server.call("POST", "/sessions/arm/start"))[0] == 200
        assert "its own control loop" in (await server.act(server.observe()))[1]["detail"]
    assert (await server.call("POST", "/sessions/arm/stop"))[0] == 200
    assert (await server.act(server.observe()))[0] == status


async def test_a_latch_holds_against_a_client_reset(server):
    assert (await server.act(server.observe()))[0] == 200
    assert (await server.call("POST", "/sessions/arm/emergency_stop"))[0] == 200
    status, answer = await server.act(server.observe(reset=True))
    assert status == 409
    assert "/debug/sessions/arm/reset" in answer["detail"]
    assert (await server.call("POST", "/debug/sessions/arm/reset"))[0] == 200
    assert (await server.act(server.observe()))[0] == 409
    assert (await server.act(server.observe(reset=True)))[0] == 200


async def test_a_stop_during_an_inference_withholds_the_answer(server):
    gate = threading.Event()
    server.policy.failures.append(gate)
    request = asyncio.create_task(server.act(server.observe()))
    while not server.policy.acted:  # noqa: ASYNC110, the policy runs in a thread
        await asyncio.sleep(0.005)
    await server.call("POST", "/sessions/arm/emergency_stop")
    gate.set()
    assert (await request)[0] == 409


async def test_acts_need_a_direct_session_without_a_dry_run(server):
    await server.create("dry", dry_run=True)
    assert "dry run" in (await server.act(server.observe(), "dry"))[1]["detail"]
    await server.create("rooms", transport_server_url="http://rooms.example")
    assert "through rooms" in (await server.act(server.observe(), "rooms"))[1]["detail"]


async def test_a_direct_session_outlives_its_server(serve, tmp_path):
    async with serve(state=str(tmp_path), create=False) as server:
        await server.create(workspace_id="lab")
    async with serve(state=str(tmp_path), create=False) as server:
        status = (await server.call("GET", "/sessions/arm"))[1]
        assert (status["status"], status["rooms"]["camera_room_ids"]) == ("interrupted", {})
        assert (await server.act(server.observe()))[0] == 409
        assert (await server.call("POST", "/sessions/arm/restart"))[0] == 200
        assert (await server.act(server.observe()))[0] == 200


LEARNED = replace(
    ScriptedPolicy().requirements,
    chunk=4,
    action_steps=4,
    state_statistics={"min": (-33.0, -46.0, -76.0, 59.0, -26.0, 17.0), "max": (37.0, 37.0, 47.0, 100.0, 23.0, 63.0)},
)
TICKS = np.full(6, 2048, np.float32)


async def test_no_client_gets_actions_for_a_state_in_another_unit(serve):
    message = "joint 'Rotation' is at 2048, the checkpoint's statistics are min -33, max 37"
    async with serve(policy=ScriptedPolicy(LEARNED)) as server:
        for want in ("chunk", "action"):
            status, answer = await server.act(server.observe(state=TICKS, want=want))
            assert status == 422
            assert (answer["detail"][0]["loc"], message in answer["detail"][0]["msg"]) == (["body", "state"], True)
        named = dict.fromkeys(("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw"), 2048.0)
        body = {"images": {"front": base64.b64encode(jpeg()).decode()}, "state": named}
        assert (await server.call("POST", "/sessions/arm/act", json=body))[0] == 422
        # Actions of an earlier plan are not returned either.
        assert (await server.act(server.observe(want="action")))[0] == 200
        assert (await server.act(server.observe(state=TICKS, want="action")))[0] == 422
        assert server.policy.acted == 1
        async with server.client() as client:
            await client.send("act", **server.observe(state=TICKS))
            error = await client.receive("error")
            assert (error["code"], message in error["detail"]) == ("joints_units", True)
        async with server.stream("/sessions/arm/openpi") as socket:
            await socket.recv()
            await socket.send(codec.pack_openpi({"image": server.observe()["images"]["front"], "state": TICKS}))
            assert str(await socket.recv()).startswith("joints_units: the state is far outside")


async def test_a_client_whose_units_are_accepted_gets_actions(serve):
    # Joints without a range, because the guard would refuse servo ticks outside of a range.
    names = tuple(f"joint_{number}" for number in range(6))
    async with serve(policy=ScriptedPolicy(replace(LEARNED, joint_names=names)), create=False) as server:
        await server.create(accept_units=True)
        assert (await server.act(server.observe(state=TICKS)))[0] == 200
        status, answer = await server.call("PATCH", "/sessions/arm", json={"accept_units": False})
        assert (status, answer["accept_units"]) == (200, False)
        assert (await server.act(server.observe(state=TICKS)))[0] == 422
        await server.call("PATCH", "/sessions/arm", json={"accept_units": True})
        assert (await server.act(server.observe(state=TICKS)))[0] == 200


async def test_a_state_that_may_be_in_radians_is_answered_with_a_warning(serve):
    async with serve(policy=ScriptedPolicy(LEARNED)) as server:
        answer = await server.acted(server.observe(state=np.zeros(6, np.float32)))
        [warning] = answer["warnings"]
        assert "as in radians: joint 'Wrist_Pitch' is at 0, the checkpoint's statistics are min 59, max 100" in warning
        status, answer = await server.act(server.observe(state=np.array([0, -40, 40, 80, 0, 20], np.float32)))
        assert (status, answer.get("warnings")) == (200, None)
        stats = (await server.call("GET", "/sessions/arm"))[1]["stats"]
        assert stats["watch"]["units"] == "checked"


async def test_every_observation_of_a_window_is_compared_with_statistics(serve):
    async with serve(policy=ScriptedPolicy(replace(LEARNED, observation_steps=2))) as server:
        images = np.full((2, 48, 64, 3), 7, np.uint8)
        states = np.stack([TICKS, np.array(server.pose, np.float32)])
        assert (await server.act(server.observe(images={"front": images}, state=states)))[0] == 422
