"""Models for robot policies in JAX: arrays in, arrays out.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.cache_dirs import cache_folder, hub_cache, user_cache
    from jaxmodels.checkpoints.folder import PolicyFolder, open_file
    from jaxmodels.devices import name_devices
    from jaxmodels.hub import POLICY_FILES, ask_hub, fetch, find_policy, is_policy_file, list_policy_files
    from jaxmodels.policies.act.model import TemporalEnsembler
    from jaxmodels.policy import Policy, load_policy, read_requirements
    from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
    from jaxmodels.transformer2d.loaded_model import LoadedModel, is_model, load_model
    from jaxmodels.types import Requirements

__all__ = [
    "POLICY_FILES",
    "LoadedModel",
    "Policy",
    "PolicyFolder",
    "Requirements",
    "TemporalEnsembler",
    "Transformer2DConfig",
    "Transformer2DModel",
    "ask_hub",
    "cache_folder",
    "fetch",
    "find_policy",
    "hub_cache",
    "is_model",
    "is_policy_file",
    "list_policy_files",
    "load_model",
    "load_policy",
    "name_devices",
    "open_file",
    "read_requirements",
    "user_cache",
]

_HOMES = {
    "LoadedModel": "jaxmodels.transformer2d.loaded_model",
    "POLICY_FILES": "jaxmodels.hub",
    "Policy": "jaxmodels.policy",
    "PolicyFolder": "jaxmodels.checkpoints.folder",
    "Requirements": "jaxmodels.types",
    "TemporalEnsembler": "jaxmodels.policies.act.model",
    "Transformer2DConfig": "jaxmodels.transformer2d",
    "Transformer2DModel": "jaxmodels.transformer2d",
    "ask_hub": "jaxmodels.hub",
    "cache_folder": "jaxmodels.cache_dirs",
    "fetch": "jaxmodels.hub",
    "find_policy": "jaxmodels.hub",
    "is_model": "jaxmodels.transformer2d.loaded_model",
    "is_policy_file": "jaxmodels.hub",
    "list_policy_files": "jaxmodels.hub",
    "load_model": "jaxmodels.transformer2d.loaded_model",
    "load_policy": "jaxmodels.policy",
    "name_devices": "jaxmodels.devices",
    "open_file": "jaxmodels.checkpoints.folder",
    "read_requirements": "jaxmodels.policy",
    "hub_cache": "jaxmodels.cache_dirs",
    "user_cache": "jaxmodels.cache_dirs",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
