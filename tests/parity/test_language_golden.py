"""SmolVLA, pi0 and pi0.5 compared with outputs of LeRobot 0.6.1 (tests/golden/lerobot_*/README.md)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels.policies import get_policy_type, lerobot_folder
from jaxmodels.text import PromptTokenizer
from jaxmodels.types import Language, Observation
from jaxmodels.weights import blueprint_of
from tests.testing.models import relative_error

GOLDEN = Path(__file__).parents[1] / "golden"
# Share of the largest magnitude. SmolVLA: changing each weight by a factor of 1 + 1e-6 changes the output by up to
# 5e-6. pi0 and pi0.5: the same weights in other torch kernels differ by 1e-5.
TOLERANCES = {"smolvla": 1e-5, "pi0": 1e-4, "pi05": 1e-4}
NAMES = {
    path.name: tolerance
    for kind, tolerance in TOLERANCES.items()
    for path in sorted((GOLDEN / f"lerobot_{kind}").iterdir())
    if path.is_dir()
}
pytestmark = pytest.mark.fully_compiled


def read_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"lerobot_{name.partition('_')[0]}" / name / "io.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_equal_lerobot(name: str, golden_folder, request: pytest.FixtureRequest) -> None:
    if name != "smolvla_empty_camera":  # This policy is compiled like users do.
        request.getfixturevalue("quick_compilation")
    io = read_arrays(name)
    observation: dict[str, Any] = {key.removeprefix("in.0."): io[key] for key in io if key.startswith("in.0.obs")}
    policy = jaxmodels.load_policy(golden_folder(name))
    chunk = policy.act({**observation, "task": io["in.0.task"].tolist()}, noise=io["in.0.noise"])
    assert relative_error(chunk, io["out.0.chunk"]) < NAMES[name]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_the_first_velocity_equal_lerobot(name: str, golden_folder) -> None:
    io, checkpoint = read_arrays(name), lerobot_folder.read_checkpoint(golden_folder(name))
    config: Any = checkpoint.config
    kind, states = get_policy_type(config.type), io["mid.0.state_normalized"]
    tokens, mask = io["mid.0.tokens"].astype(np.int32), io["mid.0.token_mask"]
    assert checkpoint.tokenizer is not None
    tokenizer = PromptTokenizer(checkpoint.tokenizer, config.prompt_length, config.vocabulary)
    for task, state, row, is_token in zip(io["in.0.task"].tolist(), states, tokens, mask, strict=True):
        ids, used, _ = tokenizer(config.format_prompt(task, state))
        np.testing.assert_array_equal(ids[used], row[is_token])
    frames = [io.get(f"in.0.{camera.name}") for camera in config.cameras]
    observation = Observation(
        images=tuple(None if frame is None else frame.astype(np.float32) / 255 for frame in frames),
        state=states,
        language=Language(tokens, mask),
        noise=io["in.0.noise"],
    )

    def predict(weights: dict[str, jax.Array], observation: Observation) -> Any:
        model: Any = blueprint_of(kind.model, config).assemble(weights)
        images = tuple(pixels if pixels is None else kind.fit(config, pixels) for pixels in observation.images)
        observation = observation._replace(images=images)
        prefix = model.encode(observation, model.embed_images(observation))
        first = config.schedule.euler_rows(config.num_inference_steps).sigma[:1]
        step = {name: term[0] for name, term in model.prepare_steps(first).items()}
        return model.denoise(prefix, model.embed_state(observation.state), observation.noise, step)

    velocity = jax.jit(predict)(jax.tree.map(jnp.asarray, dict(checkpoint.weights)), observation)
    assert relative_error(velocity, io["mid.0.velocity"][0]) < NAMES[name]
