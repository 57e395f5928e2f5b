"""Config of a training run."""

from dataclasses import dataclass, field

from jaxmodels.devices import DTYPES
from jaxmodels.errors import ConfigError
from jaxmodels.ranges import find_choice_errors
from jaxmodels.training.augmentation import ImageTransforms
from jaxmodels.training.optimizers import OptimizerConfig, SchedulerConfig

COUNTS = ("steps", "batch_size", "log_freq", "save_freq", "keep_checkpoints", "gradient_accumulation_steps")
# Fields that may change when a run is resumed, because weights do not depend on them.
OPERATIONAL = ("log_freq", "save_freq", "keep_checkpoints", "num_workers", "tensorboard", "data", "fsdp")


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch, optimizer and reports of a training, with LeRobot's names and defaults where it has them.

    Attributes:
        steps: updates of the parameters.
        batch_size: examples of one update, over all devices and processes together.
        optimizer, scheduler: the policy's presets when None.
        gradient_accumulation_steps: number of parts of a batch that are computed one after another, for less memory.
        dtype: dtype of the model's computation; parameters and their averages are always float32.
        ema_decay: decay of the exponential moving average of parameters that becomes the policy; 0 for none.
        image_transforms: augmentation of images.
        state_noise: standard deviation of noise that is added to the normalised state.
        use_imagenet_stats: normalise cameras by ImageNet's mean and deviation, as LeRobot does, not by the dataset's.
        log_freq, save_freq: steps between lines of metrics and between checkpoints.
        keep_checkpoints: number of the newest checkpoints that are kept.
        num_workers: threads that read and decode.
        tensorboard: whether metrics are also written for TensorBoard.
        data, fsdp: devices over which batches are split, and over which parameters are also split; None for all
            remaining devices, and 1 for `data` when both are None.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    steps: int = 100_000
    batch_size: int = 8
    seed: int = 1000
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_accumulation_steps: int = 1
    dtype: str = "float32"
    ema_decay: float = 0.0
    image_transforms: ImageTransforms = field(default_factory=ImageTransforms)
    state_noise: float = 0.0
    use_imagenet_stats: bool = True
    log_freq: int = 200
    save_freq: int = 20_000
    keep_checkpoints: int = 3
    num_workers: int = 4
    tensorboard: bool = False
    data: int | None = None
    fsdp: int | None = 1

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {getattr(self, name)!r}; wanted 1 or more"
            for name in (*COUNTS, "fsdp", "data")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        wrong += [
            f"{name} is {getattr(self, name)!r}; wanted 0 or more"
            for name in ("state_noise", "seed", "num_workers")
            if not getattr(self, name) >= 0
        ]
        if not 0 <= self.ema_decay < 1:
            wrong.append(f"ema_decay is {self.ema_decay!r}; wanted 0 (off) to below 1, e.g. 0.999")
        wrong += find_choice_errors(self, {"dtype": DTYPES})
        if not wrong and self.batch_size % self.gradient_accumulation_steps:
            wrong.append(
                f"batch_size is {self.batch_size}; wanted a multiple of gradient_accumulation_steps, "
                f"{self.gradient_accumulation_steps}"
            )
        if wrong:
            raise ConfigError("training config: " + "; ".join(wrong))
