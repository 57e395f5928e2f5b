"""The training loop: batches in, checkpoints, metrics and a finished policy out; resumes where it was killed."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmodels.checkpoints import lerobot, orbax
from jaxmodels.checkpoints.contents import Checkpoint, Sidecar
from jaxmodels.compile_cache import use_compile_cache
from jaxmodels.data.batches import Batches
from jaxmodels.data.episodes import Episodes
from jaxmodels.errors import CheckpointError
from jaxmodels.normalization import from_stats
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.model import Act
from jaxmodels.program import Scales
from jaxmodels.training.config import TrainingConfig
from jaxmodels.training.curve import draw_curve
from jaxmodels.training.step import State, make_step, optimizer
from jaxmodels.weights import flatten

POLICY, CHECKPOINTS, METRICS, SETUP, CURVE = "policy", "checkpoints", "metrics.jsonl", "training.json", "loss.png"
LOG_EVERY = 10  # steps between two lines of metrics


@dataclass(frozen=True)
class Progress:
    """Where a training is.

    Attributes:
        loss: mean over the steps since the last report.
        seconds: spent by this run, compilation included.
    """

    step: int
    steps: int
    loss: float
    seconds: float


def train(
    episodes: Episodes,
    policy: ActConfig,
    config: TrainingConfig,
    output: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Trains a policy and writes it to ``output/policy`` in LeRobot's layout.

    ``output`` also gets ``training.json`` (the set-up), ``metrics.jsonl``, ``checkpoints/<step>`` (Orbax) and
    ``loss.png``. When it holds an unfinished run of the same set-up, that run goes on from its last checkpoint and
    ends with the weights it would have had: batches and noise depend on the seed and the step alone.

    Returns:
        The policy's folder.

    Raises:
        CheckpointError: ``output`` holds another run's files.
    """
    use_compile_cache()
    _claim(output, {"policy": policy.to_json(), "training": asdict(config)})
    normalization = from_stats(
        policy.input_features, policy.output_features, policy.normalization_mapping, episodes.statistics()
    )
    inputs = normalization.inputs
    scales = Scales(
        images=tuple(inputs.forward(camera) for camera in policy.cameras),
        state=None if policy.state is None else inputs.forward(policy.state),
        environment_state=None,
        action=normalization.outputs.backward(policy.action),
    )
    graph, parameters, buffers = nnx.split(Act(policy, rngs=nnx.Rngs(config.seed)), nnx.Param, ...)
    rule = optimizer(config)
    state = State(jnp.zeros((), jnp.int32), parameters, rule.init(parameters))
    state = _resume(output, state)
    sizes = tuple((camera.shape[1], camera.shape[2]) for camera in policy.cameras)
    step = make_step(graph, buffers, scales, inputs.forward(policy.action), sizes, config, rule)
    batches = Batches(episodes, chunk=policy.chunk_size, size=config.batch_size, seed=config.seed)
    first = int(state.step)
    _cut_metrics(output / METRICS, first)
    started, losses = time.monotonic(), []
    with (output / METRICS).open("a") as metrics:
        for number in range(first, config.steps):
            state, values = step(state, batches.at(number))
            losses.append(values["loss"])
            done = number + 1
            if done % LOG_EVERY == 0 or done == config.steps:
                loss = float(np.mean(jax.device_get(losses)))
                if not np.isfinite(loss):
                    raise FloatingPointError(f"the loss is {loss} at step {done}; try a lower learning rate")
                losses = []
                last = {name: float(value) for name, value in values.items()}
                metrics.write(json.dumps({"step": done, "mean_loss": loss, **last}) + "\n")
                metrics.flush()
                if on_progress is not None:
                    on_progress(Progress(done, config.steps, loss, time.monotonic() - started))
            if done % config.save_every == 0 and done < config.steps:
                _save(output, state)
    _save(output, state)
    weights = flatten(nnx.merge(graph, state.parameters, buffers))
    sidecar = Sidecar(rate=episodes.meta.rate, joint_names=episodes.meta.joint_names)
    lerobot.write(
        output / POLICY,
        Checkpoint(policy, {name: np.asarray(array) for name, array in weights.items()}, normalization, sidecar),
    )
    draw_curve(output / METRICS, output / CURVE)
    return output / POLICY


def _claim(output: Path, setup: dict[str, Any]) -> None:
    """Writes the set-up of a new run, or checks that an old one was the same."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / SETUP
    text = json.dumps(setup, indent=2) + "\n"
    if not path.exists():
        path.write_text(text)
        return
    found = json.loads(path.read_text())
    if found != json.loads(text):
        differing = sorted(
            f"{part}.{name}: was {found.get(part, {}).get(name)!r}, now {value!r}"
            for part, values in json.loads(text).items()
            for name, value in values.items()
            if found.get(part, {}).get(name) != value
        )
        raise CheckpointError(
            f"{output}: holds a run with another set-up ({'; '.join(differing)}); choose another --output"
        )


def _leaves(state: State) -> dict[str, Any]:
    # By position: Orbax would make files and folders of NNX's and optax's own structure otherwise.
    return {f"{i:05}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _save(output: Path, state: State) -> None:
    orbax.save(output / CHECKPOINTS / f"{int(state.step):08}", _leaves(state))


def _resume(output: Path, state: State) -> State:
    # Orbax writes into a folder with another name and renames it: what has a plain number is whole.
    found = sorted(path for path in (output / CHECKPOINTS).glob("*") if path.name.isdigit())
    if not found:
        return state
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _leaves(state))
    restored = orbax.restore(found[-1], wanted)
    return jax.tree.unflatten(jax.tree.structure(state), [restored[name] for name in sorted(restored)])


def _cut_metrics(path: Path, step: int) -> None:
    """Drops lines that a killed run wrote after its last checkpoint."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
