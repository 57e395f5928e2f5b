"""Windows of several observations from clients without rooms."""

import asyncio
import io
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from service.control.observation_buffer import Snapshot
from service.recording.mcap_files import McapSource
from service.recording.replay import replay_recording
from service.streaming import codec, observation
from service.streaming.observation_window import ObservationWindow
from service.threads import WorkerThread
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy

NEEDS = replace(SO100_REQUIREMENTS, chunk=8, action_steps=4, rate=10.0, observation_steps=3)


class RecordingPolicy(ScriptedPolicy):
    """Policy that records the brightness and the first joint of each observation."""

    def __init__(self) -> None:
        super().__init__(NEEDS)
        self.shown: list[list[tuple[int, int]]] = []

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        pictures, joints = observation["observation.images.front"], observation["observation.state"]
        assert (pictures.shape, joints.shape) == ((1, 3, 48, 64, 3), (1, 3, 6))
        self.shown.append(
            list(zip(pictures[0, :, 0, 0, 0].tolist(), joints[0, :, 0].astype(int).tolist(), strict=True))
        )
        return super().act(observation)


def pairs(*moments: int) -> list[tuple[int, int]]:
    return [(moment, moment) for moment in moments]


def observe(moment: int, **more: object) -> dict[str, object]:
    image, joints = np.full((48, 64, 3), moment, np.uint8), np.array([moment, 0, 0, 0, 0, 0], np.float32)
    return {"images": {"front": image}, "state": joints} | more


def window(*moments: int, **more: object) -> dict[str, object]:
    return {
        "images": {"front": np.stack([np.full((48, 64, 3), moment, np.uint8) for moment in moments])},
        "state": np.array([[moment, 0, 0, 0, 0, 0] for moment in moments], np.float32),
    } | more


@pytest.fixture
async def server(serve):
    async with serve(policy=RecordingPolicy()) as server:
        yield server


async def test_pictures_of_all_moments_are_decoded_in_parallel(server, monkeypatch) -> None:
    """A decoder waits until two others decode, too."""
    barrier, decode = threading.Barrier(3), observation.decode_image
    monkeypatch.setattr(observation, "DECODERS", WorkerThread("pictures", 3))
    monkeypatch.setattr(observation, "decode_image", lambda *arguments: barrier.wait(10) >= 0 and decode(*arguments))
    files = []
    for moment in (1, 2, 3):
        files.append(io.BytesIO())
        Image.fromarray(np.full((48, 64, 3), moment, np.uint8)).save(files[-1], "PNG")
    await server.acted(window(1, 2, 3, images={"front": [file.getvalue() for file in files]}))
    assert server.policy.shown == [pairs(1, 2, 3)]


@pytest.mark.parametrize("want", ["chunk", "action"])
async def test_single_observations_form_a_window_at_the_policy_rate(server, want) -> None:
    # The client sends 20 observations per second to a policy of 10, so every second observation counts.
    for moment in range(9):
        assert (await server.act(observe(moment, want=want, timestamp=7 + 0.05 * moment)))[0] == 200
    requests = range(9) if want == "chunk" else (0, 4, 8)
    assert server.policy.shown[0] == pairs(0, 0, 0), "the first observation fills the window"
    for at, shown in zip(requests, server.policy.shown, strict=True):
        assert at < 4 or shown == pairs(at - 4, at - 2, at)


async def test_a_reset_a_new_instruction_or_a_new_client_begins_a_window(server) -> None:
    async def act(moment: int, at: float, **more: object) -> list[tuple[int, int]]:
        assert (await server.act(observe(moment, timestamp=at, **more)))[0] == 200
        return server.policy.shown[-1]

    assert await act(1, 0.0) == pairs(1, 1, 1)
    assert await act(2, 0.1) == pairs(1, 1, 2)
    async with server.client() as client:
        await client.send("act", **observe(9, timestamp=0.1))
        await client.receive("chunk")
        assert server.policy.shown[-1] == pairs(9, 9, 9), "clients have separate windows"
    assert await act(3, 0.2) == pairs(1, 2, 3)
    assert await act(4, 0.3, prompt="fold the towel") == pairs(4, 4, 4)
    assert await act(5, 0.4) == pairs(4, 4, 5)
    assert await act(6, 0.5, reset=True) == pairs(6, 6, 6)
    status, answer = await server.act(observe(7, timestamp=0.4))
    assert status == 422
    assert "timestamp must not decrease: got 0.4 after 0.5" in answer["detail"][0]["msg"]
    assert await act(8, 9.0) == pairs(8, 8, 8), "old observations do not count"


