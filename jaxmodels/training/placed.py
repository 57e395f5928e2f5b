"""What a training computes with, put onto the devices: parameters, what is fixed, and the compiled step."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmodels.checkpoints.backbones import put_backbone
from jaxmodels.data import Batch, Dataset
from jaxmodels.normalization import Normalization
from jaxmodels.policies import policy_type
from jaxmodels.program import Scales
from jaxmodels.training.config import OPERATIONAL, TrainingConfig
from jaxmodels.training.instructions import read_instructions
from jaxmodels.training.layout import Layout
from jaxmodels.training.optimizers import make_optimizer, optimizer_preset
from jaxmodels.training.schedules import scheduler_preset
from jaxmodels.training.start import Start
from jaxmodels.training.step import COUNT, Fixed, State, Step, make_loss, make_step
from jaxmodels.weights import Blueprint, blueprint, check_fit, flatten


@dataclass(frozen=True)
class Placed:
    """A training before its first step."""

    state: State
    fixed: Fixed
    step: Step


def resolve(config: TrainingConfig, policy: Any) -> TrainingConfig:
    """With what the policy's config asks for, where nothing else was."""
    use_amp = getattr(policy, "use_amp", False)  # LeRobot's name of mixed precision
    return replace(
        config,
        optimizer=config.optimizer or optimizer_preset(policy),
        scheduler=config.scheduler or scheduler_preset(policy),
        dtype="bfloat16" if use_amp else config.dtype,
    )


def setup(dataset: Dataset, policy: Any, config: TrainingConfig) -> dict[str, Any]:
    """Everything that the weights depend on, as JSON."""
    training = {name: value for name, value in asdict(config).items() if name not in OPERATIONAL}
    actions = hashlib.sha256(np.ascontiguousarray(dataset.vectors(policy.action.name)).tobytes()).hexdigest()
    data = {"episodes": len(dataset.lengths), "frames": int(sum(dataset.lengths)), "actions": actions[:16]}
    return {"policy": policy.to_json(), "training": training, "dataset": data}


def place(
    dataset: Dataset, start: Start, normalization: Normalization, config: TrainingConfig, layout: Layout, batch: Batch
) -> Placed:
    """Puts a training onto its devices.

    Args:
        config: resolved.
        batch: any, put onto the devices, for its shapes.

    Raises:
        CheckpointError: weights to start from do not fit the policy.
        DatasetError: the policy reads instructions and the dataset has none.
    """
    policy = start.policy
    programs = _programs(policy, replace(config, **_UNCOMPILED), layout)
    weights = _weights(programs, start, layout, config.seed)
    parameters = {name: weights.pop(name) for name in programs.learned}
    inputs = normalization.inputs
    scales = Scales(
        images=tuple(inputs.forward(camera) for camera in policy.cameras),
        state=None if policy.state is None else inputs.forward(policy.state),
        environment_state=None if policy.environment_state is None else inputs.forward(policy.environment_state),
        action=normalization.outputs.backward(policy.action),
    )
    instructions = read_instructions(policy, dataset.tasks, start.tokenizer)
    if instructions is not None and policy.text_encoder.is_frozen:
        instructions = instructions.read_ahead(programs.plan, {**weights, **parameters}, layout.whole)
    others = (scales, inputs.forward(policy.action), instructions)
    fixed = Fixed(weights, *jax.tree.map(lambda array: layout.put(array, layout.whole), others))
    _, values = programs.loss.eval_shape(parameters, fixed, batch, jax.random.key(0))
    names = (*values, "gradient_norm", COUNT)
    state = State(
        step=layout.put(np.int32(0), layout.whole),
        parameters=parameters,
        optimizer=programs.remember(parameters),
        average=jax.tree.map(jnp.copy, parameters) if config.ema_decay else None,
        sums={name: layout.put(np.float32(0), layout.whole) for name in sorted(names)},
    )
    return Placed(state, fixed, programs.step)


