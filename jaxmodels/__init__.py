"""Models for robot policies in JAX: arrays in, arrays out.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.cache_dirs import cache_folder, hub_cache, user_cache  # noqa: F401
    from jaxmodels.checkpoints.folder import PolicyFolder, open_file  # noqa: F401
    from jaxmodels.devices import name_devices  # noqa: F401
    from jaxmodels.hub import POLICY_FILES, ask_hub, fetch, find_policy, is_policy_file, list_policy_files  # noqa: F401
    from jaxmodels.policies.act.model import TemporalEnsembler  # noqa: F401
    from jaxmodels.policy import Policy, load_policy, read_requirements  # noqa: F401
    from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel  # noqa: F401
    from jaxmodels.transformer2d.loaded_model import LoadedModel, is_model, load_model  # noqa: F401
    from jaxmodels.types import Requirements  # noqa: F401

_NAMES = {
    "jaxmodels.cache_dirs": "cache_folder hub_cache user_cache",
    "jaxmodels.checkpoints.folder": "PolicyFolder open_file",
    "jaxmodels.devices": "name_devices",
    "jaxmodels.hub": "POLICY_FILES ask_hub fetch find_policy is_policy_file list_policy_files",
    "jaxmodels.policies.act.model": "TemporalEnsembler",
    "jaxmodels.policy": "Policy load_policy read_requirements",
    "jaxmodels.transformer2d": "Transformer2DConfig Transformer2DModel",
    "jaxmodels.transformer2d.loaded_model": "LoadedModel is_model load_model",
    "jaxmodels.types": "Requirements",
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
__all__ = [name for names in _NAMES.values() for name in names.split()]  # pyright: ignore[reportUnsupportedDunderAll]
