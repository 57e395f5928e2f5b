"""The 2D transformer of diffusers (continuous, discrete and patched input), in Flax."""

from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.model import Conditioning, Modulations, Transformer2DModel, Transformer2DModelOutput

__all__ = ["Conditioning", "Modulations", "Transformer2DConfig", "Transformer2DModel", "Transformer2DModelOutput"]
