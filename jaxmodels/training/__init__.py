"""Training of policies from demonstrations.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxmodels._lazy import lazy_names

if TYPE_CHECKING:
    from jaxmodels.devices import join  # noqa: F401
    from jaxmodels.policies import policy_types, trained_types  # noqa: F401
    from jaxmodels.training.augmentation import ImageTransforms, Transform, parse_transforms  # noqa: F401
    from jaxmodels.training.config import TrainingConfig  # noqa: F401
    from jaxmodels.training.initial_policy import Start, new_policy, policy_fields, trained_policy  # noqa: F401
    from jaxmodels.training.loop import train  # noqa: F401
    from jaxmodels.training.optimizers import OptimizerConfig, SchedulerConfig, optimizer_preset, scheduler_preset  # noqa: F401
    from jaxmodels.training.progress import Progress, draw_curve  # noqa: F401

_NAMES = {
    "jaxmodels.devices": "join",
    "jaxmodels.policies": "policy_types trained_types",
    "jaxmodels.training.augmentation": "ImageTransforms Transform parse_transforms",
    "jaxmodels.training.config": "TrainingConfig",
    "jaxmodels.training.initial_policy": "Start new_policy policy_fields trained_policy",
    "jaxmodels.training.loop": "train",
    "jaxmodels.training.optimizers": "OptimizerConfig SchedulerConfig optimizer_preset scheduler_preset",
    "jaxmodels.training.progress": "Progress draw_curve",
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
__all__ = [name for names in _NAMES.values() for name in names.split()]  # pyright: ignore[reportUnsupportedDunderAll]
