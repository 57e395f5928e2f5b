"""Training state on the devices, and the compiled training step."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.checkpoints.backbones import replace_backbone
from jaxmodels.data import Batch, Dataset
from jaxmodels.devices import Layout
from jaxmodels.errors import DatasetError
from jaxmodels.normalization import Affine, Normalization
from jaxmodels.policies import get_policy_type
from jaxmodels.program import Scales, Size, build_scales, normalize
from jaxmodels.text import tokenizer
from jaxmodels.training.augmentation import augment_moments
from jaxmodels.training.config import OPERATIONAL, TrainingConfig
from jaxmodels.training.initial_policy import Start
from jaxmodels.training.optimizers import make_optimizer, optimizer_preset, scheduler_preset, update_average
from jaxmodels.types import Language, Observation
from jaxmodels.weights import Blueprint, blueprint_of, check_fit, flatten

AHEAD = 64  # Tasks that are encoded at a time.


@dataclass(frozen=True)
class TrainingInstructions:
    """Tokens and mask of all task texts of a dataset; `language` is the result of a frozen text encoder, else None."""

    ids: Int[Any, "k n"]
    mask: Bool[Any, "k n"]
    language: Language | None = None

    def encode_tasks(self, model: Any, tasks: Int[Array, " b"], dtype: DTypeLike) -> Language:
        """Return the model's language tokens for each example's task."""
        if self.language is not None:
            language = jax.tree.map(lambda x: x[tasks], self.language)
        elif len(self.ids) <= len(tasks):  # Each task is encoded once.
            language = jax.tree.map(lambda x: x[tasks], model.read(self.ids, self.mask))
        else:
            language = model.read(self.ids[tasks], self.mask[tasks])
        return Language(language.tokens.astype(dtype), language.mask)

    def read_ahead(
        self, plan: Blueprint[Any], weights: Mapping[str, Any], sharding: NamedSharding
    ) -> "TrainingInstructions":
        """Return these with `language`, so that a frozen text encoder runs once and not in every step."""

        @partial(jax.jit, out_shardings=sharding)
        def read(weights: Mapping[str, Any], ids: Array, mask: Array) -> Language:
            return plan.assemble(weights).read(ids, mask)

        rows = [
            read(dict(weights), self.ids[i : i + AHEAD], self.mask[i : i + AHEAD])
            for i in range(0, len(self.ids), AHEAD)
        ]
        return replace(self, language=jax.tree.map(lambda *parts: np.concatenate(parts), *rows))


jax.tree_util.register_dataclass(TrainingInstructions, data_fields=["ids", "mask", "language"], meta_fields=[])


def read_instructions(policy: Any, tasks: Sequence[str], file: bytes | None) -> TrainingInstructions | None:
    """Return tokens of a dataset's tasks for a policy; None without language. `file` is the ``tokenizer.json``.

    Raises:
        DatasetError: an episode has no task.
    """
    config = policy.text_encoder
    if config is None:
        return None
    if not tasks or any(not task.strip() for task in tasks):
        raise DatasetError(
            f"the policy reads instructions, but the dataset's tasks are {list(tasks)}; record it with a task for "
            "every episode, or train without them (--policy.text_encoder=null)"
        )
    ids, mask = tokenizer(config, file)(tasks)
    return TrainingInstructions(np.asarray(ids), np.asarray(mask))


Weights = Mapping[str, Any]
COUNT = "count"


class State(NamedTuple):
    """Everything that a training step changes: a tree of arrays; weights are float32 by our names.

    Attributes:
        average: moving average of the parameters; None without one.
        sums: sums of measured values since the last line of metrics, and the number `COUNT` of their steps.
        statistics: running statistics of batch norms.
    """

    step: Any
    parameters: dict[str, Any]
    optimizer: Any
    average: dict[str, Any] | None
    sums: dict[str, Any]
    statistics: dict[str, Any]


class Fixed(NamedTuple):
    """Constant inputs of a training step: buffers and frozen parameters, normalisation, tasks."""

    weights: Weights
    scales: Scales
    action: Affine
    instructions: TrainingInstructions | None


# Measured values by name, and running statistics after the batch.
Outcome = tuple[dict[str, Array], dict[str, Array]]
Loss = Callable[[Weights, Weights, Fixed, Batch, PRNGKeyArray], tuple[Array, Outcome]]
Step = Callable[[State, Fixed, Batch], tuple[State, Float[Array, ""]]]


def make_loss(plan: Blueprint[Any], sizes: tuple[Size, ...], config: TrainingConfig, layout: Layout) -> Loss:
    """Return the loss function of a batch, given parameters and running statistics; also its parts and new statistics.

    `plan` computes in `config.dtype`; `sizes` are (height, width) per camera.
    """
    dtype = jnp.dtype(config.dtype)

    def loss(
        parameters: Weights, statistics: Weights, fixed: Fixed, batch: Batch, key: PRNGKeyArray
    ) -> tuple[Array, Outcome]:
        # Cast before the weights are gathered, for half the traffic in bfloat16.
        weights = {**cast_weights({**fixed.weights, **parameters}, dtype), **statistics}
        weights = jax.lax.with_sharding_constraint(weights, layout.replicated)
        model = plan.assemble({name: weights[name] for name in plan.shapes})
        picture, vector, *streams = jax.random.split(key, 5)
        keys = jax.random.split(picture, max(1, len(batch.images)))
        images = tuple(
            augment_moments(jnp.asarray(frames), config.image_transforms, key)
            for frames, key in zip(batch.images, keys, strict=False)
        )
        raw = Observation(images=images, state=batch.state, environment_state=batch.environment_state)
        observation = normalize(raw, fixed.scales, sizes, dtype)
        if observation.state is not None and config.state_noise:
            noise = config.state_noise * jax.random.normal(vector, observation.state.shape, jnp.float32)
            observation = observation._replace(state=(observation.state + noise).astype(dtype))
        if fixed.instructions is not None:
            observation = observation._replace(
                language=fixed.instructions.encode_tasks(model, jnp.asarray(batch.tasks), dtype)
            )
        rngs = nnx.Rngs(**dict(zip(("dropout", "latent", "noise"), streams, strict=True)))
        value, parts = model.loss(observation, fixed.action.normalize(batch.actions), batch.is_pad, rngs)
        value = value.astype(jnp.float32)
        after = flatten(model) if statistics else {}
        measured = {"loss": value, **{name: part.astype(jnp.float32) for name, part in parts.items()}}
        return value, (measured, {name: after[name] for name in statistics})

    return loss


def make_step(
    loss: Loss, config: TrainingConfig, rule: optax.GradientTransformation, layout: Layout, shardings: State
) -> Step:
    """Return the compiled step: state and batch to the next state, in the same memory and `shardings`, and the loss."""
    parts = config.gradient_accumulation_steps

    def gradient(
        parameters: Weights, statistics: Weights, fixed: Fixed, batch: Batch, key: PRNGKeyArray
    ) -> tuple[Any, Outcome]:
        gradient_of = jax.grad(loss, has_aux=True)
        if parts == 1:
            return gradient_of(parameters, statistics, fixed, batch, key)

        def add(total: Any, part: tuple[Batch, PRNGKeyArray]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(parameters, statistics, fixed, *part)), None

        some = jax.tree.map(lambda x: _split(x, parts, layout), batch)
        shapes = jax.eval_shape(gradient_of, parameters, statistics, fixed, jax.tree.map(lambda x: x[0], some), key)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, nothing, (some, jax.random.split(key, parts)))
        return jax.tree.map(lambda x: x / parts, total)

    def step(state: State, fixed: Fixed, batch: Batch) -> tuple[State, Float[Array, ""]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        slope, (values, statistics) = gradient(state.parameters, state.statistics, fixed, batch, key)
        updates, memory = rule.update(slope, state.optimizer, state.parameters)
        parameters: Any = optax.apply_updates(state.parameters, updates)
        average = state.average
        if average is not None:
            average = update_average(average, parameters, state.step, config.ema_decay)
        measured = {**values, "gradient_norm": optax.tree.norm(slope), COUNT: jnp.ones((), jnp.float32)}
        is_first = state.step % config.log_freq == 0
        sums = {name: jnp.where(is_first, 0, state.sums[name]) + value for name, value in measured.items()}
        return State(state.step + 1, parameters, memory, average, sums, statistics), values["loss"]

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated))


def cast_weights(weights: Weights, dtype: DTypeLike) -> dict[str, Any]:
    """Return weights in the dtype of the computation; only floats are cast."""
    return {
        name: array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
        for name, array in weights.items()
    }


def _split(x: Array, parts: int, layout: Layout) -> Array:
    """Split the batch into parts, of which each device keeps its share."""
    some = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
    return jax.lax.with_sharding_constraint(some, layout.microbatch_sharding)


@dataclass(frozen=True)
class PlacedTraining:
    """State and compiled step of a training, on its devices."""

    state: State
    fixed: Fixed
    step: Step


def resolve_config(config: TrainingConfig, policy: Any) -> TrainingConfig:
    """Return the training config, completed from the policy's config."""
    return replace(
        config,
        optimizer=config.optimizer or optimizer_preset(policy),
        scheduler=config.scheduler or scheduler_preset(policy),
        dtype="bfloat16" if policy.use_amp else config.dtype,
    )


