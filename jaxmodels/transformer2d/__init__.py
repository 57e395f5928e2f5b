"""The 2D transformer of diffusers (continuous, discrete and patched input), in Flax.

Names are looked up when first used: checkpoints need the config of a model that is itself loaded from checkpoints.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmodels.transformer2d.compiled import CompiledTransformer2D
    from jaxmodels.transformer2d.conditioning import Conditioning, Modulations
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

_HOMES = {
    "CompiledTransformer2D": "compiled",
    "Conditioning": "conditioning",
    "Modulations": "conditioning",
    "Transformer2DConfig": "config",
    "Transformer2DModel": "model",
    "Transformer2DModelOutput": "model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
