"""DiffusionConfig: every field of LeRobot's configuration of Diffusion Policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

from jaxmodels.layers.vision import RESNETS
from jaxmodels.policies.config import LerobotConfig
from jaxmodels.ranges import (
    CHUNK,
    LAYERS_WRITTEN_OUT,
    NOT_NEGATIVE,
    SHARE_BELOW_ONE,
    WIDTH,
    Range,
    are_numbers,
    shorten_value,
)
from jaxmodels.samplers import NoiseSchedule
from jaxmodels.samplers.diffusion import BETA_SCHEDULES, TIMESTEPS
from jaxmodels.samplers.sampling import STEPS

NOISE_SCHEDULERS, PREDICTION_TYPES = ("DDPM", "DDIM"), ("epsilon", "sample")
STEP_GROUPS = 8  # Groups of the norm before the last convolution, independent of n_groups.
CHANNELS_PER_GROUP = 16  # Channels per group of the vision backbone with use_group_norm.
_BETA = Range(0, 1, above=True, below=True)
_SIDE = Range(1, 8192)  # Pixels.


@dataclass(frozen=True)
class DiffusionConfig(LerobotConfig):
    """LeRobot's `DiffusionConfig`, field by field (lerobot/policies/diffusion/configuration_diffusion.py, 0.6.1).

    Features are tuples in the order of the condition.

    Attributes:
        n_obs_steps: consecutive observations in the input, including the newest.
        horizon: actions that are sampled together; the first action belongs to the oldest observation.
        n_action_steps: number of actions to execute, from the newest observation on.
        crop_ratio: size of the crop as a share of ``resize_shape``; without it ``crop_shape`` counts.
        num_inference_steps: steps of the sampler; None for ``num_train_timesteps``.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    type: ClassVar[str] = "diffusion"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "noise_scheduler_type": NOISE_SCHEDULERS,
        "prediction_type": PREDICTION_TYPES,
        "beta_schedule": BETA_SCHEDULES,
    }
    needs_state: ClassVar[bool] = True
    optimizer_type: ClassVar[str | None] = "adam"  # LeRobot's preset.
    indifferent: ClassVar[tuple[str, ...]] = (
        *LerobotConfig.indifferent,
        "drop_n_last_frames",
        "crop_is_random",
        "gradient_checkpointing",
        "compile_",
        "do_mask_loss_for_padding",
        "optimizer_",
        "scheduler_",
    )

    n_obs_steps: Annotated[int, Range(1, 64)] = 2
    horizon: Annotated[int, Range(1, CHUNK)] = 64
    n_action_steps: Annotated[int, Range(1, CHUNK)] = 32
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "MEAN_STD"),
        ("STATE", "MIN_MAX"),
        ("ACTION", "MIN_MAX"),
    )
    drop_n_last_frames: Annotated[int, Range(0, CHUNK)] = 7
    vision_backbone: str = "resnet18"
    resize_shape: Annotated[tuple[int, int] | None, _SIDE] = None
    crop_ratio: Annotated[float, Range(0, 1, above=True)] = 1.0
    crop_shape: Annotated[tuple[int, int] | None, _SIDE] = None
    crop_is_random: bool = True
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    use_group_norm: bool = False
    spatial_softmax_num_keypoints: Annotated[int, Range(1, WIDTH)] = 32
    use_separate_rgb_encoder_per_camera: bool = True
    down_dims: tuple[int, ...] = (512, 1024, 2048)
    kernel_size: Annotated[int, Range(1, 255)] = 5
    n_groups: Annotated[int, Range(1, WIDTH)] = 8
    diffusion_step_embed_dim: Annotated[int, Range(4, WIDTH)] = 128
    use_film_scale_modulation: bool = True
    gradient_checkpointing: bool = False
    noise_scheduler_type: str = "DDPM"
    num_train_timesteps: Annotated[int, TIMESTEPS] = 100
    beta_schedule: str = "squaredcos_cap_v2"
    beta_start: Annotated[float, _BETA] = 0.0001
    beta_end: Annotated[float, _BETA] = 0.02
    prediction_type: str = "epsilon"
    clip_sample: bool = True
    clip_sample_range: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    num_inference_steps: Annotated[int | None, STEPS] = None
    compile_model: bool = False
    compile_mode: str = "reduce-overhead"
    do_mask_loss_for_padding: bool = False
    optimizer_lr: Annotated[float, NOT_NEGATIVE] = 1e-4
    optimizer_betas: Annotated[tuple[float, float], SHARE_BELOW_ONE] = (0.95, 0.999)
    optimizer_eps: Annotated[float, NOT_NEGATIVE] = 1e-8
    optimizer_weight_decay: Annotated[float, NOT_NEGATIVE] = 1e-6
    scheduler_name: str = "cosine"
    scheduler_warmup_steps: Annotated[int, Range(0, 10**9)] = 500

    def _wrong_widths(self) -> list[str]:
        widths, levels = Range(1, WIDTH), Range(1, LAYERS_WRITTEN_OUT // 4)
        is_right = are_numbers(self.down_dims, widths, integer=True)
        if len(self.down_dims) in levels and is_right:
            return []
        return [
            f"down_dims is {shorten_value(list(self.down_dims))}; wanted 1 to {levels.maximum:g} integers "
            f"of 1 or more, at most {widths.maximum:g}"
        ]

    def _wrong_numbers(self) -> list[str]:
        wrong = self._wrong_widths()
        if wrong:
            return wrong
        wrong = super()._wrong_numbers()
        if self.n_action_steps > self.horizon - self.n_obs_steps + 1:
            wrong.append(
                f"n_action_steps is {self.n_action_steps}; wanted {self.horizon - self.n_obs_steps + 1} at most, "
                "horizon - n_obs_steps + 1"
            )
        if self.horizon % 2 ** len(self.down_dims):
            factor = 2 ** len(self.down_dims)
            wrong.append(f"horizon is {self.horizon}; wanted a multiple of {factor}, twice for each of down_dims")
        if self.kernel_size % 2 == 0:
            wrong.append(
                f"kernel_size is {self.kernel_size}; wanted an odd number, with which a chunk keeps its length"
            )
        if odd := [width for width in self.down_dims if width % self.n_groups]:
            wrong.append(f"down_dims has {odd[0]}, which is not a multiple of n_groups {self.n_groups}")
        if self.down_dims[0] % STEP_GROUPS:
            wrong.append(f"down_dims begins with {self.down_dims[0]}, which is not a multiple of {STEP_GROUPS}")
        if self.diffusion_step_embed_dim % 2:
            wrong.append(f"diffusion_step_embed_dim is {self.diffusion_step_embed_dim}; wanted an even number")
        if (self.num_inference_steps or 0) > self.num_train_timesteps:
            wrong.append(f"num_inference_steps is {self.num_inference_steps}; wanted 1 to {self.num_train_timesteps}")
        return wrong

    def _wrong_parts(self) -> list[str]:
        self.schedule  # noqa: B018 - The property raises a ConfigError for wrong noise.
        return []

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        if not self.cameras and self.environment_state is None:
            wrong.append("input_features has neither an image nor an environment state; it needs one of them")
        if self.cameras:
            wrong += self._wrong_images()
        return wrong

    def _wrong_images(self) -> list[str]:
        wrong = []
        if self.vision_backbone not in RESNETS:
            wrong.append(f"vision_backbone is {shorten_value(self.vision_backbone)}; known: {', '.join(RESNETS)}")
        if len(set(self.frames)) > 1:
            wrong.append(f"images have the sizes {sorted(set(self.frames))}; wanted one size for all")
        elif self.crop is not None and any(cut > side for cut, side in zip(self.crop, self._resized, strict=True)):
            wrong.append(f"the crop is {list(self.crop)} of images of {list(self._resized)}; wanted a smaller crop")
        if self.use_group_norm and self.pretrained_backbone_weights:
            wrong.append("use_group_norm is true, and pretrained_backbone_weights have batch norms; set one of them")
        return wrong

    @property
    def chunk_size(self) -> int:
        """Actions of the resulting chunk, from the newest observation on."""
        return self.n_action_steps

    @property
    def observation_steps(self) -> int:
        return self.n_obs_steps

    @property
    def action_delta_indices(self) -> range:
        return range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.horizon)

    @property
    def _resized(self) -> tuple[int, int]:
        return self.resize_shape or self.frames[0]

    @property
    def crop(self) -> tuple[int, int] | None:
        """Height and width of the crop; None without a crop."""
        if self.resize_shape is None:
            return self.crop_shape
        if self.crop_ratio == 1:
            return None
        return (int(self.resize_shape[0] * self.crop_ratio), int(self.resize_shape[1] * self.crop_ratio))

    @property
    def encoder_size(self) -> tuple[int, int]:
        """Height and width of the vision backbone's input."""
        return self.crop or self._resized

    @property
    def steps(self) -> int:
        """Steps of the sampler."""
        return self.num_inference_steps or self.num_train_timesteps

    @property
    def noise(self) -> tuple[int, int]:
        """Shape of one member's first noise: horizon and width of an action."""
        return (self.horizon, self.action.shape[0])

    @property
    def noise_steps(self) -> int:
        return self.steps - 1 if self.noise_scheduler_type == "DDPM" else 0

    @property
    def table_numbers(self) -> int:
        films = 4 * sum(self.down_dims) * (1 + self.use_film_scale_modulation)
        return super().table_numbers + self.steps * films  # FiLM terms of the sampler's steps.

    @property
    def schedule(self) -> NoiseSchedule:
        """Noise schedule of training and sampling."""
        return NoiseSchedule(
            num_train_timesteps=self.num_train_timesteps,
            beta_start=self.beta_start,
            beta_end=self.beta_end,
            beta_schedule=cast(Any, self.beta_schedule),  # `choices` checks this and the next field.
            prediction_type=cast(Any, self.prediction_type),
            clip_sample=self.clip_sample,
            clip_sample_range=self.clip_sample_range,
        )

    def architecture(self) -> "DiffusionConfig":
        return self._with_defaults(pretrained_backbone_weights=None)