async def test_a_client_may_send_the_whole_window(server) -> None:
    assert (await server.act(window(1, 2, 3, timestamp=0.2)))[0] == 200
    assert (await server.act(observe(4, timestamp=0.3)))[0] == 200
    assert server.policy.shown == [pairs(1, 2, 3), pairs(2, 3, 4)]
    async with server.stream("/sessions/arm/openpi") as socket:
        await socket.recv()
        pictures, joints = window(5, 6, 7)["images"]["front"], window(5, 6, 7)["state"]
        await socket.send(codec.pack({"observation/image": pictures, "observation/state": joints}))
        assert codec.unpack(await socket.recv())["actions"].shape == (8, 6)
    assert server.policy.shown[-1] == pairs(5, 6, 7)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (window(1, 2), "camera 'front' has 2; state has 2; wanted 3 moments of every camera and of state"),
        (window(1, 2, 3) | {"state": observe(3)["state"]}, "state has 1; wanted 3 moments"),
        (observe(3) | {"state": window(1, 2, 3)["state"]}, "camera 'front' has 1; wanted 3 moments"),
        (window(1, 2, 3) | {"state": np.zeros((3, 5), np.float32)}, "moment 1 of 3: state: float32 [5]; wanted 6"),
        (window(1, 2, 3) | {"images": {}}, "no picture of camera 'front'"),
        (
            window(1, 2, 3) | {"images": {"front": [np.zeros((48, 64 + at, 3), np.uint8) for at in range(3)]}},
            "camera 'front' has [48, 64] before; wanted pictures of one size",
        ),
        (observe(1, timestamp="now"), "timestamp: wanted seconds"),
    ],
)
async def test_a_window_of_another_shape_is_refused(server, message, text) -> None:
    status, answer = await server.act(message)
    assert status == 422
    assert text in answer["detail"][0]["msg"]
    assert server.policy.acted == 0


async def test_observations_without_an_act_are_part_of_the_window(server) -> None:
    gate = threading.Event()
    server.policy.failures.append(gate)
    async with server.client() as client:
        # The inference of act 3 lasts until the gate opens. Act 5 supersedes act 4.
        for moment, kind in enumerate(("observation", "observation", "act", "act", "act"), 1):
            await client.send(kind, **observe(moment, timestamp=0.1 * moment, number=moment))
        assert (await client.receive("error"))["code"] == "superseded"
        gate.set()
        for _ in range(2):
            await client.receive("chunk")
    assert server.policy.shown == [pairs(1, 2, 3), pairs(3, 4, 5)]


def test_arrival_times_replace_timestamps_and_memory_is_bounded() -> None:
    history = ObservationWindow()

    def add(moment: int, at: float) -> list[int]:
        frames, joints = {"front": np.zeros((2, 2, 3), np.uint8)}, np.full(6, moment, np.float32)
        past = history.add(Snapshot(frames, joints, at, {"front": (2, 2)}), None, 3, 0.1).past
        return [int(joints[0]) for _, joints in past]

    for moment in range(1000):
        add(moment, 5 + moment / 1000)
    assert len(history._history._moments) <= 8 * 3 + 1
    assert add(1000, 6.0) == pytest.approx([800, 900], abs=13)


async def test_a_recording_of_a_direct_session_has_its_observations(serve, tmp_path) -> None:
    """A replay of the recording gives the policy the same windows as the live session."""
    policy, folder = RecordingPolicy(), tmp_path / "recordings"
    settings = {"recordings": str(folder), "recording_free": 0, "recording_datasets": False}
    async with serve(policy=policy, **settings, create=False) as server:
        await server.create(record=True, action_steps=1)
        async with server.client(max_queue=None) as client:  # It reads no actions; a full queue delays its end.
            await server.call("POST", "/sessions/arm/start")
            for moment in range(1, 91):  # The policy reads ten observations per second.
                await client.send("observation", **observe(moment))
                await asyncio.sleep(0.025)
            await server.call("POST", "/sessions/arm/stop")
        await server.call("DELETE", "/sessions/arm")
        async with asyncio.timeout(60):
            while (await server.call("GET", "/recordings"))[1][0]["state"] != "off":  # noqa: ASYNC110, another thread
                await asyncio.sleep(0.05)
    live = [[joint for _, joint in window] for window in policy.shown if len({joint for _, joint in window}) == 3]
    policy.shown.clear()
    (recording,) = folder.glob("*.mcap")
    replay_recording(McapSource(recording), policy, every=1)
    replayed = [[joint for _, joint in window] for window in policy.shown]
    same = [window for window in live if window in replayed]
    assert len(live) >= 5
    assert len(same) >= 0.6 * len(live), "a busy machine may miss some ticks"
