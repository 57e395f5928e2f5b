"""Training of policies from demonstrations.

Names are looked up when first used, so that importing this package does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "scheduler_preset",
    "train",
    "trained_policy",
]

_HOMES = {
    "ImageTransforms": "augmentation",
    "OptimizerConfig": "optimizers",
    "Progress": "reports",
    "SchedulerConfig": "schedules",
    "Start": "start",
    "TrainingConfig": "config",
    "Transform": "augmentation",
    "draw_curve": "curve",
    "join": "layout",
    "new_policy": "start",
    "optimizer_preset": "optimizers",
    "parse_transforms": "augmentation",
    "policy_fields": "start",
    "scheduler_preset": "schedules",
    "train": "loop",
    "trained_policy": "start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
