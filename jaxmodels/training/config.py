"""How a training runs; nothing about what is trained."""

from dataclasses import dataclass

from jaxmodels.errors import ConfigError


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and optimizer of a training.

    Attributes:
        learning_rate: its peak; it rises linearly for `warmup` steps, then falls as a cosine to `final_share` of it.
        clip: largest global norm of a gradient.
        brightness, noise: augmentation of frames in training, as shares of the full range; `noise` is a standard
            deviation per pixel. Frames that reach a served policy went through a lossy video codec.
        state_noise: standard deviation of what is added to the normalised state.
        save_every: steps between checkpoints.
    """

    steps: int = 5000
    batch_size: int = 32
    learning_rate: float = 1e-3
    final_share: float = 0.01
    warmup: int = 200
    weight_decay: float = 1e-4
    clip: float = 10.0
    brightness: float = 0.08
    noise: float = 0.02
    state_noise: float = 0.02
    seed: int = 0
    save_every: int = 500

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {getattr(self, name)!r}; wanted 1 or more"
            for name in ("steps", "batch_size", "save_every")
            if getattr(self, name) < 1
        ]
        wrong += [
            f"{name} is {getattr(self, name)!r}; wanted a number of 0 or more"
            for name in ("final_share", "warmup", "weight_decay", "brightness", "noise", "state_noise", "seed")
            if not getattr(self, name) >= 0
        ]
        wrong += [
            f"{name} is {getattr(self, name)!r}; wanted a number above 0"
            for name in ("learning_rate", "clip")
            if not getattr(self, name) > 0
        ]
        if wrong:
            raise ConfigError("training config: " + "; ".join(wrong))
