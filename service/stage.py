"""Stages of a session and the allowed moves between them, as a table."""

from enum import StrEnum

from service.errors import MoveRefused


class Stage(StrEnum):
    """Stage of a session; the value is the word on the wire (``deleted`` is never listed)."""

    INITIALIZING = "initializing"
    READY = "ready"
    RUNNING = "running"
    STOPPED = "stopped"
    ERROR = "error"
    TIMEOUT = "timeout"
    DEGRADED = "degraded"
    RECONNECTING = "reconnecting"
    INTERRUPTED = "interrupted"
    DELETED = "deleted"


class Move(StrEnum):
    """Change of a session. Clients request the moves in ``REQUESTABLE``; events cause the others."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    RESET = "reset"
    EMERGENCY_STOP = "emergency_stop"
    DELETE = "delete"
    LOADED = "loaded"
    FAILED = "failed"
    LINK_LOST = "link_lost"
    LINK_BACK = "link_back"
    EXPIRED = "expired"
    BLINDED = "blinded"
    RECOVERED = "recovered"


REQUESTABLE = (Move.START, Move.STOP, Move.RESTART, Move.RESET, Move.EMERGENCY_STOP, Move.DELETE)

_STOPPABLE = tuple(map(Stage, ("ready", "running", "degraded", "reconnecting", "stopped", "timeout")))
# `reconnecting` means "running, but a room is lost", and `degraded` means "running, but held for seconds because input
# is missing". A second stop is allowed, so that a person who presses stop again sees no error. An `interrupted` session
# has no policy and no rooms; a restart loads and joins them, but moves nothing.
_MOVES: tuple[tuple[Move, Stage | None, tuple[Stage, ...]], ...] = (  # move, next stage (None: the same), from stages
    (Move.LOADED, Stage.READY, (Stage.INITIALIZING,)),
    (Move.START, Stage.RUNNING, (Stage.READY, Stage.STOPPED)),
    (Move.RESTART, Stage.RUNNING, (*_STOPPABLE, Stage.ERROR)),
    (Move.RESTART, Stage.INITIALIZING, (Stage.INTERRUPTED,)),
    (Move.STOP, Stage.STOPPED, _STOPPABLE),
    (Move.EMERGENCY_STOP, Stage.STOPPED, _STOPPABLE),
    # The latch of a session that is being deleted also holds for the next session with its id.
    (Move.EMERGENCY_STOP, None, (Stage.INITIALIZING, Stage.ERROR, Stage.INTERRUPTED, Stage.DELETED)),
    (Move.RESET, None, (Stage.INITIALIZING, Stage.READY, Stage.STOPPED, Stage.ERROR, Stage.INTERRUPTED)),
    (Move.FAILED, Stage.ERROR, (Stage.INITIALIZING, *_STOPPABLE, Stage.ERROR)),
    (Move.EXPIRED, Stage.TIMEOUT, (Stage.READY, Stage.RUNNING, Stage.DEGRADED, Stage.RECONNECTING)),
    (Move.LINK_LOST, Stage.RECONNECTING, (Stage.RUNNING, Stage.DEGRADED)),
    (Move.LINK_BACK, Stage.RUNNING, (Stage.RECONNECTING,)),
    (Move.BLINDED, Stage.DEGRADED, (Stage.RUNNING,)),
    (Move.RECOVERED, Stage.RUNNING, (Stage.DEGRADED,)),
    (Move.DELETE, Stage.DELETED, tuple(stage for stage in Stage if stage is not Stage.DELETED)),
)
TRANSITIONS: dict[tuple[Stage, Move], Stage] = {
    (stage, move): following or stage for move, following, stages in _MOVES for stage in stages
}

# Moves that start the arm: they need a loaded policy and joined rooms, and no emergency stop.
STARTING_MOVES = frozenset({Move.START, Move.RESTART})
# Stages in which a robot moves, or moves again as soon as its input or link is back.
MOVING = frozenset({Stage.RUNNING, Stage.DEGRADED, Stage.RECONNECTING})


class Lifecycle:
    """Stage, reason and latch of one session, changed by moves of the table.

    Attributes:
        stage: the present stage.
        reason: text of an error, a timeout or an emergency stop; None after a request.
        latch: the reason of an emergency stop that has not been reset, or None.
        is_loaded: whether the policy is loaded and the rooms are joined.
    """

    def __init__(self, session_id: str, latch: str | None = None):
        """Start initializing; ``latch`` is an emergency stop of this id that has not been reset."""
        self.stage = Stage.INITIALIZING
        self.reason: str | None = None
        self.latch = latch
        self.is_loaded = False
        self._session_id = session_id

    def is_allowed(self, move: Move) -> bool:
        """Return whether a move is allowed now."""
        if move in STARTING_MOVES and (self.latch is not None or not (self.is_loaded or self._is_interrupted)):
            return False
        return (self.stage, move) in TRANSITIONS

    @property
    def _is_interrupted(self) -> bool:
        return self.stage is Stage.INTERRUPTED

    def check(self, move: Move) -> None:
        """Refuse a move that is not allowed now.

        Raises:
            MoveRefused: the message names the allowed moves and the next step.
        """
        if not self.is_allowed(move):
            raise MoveRefused(self._refusal(move))

    def move(self, move: Move, reason: str | None = None) -> Stage:
        """Make a move; ``reason`` is kept as the reason of the new stage.

        Raises:
            MoveRefused: the table has no such move from here; the message names the allowed ones.
        """
        self.check(move)
        self.stage = TRANSITIONS[self.stage, move]
        if move is Move.EMERGENCY_STOP:
            # The first reason stays, because a person must check it before the reset.
            self.latch = self.latch or reason or "no reason given"
        elif move is Move.RESET:
            self.latch = None
        if move is Move.FAILED or self.stage not in (Stage.ERROR, Stage.INTERRUPTED):
            self.reason = reason
        if move is Move.LOADED and self.latch is not None:
            self.stage = TRANSITIONS[self.stage, Move.EMERGENCY_STOP]
        return self.stage

    def _refusal(self, move: Move) -> str:
        name = f"session {self._session_id!r}"
        if move in STARTING_MOVES and self.latch is not None:
            return (
                f"{name} cannot {move}: an emergency stop is latched ({self.latch}); make sure that the robot is safe, "
                f"then POST /debug/sessions/{self._session_id}/reset, "
                f"then {'restart' if self._is_interrupted else 'start'}"
            )
        allowed = ", ".join(str(other) for other in REQUESTABLE if self.is_allowed(other)) or "none"
        return f"{name} is {self.stage} and cannot {move}; allowed now: {allowed}{self._next_step(move)}"

    def _next_step(self, move: Move) -> str:
        """Return the next step after this refusal, as the end of its sentence; empty if the moves are enough."""
        path = f"/sessions/{self._session_id}"
        if self.stage is Stage.INITIALIZING:
            return f"; wait until GET {path} says that it is ready"
        if move is Move.RESET:
            return "; no emergency stop is latched, so there is nothing to reset"
        if move in STARTING_MOVES and not (self.is_loaded or self._is_interrupted):
            return f"; it runs no policy any more: DELETE {path}, then create it again"
        if self._is_interrupted:
            return f"; nothing moves: POST {path}/restart loads it again, then POST {path}/start moves the robot"
        if move is Move.START and self.stage in MOVING:
            return f"; it was started already: POST {path}/restart begins again with an empty queue"
        if move is Move.START and self.is_allowed(Move.RESTART):
            return f"; POST {path}/restart starts it again, once its cameras and joints are back"
        return ""
