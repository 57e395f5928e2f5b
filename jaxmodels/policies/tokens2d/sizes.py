"""How large a tokens2d is, and what one chunk of it takes, from its config alone."""

from collections.abc import Sequence

from jaxmodels.policies.tokens2d.config import Tokens2dConfig
from jaxmodels.policies.transformer2d_sizes import Sampling, sizes_of
from jaxmodels.sizes import Frame, Sizes


def sizes(
    config: Tokens2dConfig, batch: int = 1, frames: Sequence[Frame] | None = None, *, platform: str = "cpu"
) -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive."""
    sampling = Sampling(
        tokens=config.chunk_size * config.action.shape[0],
        steps=config.num_inference_steps,
        residuals=0,
        beside=0,
        shared=0,
        outputs=config.bins,
    )
    return sizes_of(config, sampling, batch, frames, platform)
