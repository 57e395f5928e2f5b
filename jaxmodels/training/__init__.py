"""Training of policies from demonstrations."""

from jaxmodels.training.config import TrainingConfig
from jaxmodels.training.curve import draw_curve
from jaxmodels.training.loop import Progress, train
from jaxmodels.training.small import small_act

__all__ = ["Progress", "TrainingConfig", "draw_curve", "small_act", "train"]
