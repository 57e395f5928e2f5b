"""Memory and work of an ACT, from its config alone."""

from collections.abc import Sequence

from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS
from jaxmodels.memory import (
    Frame,
    Sizes,
    attention,
    attention_scores,
    backbone,
    feed_forward,
    layer_norm,
    linear,
    resized,
)
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.act.serving import STACKED_PIXELS


def sizes(config: ActConfig, batch: int = 1, frames: Sequence[Frame] | None = None, *, platform: str = "cpu") -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive."""
    width, hidden, chunk = config.dim_model, config.dim_feedforward, config.chunk_size
    looks = config.frames
    eye = backbone(config.vision_backbone, config.replace_final_stride_with_dilation) if looks else None
    maps = [rows * columns for rows, columns in map(eye.rows, looks)] if eye is not None else []
    vectors = _vectors(config)
    tokens = vectors + sum(maps)
    folded_layer = attention(width) + _feed_forward(config) + 2 * layer_norm(width)

    serving = config.n_encoder_layers * (folded_layer + 3 * width * tokens)
    serving += config.n_decoder_layers * (folded_layer + attention(width) + (3 * chunk + 2 * tokens) * width)
    serving += linear(width, config.action.shape[0]) + chunk * width + linear(width, width)
    serving += _vector_inputs(config) + (0 if eye is None else _folded_eye(eye.serving) + linear(eye.width, width))

    seen = 0
    if eye is not None:
        is_stacked = sum(height * columns for height, columns in looks) <= STACKED_PIXELS
        for size in dict.fromkeys(looks):
            count = looks.count(size)
            together = batch * (count if is_stacked else 1)
            copies = 0 if count == 1 or is_stacked else 3 * count * batch * size[0] * size[1]
            seen = max(seen, copies + eye.activations(size, together, folded=True, platform=platform))
    up = hidden + hidden // _inputs(config)
    encoder = tokens * (max(5 * width, 3 * width + up)) * batch
    encoder += attention_scores(tokens, tokens, config.n_heads, batch, platform=platform)
    decoder = (chunk * max(5 * width, 3 * width + up) + 3 * tokens * width) * batch
    decoder += attention_scores(chunk, max(chunk, tokens), config.n_heads, batch, platform=platform)
    arrived = batch * resized(frames or looks, looks)
    kept = batch * tokens * width

    operations = 0 if eye is None else sum(map(eye.operations, looks))
    operations += 2 * config.n_encoder_layers * tokens * (folded_layer + 2 * tokens * width)
    operations += (
        2
        * config.n_decoder_layers
        * (chunk * (folded_layer + attention(width) + 2 * (chunk + tokens) * width) + 2 * tokens * width**2)
    )
    return Sizes(
        parameters=_parameters(config),
        serving=serving,
        layers=config.n_encoder_layers + config.n_decoder_layers + config.use_vae * config.n_vae_encoder_layers,
        pixels=sum(height * columns for height, columns in looks),
        tokens=tokens,
        activations=arrived + kept + max(seen, encoder, decoder),
        operations=batch * operations,
    )


def _parameters(config: ActConfig) -> int:
    width, chunk, action = config.dim_model, config.chunk_size, config.action.shape[0]
    layer = attention(width) + _feed_forward(config) + 2 * layer_norm(width)
    last = layer_norm(width) if config.pre_norm else 0
    total = config.n_encoder_layers * layer + last
    total += config.n_decoder_layers * (layer + attention(width) + layer_norm(width)) + layer_norm(width)
    total += linear(config.latent_dim, width) + _vector_inputs(config) + _vectors(config) * width
    total += chunk * width + linear(width, action)
    if config.cameras:
        eye = backbone(config.vision_backbone, config.replace_final_stride_with_dilation)
        total += eye.parameters + linear(eye.width, width)
    if config.use_vae:
        states = 0 if config.state is None else linear(config.state.shape[0], width)
        positions = 1 + (config.state is not None) + chunk
        total += config.n_vae_encoder_layers * layer + last + (1 + positions) * width
        total += states + linear(action, width) + linear(width, 2 * config.latent_dim)
    return total


def _vectors(config: ActConfig) -> int:
    """Tokens that are no pixels: the latent's, the state's and the environment's."""
    return 1 + (config.state is not None) + (config.environment_state is not None)


def _vector_inputs(config: ActConfig) -> int:
    parts = (config.state, config.environment_state)
    return sum(linear(part.shape[0], config.dim_model) for part in parts if part is not None)


def _feed_forward(config: ActConfig) -> int:
    return feed_forward(config.dim_model, config.dim_feedforward, _inputs(config))


def _inputs(config: ActConfig) -> int:
    return LEROBOT_ACTIVATIONS[config.feedforward_activation].inputs


def _folded_eye(parameters: int) -> int:
    """Kernels of Winograd's have sixteen numbers for nine."""
    return parameters * 16 // 9
