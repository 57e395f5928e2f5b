"""Optimizers, weight averaging and learning-rate schedules."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmodels.errors import ConfigError
from jaxmodels.policies.config import PolicyConfig
from jaxmodels.ranges import COUNT, SHARE_BELOW_ONE, Range, check_fields, find_choice_errors, find_number_errors

POSITIVE, NOT_NEGATIVE = Range(0, math.inf, above=True), Range(0, math.inf)
SCHEDULES = ("constant", "diffuser", "cosine_decay_with_warmup")
NAMES = ("constant", "constant_with_warmup", "linear", "cosine")


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning-rate schedule, with LeRobot's names (lerobot/optim/schedulers.py).

    Attributes:
        type: ``constant``; ``diffuser`` for diffusers' schedule `name`; or ``cosine_decay_with_warmup``.
        name: diffusers' schedule; ``cosine`` and ``linear`` fall to 0 at the last step.
        num_warmup_steps: steps in which the rate rises linearly.
        num_decay_steps: length of a ``cosine_decay_with_warmup``; a shorter training shrinks it, and the warm-up in
            proportion. The training's length when None.
        peak_lr, decay_lr: the ratio that a ``cosine_decay_with_warmup`` falls to is decay_lr / peak_lr.

    Raises:
        ConfigError: a value makes no sense; all errors together.

    Example:
        >>> warmup = SchedulerConfig("diffuser", "constant_with_warmup", num_warmup_steps=10)
        >>> [float(warmup.factor(step, 100)) for step in (0, 5, 50)]
        [0.0, 0.5, 1.0]
    """

    type: str = "constant"
    name: str = "cosine"
    num_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    num_decay_steps: Annotated[int | None, COUNT] = None
    peak_lr: float = 1.0
    decay_lr: float = 0.0

    def __post_init__(self) -> None:
        wrong = find_choice_errors(self, {"type": SCHEDULES, "name": NAMES})
        wrong += find_number_errors(self)
        if not self.peak_lr > 0 or not 0 <= self.decay_lr <= self.peak_lr:
            wrong.append(f"decay_lr is {self.decay_lr} and peak_lr {self.peak_lr}; wanted 0 <= decay_lr <= peak_lr")
        if wrong:
            raise ConfigError("scheduler: " + "; ".join(wrong))

    def factor(self, step: Int[Array, ""] | int, steps: int) -> Float[Array, ""]:
        """Return the factor of the learning rate at a step, counted from 0, of a training of `steps`."""
        now = jnp.asarray(step, jnp.float32)
        if self.type == "cosine_decay_with_warmup":
            return self._decay(now, steps)
        if self.type == "constant" or self.name == "constant":
            return jnp.ones((), jnp.float32)
        warmup = self.num_warmup_steps
        rising = now / max(1, warmup)
        progress = (now - warmup) / max(1, steps - warmup)
        after = {
            "constant_with_warmup": jnp.ones((), jnp.float32),
            "linear": jnp.maximum(0.0, 1 - progress),
            "cosine": jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * progress))),
        }[self.name]
        return jnp.where(now < warmup, rising, after)

    def _decay(self, now: Float[Array, ""], steps: int) -> Float[Array, ""]:
        decay = self.num_decay_steps or steps
        share = min(1.0, steps / decay)
        decay, warmup = min(steps, decay), int(self.num_warmup_steps * share)
        lowest = self.decay_lr / self.peak_lr
        # As in LeRobot, the cosine begins at the first step, not after the warm-up.
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(now, decay) / decay))
        first = 1 / (warmup + 1)
        rising = first + (1 - first) * now / max(1, warmup)
        return jnp.where(now < warmup, rising, (1 - lowest) * cosine + lowest)


