"""The 2D transformer of diffusers (continuous, discrete and patched input), in Flax.

Names are looked up when first used: checkpoints need the config of a model that is itself loaded from checkpoints.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.transformer2d.block import Conditioning, Modulations  # noqa: F401
    from jaxmodels.transformer2d.compiled import CompiledTransformer2D  # noqa: F401
    from jaxmodels.transformer2d.config import Transformer2DConfig  # noqa: F401
    from jaxmodels.transformer2d.model import Transformer2DModel, Transformer2DModelOutput  # noqa: F401

_NAMES = {
    "jaxmodels.transformer2d.block": "Conditioning Modulations",
    "jaxmodels.transformer2d.compiled": "CompiledTransformer2D",
    "jaxmodels.transformer2d.config": "Transformer2DConfig",
    "jaxmodels.transformer2d.model": "Transformer2DModel Transformer2DModelOutput",
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
__all__ = [name for names in _NAMES.values() for name in names.split()]  # pyright: ignore[reportUnsupportedDunderAll]
