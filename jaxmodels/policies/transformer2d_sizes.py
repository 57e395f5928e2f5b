"""How large a policy on the 2D transformer is, and what one chunk of it takes, from its config alone."""

from collections.abc import Sequence

from jaxmodels.checkpoints.diffusers_names import count_parameters
from jaxmodels.policies.transformer2d_config import Transformer2dPolicyConfig
from jaxmodels.sizes import (
    Backbone,
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
from jaxmodels.text.config import TextConfig


def sizes(
    config: Transformer2dPolicyConfig, batch: int = 1, frames: Sequence[Frame] | None = None, *, platform: str = "cpu"
) -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive."""
    width, text, looks, sampling = config.dim_model, config.text_encoder, config.frames, config.sampling
    eye = backbone(config.vision_backbone) if looks else None
    maps = [rows * columns for rows, columns in map(eye.rows, looks)] if eye is not None else []
    seen = (config.state is not None) + (config.environment_state is not None) + sum(maps)
    seen += 0 if text is None else text.length
    parameters = _seeing(config, eye) + count_parameters(config.transformer)
    parameters += 0 if config.looking is None else count_parameters(config.looking, blocks_only=True)
    parameters += 0 if text is None else _text(text)

    looking = max((eye.activations(size, batch, platform=platform) for size in looks), default=0) if eye else 0
    kept = batch * (seen * width * (2 + 2 * config.n_layers) + resized(frames or looks, looks) + sampling.beside)
    n, heads = sampling.tokens, config.n_heads
    layer = feed_forward(width, 4 * width) + 2 * attention(width)
    passing = batch * (n * (18 * width + 5 * sampling.outputs) + n * width * sampling.residuals * config.n_layers)
    passing += attention_scores(n, max(n, seen), heads, batch, platform=platform) + layer
    around = batch * seen * 14 * width + attention_scores(seen, seen, heads, batch, platform=platform) + layer

    each = 2 * config.n_layers * n * (layer + 2 * (n + seen) * width) + 2 * n * width * sampling.outputs
    operations = sampling.steps * each * (3 if sampling.residuals else 1)
    operations += 2 * config.n_encoder_layers * seen * (layer + 2 * seen * width)
    operations += 4 * config.n_layers * seen * width**2 + (sum(map(eye.operations, looks)) if eye else 0)
    return Sizes(
        parameters=parameters,
        serving=parameters,
        layers=1 + (config.n_encoder_layers > 0) + (0 if text is None else text.n_layers),
        pixels=sum(height * columns for height, columns in looks),
        tokens=seen + n,
        activations=kept + sampling.shared + max(looking, passing, around),
        operations=batch * operations,
    )


def _seeing(config: Transformer2dPolicyConfig, eye: Backbone | None) -> int:
    """Parameters of `ObservationTokens`, without its blocks."""
    width, text = config.dim_model, config.text_encoder
    vectors = [part.shape[0] for part in (config.state, config.environment_state) if part is not None]
    total = sum(linear(size, width) for size in vectors) + layer_norm(width)
    total += 0 if eye is None else eye.parameters + linear(eye.width, width)
    if text is not None:
        total += linear(text.width, width) + (0 if eye is None else linear(text.width, 2 * width))
    return total + (len(vectors) + (text is not None) + len(config.cameras)) * width


def _text(text: TextConfig) -> int:
    """Parameters of a text encoder."""
    layer = attention(text.width) + feed_forward(text.width, text.hidden) + 2 * layer_norm(text.width)
    return (text.vocabulary + text.length) * text.width + text.n_layers * layer + layer_norm(text.width)
