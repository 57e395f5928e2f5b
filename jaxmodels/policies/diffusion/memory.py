"""Memory and work of a Diffusion Policy, from its config alone."""

from collections.abc import Iterator, Sequence

from jaxmodels.memory import Backbone, Frame, Sizes, count_linear, count_resize_numbers, measure_backbone
from jaxmodels.policies.diffusion.config import DiffusionConfig
from jaxmodels.policies.diffusion.model import condition_width


def compute_sizes(
    config: DiffusionConfig, batch: int = 1, frames: Sequence[Frame] | None = None, *, platform: str = "cpu"
) -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive."""
    del platform
    looks, steps = config.frames, config.n_obs_steps
    eye = measure_backbone(config.vision_backbone) if looks else None
    unet, unet_operations, widest = _unet(config)
    parameters, operations, encoding = unet, config.steps * unet_operations, 0
    if eye is not None:
        separate = len(looks) if config.use_separate_rgb_encoder_per_camera else 1
        parameters += separate * _image_encoder(config, eye)
        operations += steps * len(looks) * eye.operations(config.encoder_size)
        together = batch * steps * (1 if config.use_separate_rgb_encoder_per_camera else len(looks))
        encoding = eye.activations(config.encoder_size, together)
    arrived = batch * steps * count_resize_numbers(frames or looks, looks)
    return Sizes(
        parameters=parameters,
        serving=parameters,
        layers=2 * len(config.down_dims) + 2,
        pixels=steps * sum(height * width for height, width in looks),
        tokens=config.horizon,
        activations=arrived + max(encoding, batch * widest) + _step_tables(config),
        operations=batch * operations,
    )


def _image_encoder(config: DiffusionConfig, eye: Backbone) -> int:
    count, (rows, columns) = config.spatial_softmax_num_keypoints, eye.rows(config.encoder_size)
    # A group norm has no statistics, half the numbers of a batch norm; `eye.serving` has a bias for each channel.
    channels = (eye.parameters - eye.serving) // 3
    norms = 2 * channels if config.use_group_norm else 0
    keypoints = count_linear(eye.width, count) + 2 * rows * columns + count_linear(2 * count, 2 * count)
    return eye.parameters - norms + keypoints


def _step_tables(config: DiffusionConfig) -> int:
    """Numbers of what each step of the sampler contributes, for all steps at once, and of its noise."""
    width, scales = config.diffusion_step_embed_dim, 2 if config.use_film_scale_modulation else 1
    films = scales * sum(outputs for _, outputs, _ in _blocks(config))
    return config.steps * (films + 6 * width) + config.noise_steps * config.horizon * config.action.shape[0]


def _unet(config: DiffusionConfig) -> tuple[int, int, int]:
    """Parameters, operations of one step, and numbers in memory at the widest point, of one member."""
    width, widths, action = config.diffusion_step_embed_dim, config.down_dims, config.action.shape[0]
    parameters = count_linear(width, 4 * width) + count_linear(4 * width, width)
    operations = widest = 0
    for inputs, outputs, length in _blocks(config):
        kernels = config.kernel_size * (inputs * outputs + outputs * outputs)
        kernels += 0 if inputs == outputs else inputs * outputs
        scales = 2 if config.use_film_scale_modulation else 1
        biases = 6 * outputs + (0 if inputs == outputs else outputs)
        parameters += kernels + biases + count_linear(width + condition_width(config), scales * outputs)
        operations += 2 * length * kernels
        widest = max(widest, length * (config.kernel_size * max(inputs, outputs) + inputs + 3 * outputs))
    skips = 0
    for level, channels in enumerate(widths[:-1]):
        length = config.horizon >> (level + 1)
        parameters += 3 * channels * channels + channels + 4 * channels * channels + channels
        operations += 2 * length * 3 * channels * channels + 2 * length * 4 * channels * channels
        skips += 2 * length * channels
    parameters += config.kernel_size * widths[0] ** 2 + 3 * widths[0] + count_linear(widths[0], action)
    operations += 2 * config.horizon * (config.kernel_size * widths[0] ** 2 + widths[0] * action)
    return parameters, operations, widest + skips + 4 * config.horizon * action


def _blocks(config: DiffusionConfig) -> Iterator[tuple[int, int, int]]:
    """Channels before and after each residual block, and the length of its time axis."""
    widths, last = config.down_dims, len(config.down_dims) - 1
    for level, (before, after) in enumerate(zip((config.action.shape[0], *widths[:-1]), widths, strict=True)):
        yield before, after, config.horizon >> level
        yield after, after, config.horizon >> level
    for _ in range(2):
        yield widths[-1], widths[-1], config.horizon >> last
    for level in range(last, 0, -1):
        yield 2 * widths[level], widths[level - 1], config.horizon >> level
        yield widths[level - 1], widths[level - 1], config.horizon >> level
