"""Whether the engine has the time for a session, and how often it is asked when it has not."""

import math
from dataclasses import replace

from service.engine.claims import Seen
from service.engine.engine import Engine, Served
from service.errors import Overloaded
from service.motion.pace import Pace


def admitted(engine: Engine, who: object, served: Served, pace: Pace, *, degrade: bool, seen: Seen) -> Pace:
    """The pace that the engine has the time for, which is promised to ``who`` from here on.

    A chunk is asked for every ``action_steps`` actions; with ``degrade`` more of them are done of each chunk, as many
    as it takes.

    Args:
        seen: sizes of the frames that come, which the promise follows.

    Raises:
        Overloaded: there is no time for it; with the figure.
    """
    per_second = pace.action_rate / pace.action_steps
    admission = engine.admit(served, per_second, seen=seen, who=who)
    if not admission.fits:
        steps = math.ceil(pace.action_rate / admission.per_second - 1e-9) if admission.per_second > 0 else math.inf
        if not degrade:
            raise Overloaded(
                f"the engine has no time for this session: {admission.text}; send degrade: true to be asked for less "
                "often, or delete another session"
            )
        if steps > pace.chunk:
            raise Overloaded(
                f"the engine has no time for this session, not even when all {pace.chunk} actions of a chunk are done "
                f"before the next: {admission.text}; delete another session"
            )
        pace = replace(pace, action_steps=int(steps))
    engine.claim(who, served, pace.action_rate / pace.action_steps, seen)
    return pace


def promised(asked: Pace, given: Pace) -> dict[str, object]:
    """How often a session is inferred for, and whether that is less than it asked for; JSON-ready."""
    return {
        "inferences_per_second": round(given.action_rate / given.action_steps, 3),
        "is_degraded": given.action_steps > asked.action_steps,
    }
