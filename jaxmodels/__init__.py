"""Models for robot policies in JAX: arrays in, arrays out.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.cache_dirs import cache_folder, hub_cache, user_cache
    from jaxmodels.checkpoints.folder import PolicyFolder, open_file
    from jaxmodels.checkpoints.tokenizer_process import isolate_tokenizers
    from jaxmodels.devices import name_devices
    from jaxmodels.export import export_policy
    from jaxmodels.gates import ActionGate, measure_action_gate
    from jaxmodels.hub import POLICY_FILES, ask_hub, fetch, find_policy, is_policy_file, list_policy_files
    from jaxmodels.loading import load_policy, read_requirements
    from jaxmodels.policies.act.model import TemporalEnsembler
    from jaxmodels.policy import Policy
    from jaxmodels.roofline import ACCELERATORS
    from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
    from jaxmodels.transformer2d.loaded_model import LoadedModel, is_model, load_model
    from jaxmodels.types import Requirements

__all__ = [
    "ACCELERATORS",
    "POLICY_FILES",
    "ActionGate",
    "LoadedModel",
    "Policy",
    "PolicyFolder",
    "Requirements",
    "TemporalEnsembler",
    "Transformer2DConfig",
    "Transformer2DModel",
    "ask_hub",
    "cache_folder",
    "export_policy",
    "fetch",
    "find_policy",
    "hub_cache",
    "is_model",
    "is_policy_file",
    "isolate_tokenizers",
    "list_policy_files",
    "load_model",
    "load_policy",
    "measure_action_gate",
    "name_devices",
    "open_file",
    "read_requirements",
    "user_cache",
]

_NAMES = {
    "jaxmodels.cache_dirs": "cache_folder hub_cache user_cache",
    "jaxmodels.checkpoints.folder": "PolicyFolder open_file",
    "jaxmodels.checkpoints.tokenizer_process": "isolate_tokenizers",
    "jaxmodels.devices": "name_devices",
    "jaxmodels.gates": "ActionGate measure_action_gate",
    "jaxmodels.export": "export_policy",
    "jaxmodels.hub": "POLICY_FILES ask_hub fetch find_policy is_policy_file list_policy_files",
    "jaxmodels.loading": "load_policy read_requirements",
    "jaxmodels.policies.act.model": "TemporalEnsembler",
    "jaxmodels.policy": "Policy",
    "jaxmodels.roofline": "ACCELERATORS",
    "jaxmodels.transformer2d": "Transformer2DConfig Transformer2DModel",
    "jaxmodels.transformer2d.loaded_model": "LoadedModel is_model load_model",
    "jaxmodels.types": "Requirements",
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
