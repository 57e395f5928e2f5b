"""Where a session stands and what it says of itself, whether it lives or was interrupted."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from service.motion.drive import Drive
from service.sessions.request import NewSession
from service.sessions.status import About, SessionStatus, queue_of, status_of
from service.stage import Lifecycle, Stage
from service.stats import Tally


def new_claim() -> str:
    """A secret that only a session and the servers of its rooms know."""
    return secrets.token_urlsafe(24)


class Standing(ABC):
    """What sessions of both kinds have in common.

    Attributes:
        new: what was asked for.
        drive: its live parts, if it has any.
        created_at: monotonic.
        figures: each gives a part of the stats; whoever attaches a tap may have something to say.
        claim: see `SessionRecord`.
        refused: commands for its robot that this server's rooms did not let out, by reason: of strangers, and its own.
    """

    def __init__(self, new: NewSession, latch: str | None, claim: str | None = None):
        """``latch`` is the text of an emergency stop of this id that nobody has reset yet."""
        self.new = new
        self.claim = claim or new_claim()
        self.refused = Tally()
        self.drive: Drive | None = None
        self.created_at = time.monotonic()
        self.figures: list[Callable[[], Mapping[str, object]]] = [self._refusals]
        self._life = Lifecycle(new.session_id, latch)

    @property
    def id(self) -> str:
        """Its name."""
        return self.new.session_id

    @property
    def stage(self) -> Stage:
        """Where it stands."""
        return self._life.stage

    @property
    def reason(self) -> str | None:
        """Why it stands there: what ended it, or the text of an error, a timeout or an emergency stop."""
        return self._life.latch or self._life.reason

    @property
    def latch(self) -> str | None:
        """The text of an emergency stop that waits for its reset."""
        return self._life.latch

    @property
    def is_latched(self) -> bool:
        """Whether an emergency stop waits for its reset."""
        return self._life.latch is not None

    def _refusals(self) -> Mapping[str, object]:
        return {"refused_at_room": self.refused.by_reason()}

    def status(self) -> SessionStatus:
        """What the API says of it; JSON-ready."""
        return status_of(self._about(), self.drive, time.monotonic())

    def queue(self) -> dict[str, object]:
        """What it is about to do; JSON-ready."""
        return queue_of(self._about(), self.drive, time.monotonic())

    @abstractmethod
    def _about(self) -> About:
        """What its status is made of."""
