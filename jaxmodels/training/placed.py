"""What a training computes with, put onto the devices: parameters, what is fixed, and the compiled step."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    plan, computing = _blueprint(policy, config, None), _blueprint(policy, config, config.dtype)
    weights = _weights(plan, start, layout, _build(policy, config, None), config.seed)
    learned = [name for name in plan.learned if not _is_frozen(policy, name)]
    parameters = {name: weights.pop(name) for name in learned}
    inputs = normalization.inputs
    scales = Scales(
        images=tuple(inputs.forward(camera) for camera in policy.cameras),
        state=None if policy.state is None else inputs.forward(policy.state),
        environment_state=None if policy.environment_state is None else inputs.forward(policy.environment_state),
        action=normalization.outputs.backward(policy.action),
    )
    instructions = read_instructions(policy, dataset.tasks, start.tokenizer)
    if instructions is not None and policy.text_encoder.is_frozen:
        instructions = instructions.read_ahead(plan, {**weights, **parameters}, layout.whole)
    others = (scales, inputs.forward(policy.action), instructions)
    fixed = Fixed(weights, *jax.tree.map(lambda array: layout.put(array, layout.whole), others))

    assert config.optimizer is not None
    assert config.scheduler is not None
    rule = make_optimizer(config.optimizer, config.scheduler, config.steps, learned)
    sizes = tuple((camera.shape[1], camera.shape[2]) for camera in policy.cameras)
    loss = make_loss(computing, sizes, config, layout)
    state = _state(parameters, rule, loss, fixed, batch, config, layout)
    return Placed(state, fixed, make_step(loss, config, rule, layout, state))


def _state(
    parameters: dict[str, jax.Array],
    rule: optax.GradientTransformation,
    loss: Any,
    fixed: Fixed,
    batch: Batch,
    config: TrainingConfig,
    layout: Layout,
) -> State:
    memory = layout.spread_tree(jax.eval_shape(rule.init, parameters))
    _, values = jax.eval_shape(loss, parameters, fixed, batch, jax.random.key(0))
    names = (*values, "gradient_norm", COUNT)
    return State(
        step=layout.put(np.int32(0), layout.whole),
        parameters=parameters,
        optimizer=jax.jit(rule.init, out_shardings=memory)(parameters),
        average=jax.tree.map(jnp.copy, parameters) if config.ema_decay else None,
        sums={name: layout.put(np.float32(0), layout.whole) for name in sorted(names)},
    )


def _weights(plan: Blueprint[Any], start: Start, layout: Layout, build: Any, seed: int) -> dict[str, jax.Array]:
    """All weights of the policy: those to start from, and the others drawn where they will be."""
    wanted = {name: shape.shape for name, shape in plan.shapes.items()}
    places: Any = layout.spread_tree(dict(plan.shapes))
    found = {name: np.shape(array) for name, array in start.weights.items()}
    # A part of them, of a text encoder, is compared with the same part of the policy.
    is_whole = {name.split(".")[0] for name in found} != {"text"}
    part = {name: shape for name, shape in wanted.items() if is_whole or name.startswith("text.")}
    if found:
        check_fit(found, part, where="weights to start from")
    put = {name: layout.put(start.weights[name], places[name]) for name in found}
    if len(put) == len(wanted):
        return put
    weights = jax.jit(lambda: flatten(build(nnx.Rngs(seed))), out_shardings=places)() | put
    if start.backbone is None:
        return weights
    made = put_backbone(start.backbone, weights)
    trained = {name: array for name, array in made.items() if array is not weights[name]}
    return weights | {name: layout.put(array, places[name]) for name, array in trained.items()}


def _build(policy: Any, config: TrainingConfig, dtype: str | None) -> Any:
    model = policy_type(policy.type).model
    # Modules that compute in a dtype of their own take it; others compute in that of their weights.
    options = {"dtype": jnp.dtype(dtype)} if dtype is not None and "dtype" in signature(model).parameters else {}
    return lambda rngs: model(policy, rngs=rngs, **options)


def _blueprint(policy: Any, config: TrainingConfig, dtype: str | None) -> Blueprint[Any]:
    return blueprint(_build(policy, config, dtype))


def _is_frozen(policy: Any, name: str) -> bool:
    text: Any = getattr(policy, "text_encoder", None)
    return text is not None and text.is_frozen and "text" in name.split(".")


def host_weights(state: State, fixed: Fixed, layout: Layout) -> Mapping[str, np.ndarray]:
    """The policy's weights as they are now, averaged parameters where there is an average; every process has to ask."""
    return layout.gather({**fixed.weights, **(state.average or state.parameters)})
