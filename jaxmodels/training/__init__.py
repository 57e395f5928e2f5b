"""Training of policies from demonstrations.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.devices import join
    from jaxmodels.policies import policy_types, trained_types
    from jaxmodels.training.augmentation import ImageTransforms, Transform, parse_transforms
    from jaxmodels.training.config import TrainingConfig
    from jaxmodels.training.initial_policy import Start, new_policy, policy_fields, trained_policy
    from jaxmodels.training.loop import train
    from jaxmodels.training.optimizers import OptimizerConfig, SchedulerConfig, optimizer_preset, scheduler_preset
    from jaxmodels.training.progress import TrainingProgress, draw_curve

__all__ = [
    "ImageTransforms",
    "OptimizerConfig",
    "SchedulerConfig",
    "Start",
    "TrainingConfig",
    "TrainingProgress",
    "Transform",
    "draw_curve",
    "join",
    "new_policy",
    "optimizer_preset",
    "parse_transforms",
    "policy_fields",
    "policy_types",
    "scheduler_preset",
    "train",
    "trained_policy",
    "trained_types",
]

_NAMES = {
    "jaxmodels.devices": "join",
    "jaxmodels.policies": "policy_types trained_types",
    "jaxmodels.training.augmentation": "ImageTransforms Transform parse_transforms",
    "jaxmodels.training.config": "TrainingConfig",
    "jaxmodels.training.initial_policy": "Start new_policy policy_fields trained_policy",
    "jaxmodels.training.loop": "train",
    "jaxmodels.training.optimizers": "OptimizerConfig SchedulerConfig optimizer_preset scheduler_preset",
    "jaxmodels.training.progress": "TrainingProgress draw_curve",
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
