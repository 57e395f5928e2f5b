"""The 2D transformer of diffusers (continuous, discrete and patched input), in Flax."""

from jaxmodels.transformer2d.block import Conditioning, Modulations
from jaxmodels.transformer2d.compiled import CompiledTransformer2D
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.model import Transformer2DModel, Transformer2DModelOutput

__all__ = [
    "CompiledTransformer2D",
    "Conditioning",
    "Modulations",
    "Transformer2DConfig",
    "Transformer2DModel",
    "Transformer2DModelOutput",
]