def describe_training(dataset: Dataset, policy: Any, config: TrainingConfig) -> dict[str, Any]:
    """Return everything that the trained weights depend on, as JSON."""
    training = {name: value for name, value in asdict(config).items() if name not in OPERATIONAL}
    actions = hashlib.sha256(np.ascontiguousarray(dataset.vectors(policy.action.name)).tobytes()).hexdigest()
    data = {"episodes": len(dataset.lengths), "frames": int(sum(dataset.lengths)), "actions": actions[:16]}
    return {"policy": policy.to_json(), "training": training, "dataset": data}


def put_on_devices(
    dataset: Dataset, start: Start, normalization: Normalization, config: TrainingConfig, layout: Layout, batch: Batch
) -> PlacedTraining:
    """Put a training with a resolved config onto its devices; `batch` is any batch there, for its shapes.

    Raises:
        CheckpointError: initial weights do not fit the policy.
        DatasetError: the policy reads instructions and the dataset has none.
    """
    policy = start.policy
    programs = _programs(policy, replace(config, **_UNCOMPILED), layout)
    weights = _weights(programs, start, layout, config.seed)
    parameters = {name: weights.pop(name) for name in programs.learned}
    statistics = {name: weights.pop(name) for name in programs.plan.running}
    instructions = read_instructions(policy, dataset.tasks, start.tokenizer)
    if instructions is not None and policy.text_encoder.is_frozen:
        instructions = instructions.read_ahead(programs.plan, {**weights, **parameters}, layout.replicated)
    others = (build_scales(policy, normalization), normalization.inputs.get_affine(policy.action), instructions)
    fixed = Fixed(weights, *jax.tree.map(lambda array: layout.put(array, layout.replicated), others))
    _, (values, _) = programs.loss.eval_shape(parameters, statistics, fixed, batch, jax.random.key(0))
    names = (*values, "gradient_norm", COUNT)
    state = State(
        step=layout.put(np.int32(0), layout.replicated),
        parameters=parameters,
        optimizer=programs.remember(parameters),
        average=jax.tree.map(jnp.copy, parameters) if config.ema_decay else None,
        sums={name: layout.put(np.float32(0), layout.replicated) for name in sorted(names)},
        statistics=statistics,
    )
    return PlacedTraining(state, fixed, programs.step)


