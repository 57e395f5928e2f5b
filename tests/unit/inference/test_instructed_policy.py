"""Session with a compiled language policy that is loaded from a folder."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxmodels
from jaxmodels.text import TextConfig
from robojax.cli.check import make_observation
from service.errors import InvalidRequest
from service.inference.batching import StackingBuffers, read_layout
from service.inference.loaded_policy import task_input
from service.sessions.store import NewSession
from tests.unit.inference.test_real_policy import POSE, sessions_of, write_diffusion

# The tests compile programs, which takes a slow machine a minute per program.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("compilation")]

NEW = NewSession("s", "policy", "memory://", camera_names=(), policy_type="diffusion2d")
RED, BLUE = "pick up the red cube", "pick up the blue cube"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a policy whose actions depend on the instruction."""
    return write_diffusion(
        tmp_path_factory.mktemp("policies") / "instructed",
        spread=5.0,
        scale=0.3,
        rate=20.0,
        chunk_size=10,
        n_encoder_layers=0,
        num_inference_steps=1,
        text_encoder=TextConfig(length=32, width=16, n_layers=1, n_heads=2, hidden=16),
    )


async def test_a_real_policy_follows_its_instruction(folder: Path) -> None:
    async with sessions_of(lambda *path, **more: jaxmodels.load_policy(folder)) as (sessions, transport):
        session = await sessions.create(replace(NEW, language_instruction=RED, max_relative_target=1.0))
        robot_io = session.robot_io
        transport.link.deliver_joints(POSE)
        await sessions.start("s")

        async def newest(after: int) -> np.ndarray:
            async with asyncio.timeout(100):
                while robot_io.controller.chunks <= after:  # noqa: ASYNC110 - the controller has no event for it
                    await asyncio.sleep(0.01)
            return robot_io.runner.recent[-1][1]

        red = await newest(0)
        with pytest.raises(InvalidRequest, match="45 bytes; this policy reads 31"):
            await sessions.adjust("s", {"language_instruction": "and now put it back to where you found it, ok"})
        await sessions.adjust("s", {"language_instruction": BLUE})
        blue = await newest(robot_io.controller.chunks + 1)
        assert np.abs(red - blue).max() > 0.01
        assert robot_io.runner.errors == robot_io.controller.rejected == 0
        assert str(session.stage) == "running"


def test_instructions_in_one_batch_get_their_own_answers(folder: Path) -> None:
    policy = jaxmodels.load_policy(folder)
    tasks = [RED, BLUE, "put it down", "wave", RED]
    inputs = [make_observation(policy.requirements) | task_input(task) for task in tasks]
    shapes = {read_layout(observation).shapes for observation in inputs}
    [shape] = shapes  # Only inputs of one layout share a batch.
    together = policy.act(StackingBuffers().stack(shape, inputs, 8))
    single = [policy.act(observation)[0] for observation in inputs]
    np.testing.assert_allclose(together[: len(tasks)], single, atol=1e-4)
    assert np.abs(single[0] - single[1]).max() > 0.01
