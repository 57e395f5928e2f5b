"""Memory and work of a SmolVLA, from its config alone."""

from collections.abc import Sequence

from jaxmodels.memory import Frame, Sizes, count_attention_scores, count_linear, count_resize_numbers
from jaxmodels.policies.smolvla.config import SmolVlaConfig


def compute_sizes(
    config: SmolVlaConfig, batch: int = 1, frames: Sequence[Frame | None] | None = None, *, platform: str = "cpu"
) -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive, None for a camera that is not there."""
    present = [frame for frame in (frames or config.frames) if frame is not None]
    resized = config.resize_imgs_with_padding
    looks: list[Frame] = present if resized is None else [(resized[1], resized[0])] * len(present)
    vision, text, expert, steps = config.vlm.vision, config.vlm.text, config.expert, config.expert_steps
    special = 3 * len(config.cameras) if config.add_image_special_tokens else 0
    tokens = sum(config.vlm.count_image_tokens(*look) or 0 for look in looks) + special + config.prompt_length + 1
    layers, keys = steps[-1].vlm_layer, text.kv_heads * text.head_width
    last = text.width + 2 * text.width * keys
    each = [expert.count_layer(keys if step.has_context else None) for step in steps]
    connector = vision.width * config.vlm.scale_factor**2 * text.width
    words = config.vocabulary * text.width
    own = expert.width + count_linear(2 * expert.width, expert.width) + count_linear(expert.width, expert.width)
    own += count_linear(config.max_action_dim, expert.width) + count_linear(expert.width, config.max_action_dim)
    state = count_linear(config.max_state_dim, text.width)
    tower = vision.count_parameters()
    language = layers * text.count_layer() + last
    parameters = tower + connector + words + language + sum(each) + own + state

    grids = [vision.grid(*look) for look in looks]
    patches = [rows * columns for rows, columns in grids]
    together, widest = batch * sum(patches), max(patches, default=0)
    chunk = config.chunk_size
    operations = sum(2 * count * tower + 4 * vision.layers * count**2 * vision.width for count in patches)
    operations += 2 * tokens * language + 4 * layers * tokens**2 * text.heads * text.head_width
    scores = 4 * len(steps) * chunk * (tokens + chunk) * text.heads * text.head_width
    operations += config.num_steps * (2 * chunk * sum(each) + scores)

    images = together * (2 * vision.hidden + 6 * vision.width) + count_attention_scores(
        widest, widest, vision.heads, batch * len(looks), platform=platform
    )
    seen = batch * tokens * (3 * text.hidden + 6 * text.width) + 2 * batch * text.heads * tokens**2
    acting = batch * chunk * (3 * expert.hidden + 6 * expert.width) + 2 * batch * text.heads * chunk * (tokens + chunk)
    kept = 2 * batch * len(steps) * tokens * keys
    return Sizes(
        parameters=parameters,
        serving=parameters,
        layers=vision.layers + layers + len(steps),
        pixels=sum(height * width for height, width in looks),
        tokens=tokens,
        activations=batch * count_resize_numbers(present, looks) + kept + max(images, seen, acting),
        operations=batch * operations,
        prefix=tokens,
        runs_as_read=True,
    )
