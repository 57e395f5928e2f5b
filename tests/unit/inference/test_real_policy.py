"""Session with a compiled policy instead of a scripted policy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jaxmodels
from jaxmodels.normalization import build_normalization
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.policies.config import SMALL_CNN
from jaxmodels.policies.diffusion2d.policy import Diffusion2d, Diffusion2dConfig
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.types import ACTION, PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, STATE, Feature
from jaxmodels.weights import blueprint_of, flatten
from service.inference.engine import Engine
from service.sessions.store import NewSession, Sessions
from service.stage import Stage
from tests.testing import waiting
from tests.testing.doubles import MemoryLink, MemoryTransport

pytestmark = pytest.mark.usefixtures("compilation")
until = partial(waiting.until, within=60.0)

FRAME = np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype(np.uint8)
POSE = {"Rotation": 10.0, "Pitch": 20.0, "Elbow": 30.0, "Wrist_Pitch": 40.0, "Wrist_Roll": 50.0, "Jaw": 30.0}
NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small untrained ACT at 50 Hz."""
    config = ActConfig(
        input_features=(Feature(STATE, "STATE", (6,)), Feature("observation.images.front", "VISUAL", (3, 32, 32))),
        output_features=(Feature(ACTION, "ACTION", (6,)),),
        chunk_size=20,
        n_action_steps=5,
        vision_backbone=SMALL_CNN,
        pretrained_backbone_weights=None,
        dim_model=32,
        n_heads=2,
        dim_feedforward=32,
        n_encoder_layers=1,
        n_decoder_layers=1,
        use_vae=False,
    )
    joints = {"mean": np.full(6, 30, np.float32), "std": np.full(6, 10, np.float32)}
    pixels = {"mean": np.full((3, 1, 1), 0.5, np.float32), "std": np.full((3, 1, 1), 0.2, np.float32)}
    normalization = build_normalization(
        config.input_features,
        config.output_features,
        config.normalization_mapping,
        {STATE: joints, ACTION: joints, "observation.images.front": pixels},
    )
    weights = {name: np.asarray(array) for name, array in flatten(Act(config, rngs=nnx.Rngs(0))).items()}
    folder = tmp_path_factory.mktemp("policies") / "small"
    lerobot_folder.write_checkpoint(
        folder, Checkpoint(config, weights, normalization, Sidecar(rate=50.0, joint_names=NAMES))
    )
    return folder


def write_diffusion(
    path: Path, *, spread: float, scale: float, rate: float, features: tuple[Feature, ...] = (), **fields: Any
) -> Path:
    """Write an untrained small diffusion policy whose actions are within ``spread`` of `POSE`."""
    config = Diffusion2dConfig(
        input_features=(Feature(STATE, "STATE", (6,)), *features),
        output_features=(Feature(ACTION, "ACTION", (6,)),),
        n_action_steps=5,
        dim_model=16,
        n_heads=2,
        n_layers=1,
        **fields,
    )
    draw, pose = np.random.default_rng(0), np.fromiter(POSE.values(), np.float32)
    shapes = blueprint_of(Diffusion2d, config).shapes
    weights = {name: (scale * draw.normal(size=shape.shape)).astype(np.float32) for name, shape in shapes.items()}
    ends = {"min": pose - np.float32(spread), "max": pose + np.float32(spread)}
    normalization = build_normalization(
        config.input_features, config.output_features, config.normalization_mapping, {STATE: ends, ACTION: ends}
    )
    sidecar = Sidecar(rate=rate, joint_names=NAMES)
    lerobot_folder.write_checkpoint(path, Checkpoint(config, weights, normalization, sidecar))
    return path


@pytest.fixture
def sampled_folder(tmp_path: Path) -> Path:
    """Write a policy that samples its chunks and continues plans."""
    return write_diffusion(
        tmp_path / "sampled",
        spread=0.1,
        scale=0.15,
        rate=50.0,
        features=(Feature("observation.images.front", "VISUAL", (3, 32, 32)),),
        normalization_mapping=(("VISUAL", "IDENTITY"), ("STATE", "MIN_MAX"), ("ACTION", "MIN_MAX")),
        chunk_size=20,
        num_inference_steps=4,
    )


def load(path: str, revision: str | None = None, /, **more: object) -> jaxmodels.Policy:
    return jaxmodels.load_policy(path, revision)


@asynccontextmanager
async def sessions_of(load: Any) -> AsyncIterator[tuple[Sessions, MemoryTransport]]:
    transport = MemoryTransport()
    sessions = Sessions(transport=transport, load=load, engine=Engine())
    try:
        yield sessions, transport
    finally:
        await sessions.close()


async def show(link: MemoryLink) -> None:
    """Send the frames and joints of a robot until cancelled."""
    while True:
        link.deliver_frame("front", FRAME)
        link.deliver_joints(POSE)
        await asyncio.sleep(0.02)


async def test_a_compiled_policy_drives_the_robot_with_its_actions(policy_folder: Path) -> None:
    async with sessions_of(load) as (sessions, transport):
        session = await sessions.create(NewSession("s", str(policy_folder), "memory://", overlap="replace"))
        link = transport.link
        robot_task = asyncio.create_task(show(link))
        await sessions.start("s")
        await until(lambda: len(link.sent) > 30)
        status = session.status()
        assert status.stats["rate"] == 50
        assert str(status.inference_stats["device"]).startswith(jaxmodels.load_policy(policy_folder).device[:3])
        state = np.array([list(POSE.values())], np.float32)
        observation = {"observation.images.front": FRAME[None], "observation.state": state}
        expected = jaxmodels.load_policy(policy_folder).act(observation)[0]
        low, high = np.array([-100] * 5 + [0]), np.full(6, 100)
        allowed = np.clip(expected, low, high)
        for sent in link.sent:
            command = np.array([joint.value for joint in sent.joints])
            assert np.abs(allowed - command).max(axis=1).min() < 1e-3
        robot_task.cancel()


async def test_a_sampling_policy_continues_the_plan_of_a_session(sampled_folder: Path) -> None:
    answered: list[tuple[dict[str, np.ndarray], np.ndarray]] = []

    def load_and_listen(path: str, revision: str | None = None, /, **options: Any) -> jaxmodels.Policy:
        policy = jaxmodels.load_policy(path, revision, on_progress=options.get("on_progress"))
        act = policy.act

        def listen(observation: dict[str, np.ndarray]) -> np.ndarray:
            answered.append((dict(observation), act(observation)))
            return answered[-1][1]

        policy.act = listen  # type: ignore[method-assign]
        return policy

    new = NewSession("s", str(sampled_folder), "memory://", policy_type="diffusion2d", overlap="rtc")
    async with sessions_of(load_and_listen) as (sessions, transport):
        session = await sessions.create(new)
        link = transport.link
        robot_task = asyncio.create_task(show(link))
        await sessions.start("s")
        await until(
            lambda: (
                sum(
                    int(observation[PREFIX_LENGTH][0]) > 0
                    for observation, _ in answered
                    if PREFIX_LENGTH in observation
                )
                > 2
            )
        )
        assert session.stage is Stage.RUNNING
        assert session.status().stats["overlap"] == "rtc"
        robot_task.cancel()
    for observation, chunk in answered:
        if PREFIX_LENGTH in observation:
            executed = int(observation[PREFIX_DELAY][0])
            np.testing.assert_allclose(chunk[0, :executed], observation[PREFIX_ACTIONS][0, :executed], atol=1e-4)
