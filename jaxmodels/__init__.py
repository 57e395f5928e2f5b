"""Models for robot policies in JAX: arrays in, arrays out.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels.lazy_names import lazy_names

if TYPE_CHECKING:
    from jaxmodels.caches import cache_folder, user_cache
    from jaxmodels.checkpoints.folder import PolicyFolder, open_file
    from jaxmodels.description import read_requirements
    from jaxmodels.ensembling import TemporalEnsembler
    from jaxmodels.finding import POLICY_FILES, find_policy
    from jaxmodels.hosts import join_hosts
    from jaxmodels.hub import hub_limits
    from jaxmodels.loaded_model import LoadedModel, is_model, load_model
    from jaxmodels.loading import load_policy
    from jaxmodels.placement import name_devices
    from jaxmodels.policy import Policy
    from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
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
    "cache_folder",
    "find_policy",
    "hub_limits",
    "is_model",
    "join_hosts",
    "load_model",
    "load_policy",
    "name_devices",
    "open_file",
    "read_requirements",
    "user_cache",
]

_HOMES = {
    "LoadedModel": "jaxmodels.loaded_model",
    "POLICY_FILES": "jaxmodels.finding",
    "Policy": "jaxmodels.policy",
    "PolicyFolder": "jaxmodels.checkpoints.folder",
    "Requirements": "jaxmodels.types",
    "TemporalEnsembler": "jaxmodels.ensembling",
    "Transformer2DConfig": "jaxmodels.transformer2d",
    "Transformer2DModel": "jaxmodels.transformer2d",
    "cache_folder": "jaxmodels.caches",
    "find_policy": "jaxmodels.finding",
    "hub_limits": "jaxmodels.hub",
    "is_model": "jaxmodels.loaded_model",
    "join_hosts": "jaxmodels.hosts",
    "load_model": "jaxmodels.loaded_model",
    "load_policy": "jaxmodels.loading",
    "name_devices": "jaxmodels.placement",
    "open_file": "jaxmodels.checkpoints.folder",
    "read_requirements": "jaxmodels.description",
    "user_cache": "jaxmodels.caches",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
