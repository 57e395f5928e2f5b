"""What a policy's chunk becomes before any of it can be sent: joined with the plan, judged, clamped."""

import numpy as np

from service.motion.actions import ActionQueue
from service.safety.guard import Guard, Judged, Motion

# Differences of what a policy asks for must be numbers, whatever it asks for.
_WILDEST = 1e30


def planned(
    chunk: np.ndarray,
    actions: ActionQueue,
    guard: Guard,
    motion: Motion,
    first: int,
    *,
    seen_at: float,
    now: float,
    fade: int | None,
) -> tuple[np.ndarray, Judged]:
    """The plan (t, 2 a): each action as the guard lets it pass, and beside it as the policy wanted it.

    Args:
        chunk: (t, a) finite floats.
        actions: what it is joined with; nothing of them changes.
        motion, first: what the plan follows, and its first action that can still be done.
        fade: so many actions lead over from what another policy planned; None for the same policy.

    Returns:
        also what the guard said; without its ``actions`` the plan is refused.
    """
    width = chunk.shape[1]
    wanted = np.clip(chunk, -_WILDEST, _WILDEST).astype(np.float32)
    plan = np.concatenate([wanted, wanted], axis=1)
    plan = actions.joined(plan, seen_at, first) if fade is None else actions.faded(plan, seen_at, now, fade)
    judged = guard.judge(plan[:, :width], motion, first)
    if judged.actions is not None and judged.clamped:
        plan[:, :width] = judged.actions
        if actions.is_between and first:
            # Ticks take points between the action before and this one, so that one is where the motion comes from.
            plan[first - 1, :width] = motion.position
    return plan, judged
