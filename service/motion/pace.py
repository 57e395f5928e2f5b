"""How fast a robot is controlled, and how patient its control is."""

from dataclasses import dataclass
from typing import Literal

from service.motion.overlap import REPLACE, Overlap


@dataclass(frozen=True)
class Pace:
    """Of one session.

    Attributes:
        rate: ticks per second.
        action_rate: actions per second that the policy's chunks are meant for.
        action_steps: actions of a chunk to do before the next one takes over.
        chunk: steps of one chunk.
        width: values of one action.
        overlap: how a new chunk joins what is left of the plan.
        ask_ahead: seconds before it is needed that a chunk is asked for; None: as long as answers are measured to take.
        hold_repeats: how often a hold sends the measured pose.
        on_hold: whether a moving robot is held at once, or slowed down before (RAMP).
        starved_after: seconds without an action after which waiting for the policy is a hold.
        failures_allowed: failed inferences in a row that end in an error, or in a stop when they were no chunks.
        samples: how many of the newest samples percentiles are taken of.
    """

    rate: float
    action_rate: float
    action_steps: int
    chunk: int
    width: int
    overlap: Overlap = REPLACE
    ask_ahead: float | None = None
    hold_repeats: int = 4
    on_hold: Literal["hold", "ramp"] = "hold"
    starved_after: float = 0.3
    failures_allowed: int = 3
    samples: int = 2048
