"""The rule that turns gradients into new parameters: PyTorch's AdamW and Adam, the backbone at a rate of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

from jaxmodels.errors import ConfigError
from jaxmodels.training.schedules import SchedulerConfig

TYPES = ("adamw", "adam")
DECAYED = ("all", "matrices")


@dataclass(frozen=True)
class OptimizerConfig:
    """LeRobot's optimizers (lerobot/optim/optimizers.py), and what is decayed.

    Attributes:
        type: ``adamw``, or ``adam``, in which the decay is a part of the gradient.
        lr: the learning rate before the schedule.
        lr_backbone: that of the parameters of vision backbones; `lr` when None.
        grad_clip_norm: largest global norm of a gradient; 0 does not clip.
        decayed: ``all`` parameters, as in LeRobot, or only ``matrices``: no norms, no biases.

    Raises:
        ConfigError: a value makes no sense; all complaints together.
    """

    type: str = "adamw"
    lr: float = 1e-3
    lr_backbone: float | None = None
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    grad_clip_norm: float = 10.0
    decayed: str = "all"

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}"
            for name, known in (("type", TYPES), ("decayed", DECAYED))
            if getattr(self, name) not in known
        ]
        wrong += [
            f"{name} is {getattr(self, name)!r}; wanted a number above 0"
            for name in ("lr", "eps")
            if not 0 < getattr(self, name) < float("inf")
        ]
        wrong += [
            f"{name} is {getattr(self, name)!r}; wanted a number of 0 or more"
            for name in ("weight_decay", "grad_clip_norm", "lr_backbone")
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < float("inf")
        ]
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            wrong.append(f"betas are {self.betas!r}; wanted two numbers from 0 to below 1")
        if wrong:
            raise ConfigError("optimizer: " + "; ".join(wrong))


def optimizer_preset(policy: object) -> OptimizerConfig:
    """What the fields of a policy's config ask for, with LeRobot's names of them."""
    names = {
        "lr": "optimizer_lr",
        "lr_backbone": "optimizer_lr_backbone",
        "weight_decay": "optimizer_weight_decay",
        "betas": "optimizer_betas",
        "eps": "optimizer_eps",
        "grad_clip_norm": "optimizer_grad_clip_norm",
    }
    values = {ours: getattr(policy, theirs) for ours, theirs in names.items() if hasattr(policy, theirs)}
    if "betas" in values:
        values["betas"] = tuple(values["betas"])
    return OptimizerConfig(**values)


def make_optimizer(
    config: OptimizerConfig, scheduler: SchedulerConfig, steps: int, names: Iterable[str]
) -> optax.GradientTransformation:
    """The rule for a flat mapping of parameters with these names.

    The norm that is clipped is that of all of these parameters together. A parameter belongs to the backbone when a
    part of its name is ``backbone``.
    """
    groups = {name: "backbone" if "backbone" in name.split(".") else "others" for name in names}
    rates = {"others": config.lr, "backbone": config.lr if config.lr_backbone is None else config.lr_backbone}
    is_all = config.decayed == "all"
    decay = optax.add_decayed_weights(config.weight_decay, mask=None if is_all else _are_matrices)

    def factor(step: Any) -> Any:
        return scheduler.factor(step, steps)

    adam = optax.scale_by_adam(*config.betas, config.eps)
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        *((adam, decay) if config.type == "adamw" else (decay, adam)),
        optax.scale_by_schedule(factor),
        optax.partition({group: optax.scale(-rate) for group, rate in rates.items()}, groups),
    )


def _are_matrices(parameters: Any) -> Any:
    return {name: array.ndim > 1 for name, array in parameters.items()}


def averaged(average: Any, parameters: Any, step: Any, decay: float) -> Any:
    """The exponential moving average of parameters after one more step.

    Early on the decay is (1 + step) / (10 + step), so that the average does not remember the initial weights.
    """
    now = jnp.asarray(step, jnp.float32)
    return optax.incremental_update(parameters, average, 1 - jnp.minimum(decay, (1 + now) / (10 + now)))
