"""Memory and work of pi0 and pi0.5, from their config alone."""

from collections.abc import Sequence

from jaxmodels.memory import Frame, Sizes, count_attention_scores, count_linear, count_resize_numbers
from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import decoder_sizes, vision_sizes
from jaxmodels.vlm.decoder import DecoderSizes
from jaxmodels.vlm.gemma import count_decoder, count_last_norm


def compute_sizes(
    config: Pi0Config,
    batch: int = 1,
    frames: Sequence[Frame | None] | None = None,
    *,
    platform: str = "cpu",
    is_adaptive: bool = False,
) -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive, None for a camera that is absent.

    Args:
        is_adaptive: of pi0.5's network.
    """
    words, actions, vision = decoder_sizes(config.vlm), decoder_sizes(config.expert), vision_sizes(config)
    arrive = [frame for frame in (config.frames if frames is None else frames) if frame is not None]
    looks = (config.image_resolution,) * len(arrive)
    tower = vision.count_parameters() + count_linear(vision.width, words.width)
    layers, embedding = count_decoder(words), config.vocabulary * words.width
    expert = count_decoder(actions, is_adaptive=is_adaptive)
    ends = count_last_norm(actions, is_adaptive=is_adaptive) + _count_ends(config, is_adaptive=is_adaptive)
    parameters = tower + layers + embedding + expert + ends

    images = len(looks) * config.image_tokens
    seen, suffix = images + config.prompt_length, config.chunk_size + (not is_adaptive)
    kept = 2 * words.layers * words.kv_heads * words.head_width * seen
    looking = batch * images * (6 * vision.width + 2 * vision.hidden)
    looking += count_attention_scores(
        config.image_tokens, config.image_tokens, vision.heads, batch * len(looks), platform=platform
    )
    reading = batch * (kept + _count_activations(words, seen, seen))
    writing = batch * (2 * kept // words.layers + kept + _count_activations(actions, suffix, seen + suffix))
    steps = 6 * actions.layers * actions.width if is_adaptive else actions.width
    arrived = batch * count_resize_numbers(arrive, looks)
    operations = 2 * (tower * images + layers * seen + config.num_inference_steps * expert * suffix)
    operations += 4 * vision.layers * vision.width * config.image_tokens * images
    operations += 4 * words.layers * words.heads * words.head_width * seen**2
    return Sizes(
        parameters=parameters,
        serving=parameters,
        layers=vision.layers + words.layers + actions.layers,
        pixels=sum(height * width for height, width in looks),
        tokens=seen + suffix,
        activations=arrived + max(looking, reading, writing) + config.num_inference_steps * steps,
        operations=batch * operations,
        prefix=seen,
        runs_as_read=True,
    )


def _count_ends(config: Pi0Config, *, is_adaptive: bool) -> int:
    """Parameters of what actions, states and times go through before and behind the expert."""
    width, action = config.expert.width, config.max_action_dim
    count = count_linear(action, width) + count_linear(width, action) + count_linear(width, width)
    if is_adaptive:
        return count + count_linear(width, width)
    return count + count_linear(2 * width, width) + count_linear(config.max_state_dim, width)


def _count_activations(sizes: DecoderSizes, length: int, keys: int) -> int:
    """Numbers in memory in one layer, of one member: its tokens, hidden channels and scores."""
    inner = sizes.heads * sizes.head_width
    return length * (3 * sizes.width + 2 * inner + 3 * sizes.hidden) + 3 * sizes.heads * length * keys
