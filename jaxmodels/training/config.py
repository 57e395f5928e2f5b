"""Config of a training run."""

from dataclasses import dataclass, field
from typing import Annotated

from jaxmodels.devices import DTYPES
from jaxmodels.errors import ConfigError
from jaxmodels.ranges import COUNT, SHARE_BELOW_ONE, find_choice_errors, find_number_errors
from jaxmodels.training.augmentation import ImageTransforms
from jaxmodels.training.optimizers import NOT_NEGATIVE, OptimizerConfig, SchedulerConfig

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

    Example:
        >>> TrainingConfig(steps=1000, batch_size=32, dtype="bfloat16").save_freq
        20000
    """

    steps: Annotated[int, COUNT] = 100_000
    batch_size: Annotated[int, COUNT] = 8
    seed: Annotated[int, NOT_NEGATIVE] = 1000
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_accumulation_steps: Annotated[int, COUNT] = 1
    dtype: str = "float32"
    ema_decay: Annotated[float, SHARE_BELOW_ONE] = 0.0
    image_transforms: ImageTransforms = field(default_factory=ImageTransforms)
    state_noise: Annotated[float, NOT_NEGATIVE] = 0.0
    use_imagenet_stats: bool = True
    log_freq: Annotated[int, COUNT] = 200
    save_freq: Annotated[int, COUNT] = 20_000
    keep_checkpoints: Annotated[int, COUNT] = 3
    num_workers: Annotated[int, NOT_NEGATIVE] = 4
    tensorboard: bool = False
    data: Annotated[int | None, COUNT] = None
    fsdp: Annotated[int | None, COUNT] = 1

    def __post_init__(self) -> None:
        wrong = find_number_errors(self)
        wrong += find_choice_errors(self, {"dtype": DTYPES})
        if not wrong and self.batch_size % self.gradient_accumulation_steps:
            wrong.append(
                f"batch_size is {self.batch_size}; wanted a multiple of gradient_accumulation_steps, "
                f"{self.gradient_accumulation_steps}"
            )
        if wrong:
            raise ConfigError("training config: " + "; ".join(wrong))
