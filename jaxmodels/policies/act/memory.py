"""Memory and operations of an ACT, from its config alone."""

from collections.abc import Sequence

from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS
from jaxmodels.memory import (
    Frame,
    Sizes,
    count_attention,
    count_attention_scores,
    count_feed_forward,
    count_layer_norm,
    count_linear,
    count_resize_numbers,
    measure_backbone,
)
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.serving import STACKED_PIXELS


def compute_sizes(
    config: ActConfig, batch: int = 1, frames: Sequence[Frame] | None = None, *, platform: str = "cpu"
) -> Sizes:
    """Sizes of an ACT of a checked config, for frames that may arrive in other sizes."""
    width, hidden, chunk = config.dim_model, config.dim_feedforward, config.chunk_size
    views = config.frames
    eye = measure_backbone(config.vision_backbone, config.replace_final_stride_with_dilation) if views else None
    maps = [rows * columns for rows, columns in map(eye.rows, views)] if eye is not None else []
    vectors = _vectors(config)
    tokens = vectors + sum(maps)
    folded_layer = count_attention(width) + _feed_forward(config) + 2 * count_layer_norm(width)

    serving = config.n_encoder_layers * (folded_layer + 3 * width * tokens)
    serving += config.n_decoder_layers * (folded_layer + count_attention(width) + (3 * chunk + 2 * tokens) * width)
    serving += count_linear(width, config.action.shape[0]) + chunk * width + count_linear(width, width)
    serving += _vector_inputs(config) + (
        0 if eye is None else _folded_eye(eye.serving) + count_linear(eye.width, width)
    )

    vision = 0
    if eye is not None:
        is_stacked = platform != "cpu" or sum(height * columns for height, columns in views) <= STACKED_PIXELS
        for size in dict.fromkeys(views):
            count = views.count(size)
            together = batch * (count if is_stacked else 1)
            copies = 0 if count == 1 or is_stacked else 3 * count * batch * size[0] * size[1]
            vision = max(vision, copies + eye.activations(size, together, folded=True, platform=platform))
    up = hidden + hidden // _inputs(config)
    encoder = tokens * (max(5 * width, 3 * width + up)) * batch
    encoder += count_attention_scores(tokens, tokens, config.n_heads, batch, platform=platform)
    decoder = (chunk * max(5 * width, 3 * width + up) + 3 * tokens * width) * batch
    decoder += count_attention_scores(chunk, max(chunk, tokens), config.n_heads, batch, platform=platform)
    arrived = batch * count_resize_numbers(frames or views, views)
    memory = batch * tokens * width

    operations = 0 if eye is None else sum(map(eye.operations, views))
    operations += 2 * config.n_encoder_layers * tokens * (folded_layer + 2 * tokens * width)
    operations += (
        2
        * config.n_decoder_layers
        * (chunk * (folded_layer + count_attention(width) + 2 * (chunk + tokens) * width) + 2 * tokens * width**2)
    )
    return Sizes(
        parameters=_parameters(config),
        serving=serving,
        layers=config.n_encoder_layers + config.n_decoder_layers + config.use_vae * config.n_vae_encoder_layers,
        pixels=sum(height * columns for height, columns in views),
        tokens=tokens,
        activations=arrived + memory + max(vision, encoder, decoder),
        operations=batch * operations,
    )


def _parameters(config: ActConfig) -> int:
    width, chunk, action = config.dim_model, config.chunk_size, config.action.shape[0]
    layer = count_attention(width) + _feed_forward(config) + 2 * count_layer_norm(width)
    last = count_layer_norm(width) if config.pre_norm else 0
    total = config.n_encoder_layers * layer + last
    total += config.n_decoder_layers * (layer + count_attention(width) + count_layer_norm(width)) + count_layer_norm(
        width
    )
    total += count_linear(config.latent_dim, width) + _vector_inputs(config) + _vectors(config) * width
    total += chunk * width + count_linear(width, action)
    if config.cameras:
        eye = measure_backbone(config.vision_backbone, config.replace_final_stride_with_dilation)
        total += eye.parameters + count_linear(eye.width, width)
    if config.use_vae:
        states = 0 if config.state is None else count_linear(config.state.shape[0], width)
        positions = 1 + (config.state is not None) + chunk
        total += config.n_vae_encoder_layers * layer + last + (1 + positions) * width
        total += states + count_linear(action, width) + count_linear(width, 2 * config.latent_dim)
    return total


def _vectors(config: ActConfig) -> int:
    """Tokens that are no pixels: the latent's, the state's and the environment's."""
    return 1 + (config.state is not None) + (config.environment_state is not None)


def _vector_inputs(config: ActConfig) -> int:
    parts = (config.state, config.environment_state)
    return sum(count_linear(part.shape[0], config.dim_model) for part in parts if part is not None)


def _feed_forward(config: ActConfig) -> int:
    return count_feed_forward(config.dim_model, config.dim_feedforward, _inputs(config))


def _inputs(config: ActConfig) -> int:
    return LEROBOT_ACTIVATIONS[config.feedforward_activation].inputs


def _folded_eye(parameters: int) -> int:
    """Kernels of Winograd's have sixteen numbers for nine."""
    return parameters * 16 // 9