@dataclass(frozen=True)
class _Programs:
    """Compiled functions of a training; `draw` makes initial weights of a seed, `remember` the optimizer's state."""

    plan: Blueprint[Any]
    learned: tuple[str, ...]
    draw: Callable[[Any], dict[str, jax.Array]]
    remember: Callable[[dict[str, jax.Array]], Any]
    loss: Any
    step: Step


# Default values of fields that no program depends on, so that trainings share programs.
_UNCOMPILED = {
    field.name: field.default
    for field in fields(TrainingConfig)
    if field.name in OPERATIONAL and field.name != "log_freq"
}


@lru_cache(maxsize=4)  # A second training in a process does not compile again.
def _programs(policy: Any, config: TrainingConfig, layout: Layout) -> _Programs:
    model = get_policy_type(policy.type).model
    # Modules without an argument `dtype` compute in the dtype of their weights.
    takes_dtype = config.dtype is not None and "dtype" in signature(model).parameters
    plan = blueprint_of(model, policy)
    computing = blueprint_of(model, policy, dtype=jnp.dtype(config.dtype)) if takes_dtype else plan
    learned = tuple(name for name in plan.learned if not _is_frozen(policy, name))
    assert config.optimizer is not None
    assert config.scheduler is not None
    rule = make_optimizer(config.optimizer, config.scheduler, config.steps, learned)
    parameters = {name: plan.shapes[name] for name in learned}
    spread = layout.parameter_shardings(parameters)
    memory = layout.parameter_shardings(jax.eval_shape(rule.init, parameters))
    loss = make_loss(computing, policy.frames, config, layout)
    whole: Any = layout.replicated  # Shared by all leaves of a part.
    running = layout.parameter_shardings({name: plan.shapes[name] for name in plan.running})
    shardings = State(whole, spread, memory, spread if config.ema_decay else None, whole, running)
    return _Programs(
        plan=plan,
        learned=learned,
        draw=jax.jit(
            lambda seed: flatten(model(policy, rngs=nnx.Rngs(jax.random.key(seed)))),
            out_shardings=layout.parameter_shardings(dict(plan.shapes)),
        ),
        remember=jax.jit(rule.init, out_shardings=memory),
        loss=jax.jit(loss),
        step=make_step(loss, config, rule, layout, shardings),
    )


