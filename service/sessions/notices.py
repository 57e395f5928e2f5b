"""What others are told of a session; ``session.deleted`` comes when it has let go of everything."""

from collections.abc import Callable
from typing import TypeAlias

from service.sessions.request import NewSession
from service.stage import Move, Stage

EVENTS = {
    Move.LOADED: "session.created",
    Move.START: "session.started",
    Move.RESTART: "session.started",
    Move.STOP: "session.stopped",
    Move.EMERGENCY_STOP: "session.stopped",
    Move.FAILED: "session.error",
    Move.EXPIRED: "session.error",
}
Tell: TypeAlias = Callable[[str, dict[str, object]], None]


def notice_of(new: NewSession, stage: Stage, move: Move, reason: str | None) -> tuple[str, dict[str, object]] | None:
    """The event that a move to this stage is, and what it says; None for a move that nobody is told of."""
    if move not in EVENTS:
        return None
    about: dict[str, object] = {
        "session_id": new.session_id,
        "status": str(stage),
        "policy_path": new.policy_path,
    }
    if reason is not None:
        about["reason"] = reason
    if move is Move.EMERGENCY_STOP:
        about["emergency_stop"] = True
    return EVENTS[move], about