@dataclass(frozen=True)
class _Programs:
    """What is compiled for a training.

    Attributes:
        plan: of the policy's weights, as they are kept.
        learned: names of the weights that are trained.
        draw: initial weights of a seed, where they will be.
        remember: what the optimizer has to remember of these parameters at first.
    """

    plan: Blueprint[Any]
    learned: tuple[str, ...]
    draw: Callable[[Any], dict[str, jax.Array]]
    remember: Callable[[dict[str, jax.Array]], Any]
    loss: Any
    step: Step


# Of a training, what no program depends on: with it one of other values of these runs the same.
_UNCOMPILED: dict[str, Any] = {
    "save_freq": 1,
    "keep_checkpoints": 1,
    "num_workers": 0,
    "tensorboard": False,
    "data": None,
    "fsdp": None,
}


@lru_cache(maxsize=4)  # who trains, or goes on with a training, twice in a process waits for the compiler once
def _programs(policy: Any, config: TrainingConfig, layout: Layout) -> _Programs:
    build = _build(policy, None)
    plan, computing = blueprint(build), blueprint(_build(policy, config.dtype))
    learned = tuple(name for name in plan.learned if not _is_frozen(policy, name))
    assert config.optimizer is not None
    assert config.scheduler is not None
    rule = make_optimizer(config.optimizer, config.scheduler, config.steps, learned)
    parameters = {name: plan.shapes[name] for name in learned}
    places = layout.spread_tree(parameters)
    memory = layout.spread_tree(jax.eval_shape(rule.init, parameters))
    loss = make_loss(computing, policy.frames, config, layout)
    whole: Any = layout.whole  # one for all leaves of a part
    shardings = State(whole, places, memory, places if config.ema_decay else None, whole)
    return _Programs(
        plan=plan,
        learned=learned,
        draw=jax.jit(
            lambda seed: flatten(build(nnx.Rngs(jax.random.key(seed)))),
            out_shardings=layout.spread_tree(dict(plan.shapes)),
        ),
        remember=jax.jit(rule.init, out_shardings=memory),
        loss=jax.jit(loss),
        step=make_step(loss, config, rule, layout, shardings),
    )


def _weights(programs: _Programs, start: Start, layout: Layout, seed: int) -> dict[str, jax.Array]:
    """All weights of the policy: those to start from, and the others drawn where they will be."""
    shapes = programs.plan.shapes
    wanted = {name: shape.shape for name, shape in shapes.items()}
    places: Any = layout.spread_tree(dict(shapes))
    found = {name: np.shape(array) for name, array in start.weights.items()}
    # A part of them, of a text encoder, is compared with the same part of the policy.
    is_whole = {name.split(".")[0] for name in found} != {"text"}
    part = {name: shape for name, shape in wanted.items() if is_whole or name.startswith("text.")}
    if found:
        check_fit(found, part, where="weights to start from")
    put = {name: layout.put(start.weights[name], places[name]) for name in found}
    if len(put) == len(wanted):
        return put
    weights = programs.draw(np.uint32(seed)) | put
    if start.backbone is None:
        return weights
    made = put_backbone(start.backbone, weights)
    trained = {name: array for name, array in made.items() if array is not weights[name]}
    return weights | {name: layout.put(array, places[name]) for name, array in trained.items()}


def _build(policy: Any, dtype: str | None) -> Callable[[nnx.Rngs], Any]:
    model = policy_type(policy.type).model
    # Modules that compute in a dtype of their own take it; others compute in that of their weights.
    options = {"dtype": jnp.dtype(dtype)} if dtype is not None and "dtype" in signature(model).parameters else {}
    return lambda rngs: model(policy, rngs=rngs, **options)


def _is_frozen(policy: Any, name: str) -> bool:
    text: Any = getattr(policy, "text_encoder", None)
    return text is not None and text.is_frozen and "text" in name.split(".")


def host_weights(state: State, fixed: Fixed, layout: Layout) -> Mapping[str, np.ndarray]:
    """The policy's weights as they are now, averaged parameters where there is an average; every process has to ask."""
    return layout.gather({**fixed.weights, **(state.average or state.parameters)})