def _weights(programs: _Programs, start: Start, layout: Layout, seed: int) -> dict[str, jax.Array]:
    """Return all weights of the policy on the devices: given weights, and drawn weights."""
    shapes = programs.plan.shapes
    expected = {name: shape.shape for name, shape in shapes.items()}
    shardings: Any = layout.parameter_shardings(dict(shapes))
    given = {name: np.shape(array) for name, array in start.weights.items()}
    # Weights of a text encoder are compared with the same part of the policy.
    is_whole = {name.split(".")[0] for name in given} != {"text"}
    part = {name: shape for name, shape in expected.items() if is_whole or name.startswith("text.")}
    if given:
        check_fit(given, part, where="weights to start from")
    put = {name: layout.put(start.weights[name], shardings[name]) for name in given}
    if len(put) == len(expected):
        return put
    weights = programs.draw(np.uint32(seed)) | put
    if start.backbone is None:
        return weights
    filled = replace_backbone(start.backbone, weights)
    trained = {name: array for name, array in filled.items() if array is not weights[name]}
    return weights | {name: layout.put(array, shardings[name]) for name, array in trained.items()}


def _is_frozen(policy: Any, name: str) -> bool:
    text: Any = policy.text_encoder
    return text is not None and text.is_frozen and "text" in name.split(".")


def gather_weights(state: State, fixed: Fixed, layout: Layout) -> Mapping[str, np.ndarray]:
    """Return the policy's current, or averaged, weights on the host; every process must call it."""
    return layout.gather({**fixed.weights, **(state.average or state.parameters), **state.statistics})
