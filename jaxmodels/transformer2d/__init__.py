"""The 2D transformer of diffusers (continuous, discrete and patched input), in Flax.

Names are looked up when first used: checkpoints need the config of a model that is itself loaded from checkpoints.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
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

_NAMES = {
    "jaxmodels.transformer2d.block": "Conditioning Modulations",
    "jaxmodels.transformer2d.compiled": "CompiledTransformer2D",
    "jaxmodels.transformer2d.config": "Transformer2DConfig",
    "jaxmodels.transformer2d.model": "Transformer2DModel Transformer2DModelOutput",
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
