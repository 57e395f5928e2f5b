"""How large a diffusion2d is, and what one chunk of it takes, from its config alone."""

from collections.abc import Sequence

from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.transformer2d_sizes import Sampling, sizes_of
from jaxmodels.sizes import Frame, Sizes

RESIDUALS = 36  # numbers per token and channel that a block keeps for the gradient of a guided step


def sizes(
    config: Diffusion2dConfig, batch: int = 1, frames: Sequence[Frame] | None = None, *, platform: str = "cpu"
) -> Sizes:
    """Of a config that was checked; for frames of other sizes as they arrive."""
    width, steps = config.dim_model, config.num_inference_steps
    passes = 2 * steps - 1 if config.flow_solver == "heun" else steps
    parts = 6 * width * config.n_layers  # shifts, scales and gates of all layers at one time
    sampling = Sampling(
        tokens=config.chunk_size,
        steps=passes,
        residuals=RESIDUALS if config.prefix_through_model else 0,
        beside=config.chunk_size * parts if config.trained_prefix else 0,
        shared=2 * passes * parts,
        outputs=config.action.shape[0],
    )
    return sizes_of(config, sampling, batch, frames, platform)
