"""Training of policies from demonstrations.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels.lazy_names import lazy_names

if TYPE_CHECKING:
    from jaxmodels.policies import policy_types
    from jaxmodels.training.augmentation import ImageTransforms, Transform, parse_transforms
    from jaxmodels.training.config import TrainingConfig
    from jaxmodels.training.curve import draw_curve
    from jaxmodels.training.layout import join
    from jaxmodels.training.loop import train
    from jaxmodels.training.optimizers import OptimizerConfig, optimizer_preset
    from jaxmodels.training.reports import Progress
    from jaxmodels.training.schedules import SchedulerConfig, scheduler_preset
    from jaxmodels.training.start import Start, new_policy, policy_fields, trained_policy

__all__ = [
    "ImageTransforms",
    "OptimizerConfig",
    "Progress",
    "SchedulerConfig",
    "Start",
    "TrainingConfig",
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
]

_HOMES = {
    "ImageTransforms": "jaxmodels.training.augmentation",
    "OptimizerConfig": "jaxmodels.training.optimizers",
    "Progress": "jaxmodels.training.reports",
    "SchedulerConfig": "jaxmodels.training.schedules",
    "Start": "jaxmodels.training.start",
    "TrainingConfig": "jaxmodels.training.config",
    "Transform": "jaxmodels.training.augmentation",
    "draw_curve": "jaxmodels.training.curve",
    "join": "jaxmodels.training.layout",
    "new_policy": "jaxmodels.training.start",
    "optimizer_preset": "jaxmodels.training.optimizers",
    "parse_transforms": "jaxmodels.training.augmentation",
    "policy_fields": "jaxmodels.training.start",
    "policy_types": "jaxmodels.policies",
    "scheduler_preset": "jaxmodels.training.schedules",
    "train": "jaxmodels.training.loop",
    "trained_policy": "jaxmodels.training.start",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
