"""What one tick of control asks for."""

from dataclasses import dataclass

import numpy as np

from service.motion.buffer import Snapshot


@dataclass(frozen=True)
class Step:
    """What one tick asks for.

    Attributes:
        command: (a,) to be sent now.
        ask: to infer from.
        due: when the plan runs dry unless the answer is there; None when there is no plan.
        is_overtaken: the process stood still while this was decided; the command is not for now any more.
    """

    command: np.ndarray | None = None
    ask: Snapshot | None = None
    due: float | None = None
    is_overtaken: bool = False
