"""How the learning rate changes over a training: factors between 0 and 1 of it, with LeRobot's names and formulas."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmodels.errors import ConfigError

TYPES = ("constant", "diffuser", "cosine_decay_with_warmup")
NAMES = ("constant", "constant_with_warmup", "linear", "cosine")


@dataclass(frozen=True)
class SchedulerConfig:
    """LeRobot's schedulers (lerobot/optim/schedulers.py).

    Attributes:
        type: ``constant``; ``diffuser``, one of diffusers' by `name`; or ``cosine_decay_with_warmup``.
        name: of a diffuser's: ``cosine`` and ``linear`` fall to 0 at the last step.
        num_warmup_steps: steps in which the rate rises linearly.
        num_decay_steps: length of a ``cosine_decay_with_warmup``; a shorter training shrinks it, and the warm-up in
            proportion. The training's length when None.
        peak_lr, decay_lr: the ratio that a ``cosine_decay_with_warmup`` falls to is decay_lr / peak_lr.

    Raises:
        ConfigError: a value makes no sense; all complaints together.
    """

    type: str = "constant"
    name: str = "cosine"
    num_warmup_steps: int = 0
    num_decay_steps: int | None = None
    peak_lr: float = 1.0
    decay_lr: float = 0.0

    def __post_init__(self) -> None:
        wrong = []
        if self.type not in TYPES:
            wrong.append(f"type is {self.type!r}; known: {', '.join(TYPES)}")
        if self.name not in NAMES:
            wrong.append(f"name is {self.name!r}; known: {', '.join(NAMES)}")
        if self.num_warmup_steps < 0:
            wrong.append(f"num_warmup_steps is {self.num_warmup_steps}; wanted 0 or more")
        if self.num_decay_steps is not None and self.num_decay_steps < 1:
            wrong.append(f"num_decay_steps is {self.num_decay_steps}; wanted 1 or more")
        if not self.peak_lr > 0 or not 0 <= self.decay_lr <= self.peak_lr:
            wrong.append(f"decay_lr is {self.decay_lr} and peak_lr {self.peak_lr}; wanted 0 <= decay_lr <= peak_lr")
        if wrong:
            raise ConfigError("scheduler: " + "; ".join(wrong))

    def factor(self, step: Int[Array, ""] | int, steps: int) -> Float[Array, ""]:
        """What the learning rate of a step (the first is 0) is multiplied with, in a training of `steps`."""
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
        # The cosine counts from the first step, not from the end of the warm-up; so does LeRobot's.
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(now, decay) / decay))
        first = 1 / (warmup + 1)
        rising = first + (1 - first) * now / max(1, warmup)
        return jnp.where(now < warmup, rising, (1 - lowest) * cosine + lowest)


def scheduler_preset(policy: object) -> SchedulerConfig:
    """What the fields of a policy's config ask for, with LeRobot's names of them; constant when there are none."""
    warmup = getattr(policy, "scheduler_warmup_steps", None) or 0
    if (decay := getattr(policy, "scheduler_decay_steps", None)) is not None:
        lowest = getattr(policy, "scheduler_decay_lr", 0.0)
        peak = getattr(policy, "optimizer_lr", 1.0)
        return SchedulerConfig("cosine_decay_with_warmup", "cosine", warmup, decay, peak, lowest)
    name = getattr(policy, "scheduler_name", None) or "constant"
    if name == "constant":
        return SchedulerConfig("diffuser", "constant_with_warmup", warmup) if warmup else SchedulerConfig()
    return SchedulerConfig("diffuser", name, warmup)