def scheduler_preset(policy: PolicyConfig) -> SchedulerConfig:
    """Return the schedule of a policy's config; constant if it has none.

    Example:
        >>> from jaxmodels.training import trained_policy
        >>> scheduler_preset(trained_policy("robojax/sim/policy").policy).type
        'constant'
    """
    warmup, decay = policy.scheduler_warmup_steps, policy.scheduler_decay_steps
    if decay is not None:
        peak, lowest = policy.optimizer_lr, policy.scheduler_decay_lr
        return SchedulerConfig("cosine_decay_with_warmup", "cosine", warmup, decay, peak, lowest)
    if policy.scheduler_name == "constant":
        return SchedulerConfig("diffuser", "constant_with_warmup", warmup) if warmup else SchedulerConfig()
    return SchedulerConfig("diffuser", policy.scheduler_name, warmup)


OPTIMIZERS = ("adamw", "adam")
DECAYED = ("all", "matrices")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, with LeRobot's names (lerobot/optim/optimizers.py), and which parameters decay.

    Attributes:
        type: ``adamw``, or ``adam`` with the decay as a part of the gradient.
        lr: learning rate before the schedule.
        lr_backbone: learning rate of vision backbones; `lr` when None.
        grad_clip_norm: largest global norm of a gradient; 0 does not clip.
        decayed: ``all`` parameters, as in LeRobot, or only ``matrices`` without norms and biases.

    Raises:
        ConfigError: a value makes no sense; all errors together.

    Example:
        >>> OptimizerConfig("adamw", lr=3e-4, weight_decay=0.1, decayed="matrices").grad_clip_norm
        10.0
    """

    type: str = "adamw"
    lr: Annotated[float, POSITIVE] = 1e-3
    lr_backbone: Annotated[float | None, NOT_NEGATIVE] = None
    weight_decay: Annotated[float, NOT_NEGATIVE] = 1e-2
    betas: Annotated[tuple[float, float], SHARE_BELOW_ONE] = (0.9, 0.999)
    eps: Annotated[float, POSITIVE] = 1e-8
    grad_clip_norm: Annotated[float, NOT_NEGATIVE] = 10.0
    decayed: str = "all"

    def __post_init__(self) -> None:
        check_fields(self, "optimizer", {"type": OPTIMIZERS, "decayed": DECAYED})


def optimizer_preset(policy: PolicyConfig) -> OptimizerConfig:
    """Return the optimizer of a policy's config.

    Example:
        >>> from jaxmodels.training import trained_policy
        >>> optimizer_preset(trained_policy("robojax/sim/policy").policy).lr
        0.001
    """
    names = ("type", "lr", "lr_backbone", "weight_decay", "betas", "eps", "grad_clip_norm")
    values = {name: getattr(policy, f"optimizer_{name}") for name in names}
    return OptimizerConfig(**{name: value for name, value in values.items() if value is not None})


def make_optimizer(
    config: OptimizerConfig, scheduler: SchedulerConfig, steps: int, names: Iterable[str]
) -> optax.GradientTransformation:
    """Return the optax transformation for parameters with these names; clips the norm of all of them together.

    A parameter belongs to the backbone if a part of its name is ``backbone``.
    """
    groups = {name: "backbone" if "backbone" in name.split(".") else "others" for name in names}
    rates = {"others": config.lr, "backbone": config.lr if config.lr_backbone is None else config.lr_backbone}

    def are_matrices(parameters: Any) -> Any:
        return {name: array.ndim > 1 for name, array in parameters.items()}

    def factor(step: Any) -> Any:
        return scheduler.factor(step, steps)

    decay = optax.add_decayed_weights(config.weight_decay, mask=None if config.decayed == "all" else are_matrices)
    adam = optax.scale_by_adam(*config.betas, config.eps)
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        *((adam, decay) if config.type == "adamw" else (decay, adam)),
        optax.scale_by_schedule(factor),
        optax.partition({group: optax.scale(-rate) for group, rate in rates.items()}, groups),
    )


def update_average(average: Any, parameters: Any, step: Any, decay: float) -> Any:
    """Update the moving average of parameters; early decay is (1 + step) / (10 + step), to forget initial weights."""
    now = jnp.asarray(step, jnp.float32)
    return optax.incremental_update(parameters, average, 1 - jnp.minimum(decay, (1 + now) / (10 + now)))
