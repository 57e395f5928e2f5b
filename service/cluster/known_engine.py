"""An engine as one front uses it: what it was asked, and what it has for this front."""

import logging
from asyncio import Task
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # pyright: ignore[reportMissingImports] - an extra

from service.cluster.connection import is_unanswered
from service.cluster.pool import Listed
from service.cluster.remote_lane import RemoteLane
from service.cluster.shipment import Copy
from service.engine.device_lane import DeviceGone
from service.errors import ServiceError

logger = logging.getLogger(__name__)


class KnownEngine:
    """One from joining until leaving; the same actor has another name when it is used again.

    Attributes:
        lane: where robots' requests go.
        joined_at: when it came, or failed here; monotonic.
        heard_at: when it said last how it does.
        is_gone: nothing is asked of it any more.
        watching: how it does. completing: with policies that it lacks.
        copies: that it has for this front; of the event loop alone.
    """

    def __init__(self, name: str, listed: Listed, joined_at: float, stuck_after: float):
        self.name = name
        self.listed = listed
        self.lane = RemoteLane(name, self._send, stuck_after)
        self.joined_at = self.heard_at = joined_at
        self.is_gone = False
        self.watching: Task[None] | None = None
        self.completing: Task[None] | None = None
        self.copies: WeakSet[Copy] = WeakSet()
        self._open: set[Future[Any]] = set()
        self._why = ""

    def ask(self, method: str, *arguments: Any) -> "Future[Any]":
        """See `Engines.ask`; from any thread."""
        answer: Future[Any] = Future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        if self.is_gone:
            _settle(answer, DeviceGone(self._why))
            return answer

        def deliver(asked: "Future[Any]") -> None:
            error = asked.exception()
            _settle(answer, asked.result() if error is None else self._unanswered(error))

        try:
            self._call(method, arguments).add_done_callback(deliver)
        except Exception as error:
            _settle(answer, self._unanswered(error))
        return answer

    def _unanswered(self, error: BaseException) -> BaseException:
        return DeviceGone(f"engine {self.name}: {why_gone(error)}") if _is_gone(error) else error

    def fail(self, why: str) -> None:
        """It is gone: whoever waits for it is told now, but for robots, of whom the engine's lane knows."""
        self.is_gone, self._why = True, f"engine {self.name} is not there any more: {why}"
        for answer in tuple(self._open):
            _settle(answer, DeviceGone(self._why))

    def _send(self, method: str, arguments: tuple[Any, ...], done: Callable[[Any], None]) -> None:
        def deliver(asked: "Future[Any]") -> None:
            error = asked.exception()
            done(asked.result() if error is None else _plain(error))

        try:
            self._call(method, arguments).add_done_callback(deliver)
        except Exception as error:
            done(_plain(error))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        return getattr(self.listed.actor, method).remote(*arguments).future()


def why_gone(error: BaseException) -> str:
    """In words of ours: Ray does not always know whether an engine ended."""
    is_known = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    return f"{'its process ended' if is_known else 'it cannot be reached'} ({type(error).__name__})"


def _is_gone(error: BaseException) -> bool:
    # Others of Ray's errors are of what happened in the engine.
    return isinstance(error, RayActorError) or (not isinstance(error, RayError) and is_unanswered(error))


def _settle(answer: "Future[Any]", found: Any) -> None:
    with suppress(InvalidStateError):  # its engine left in the same moment
        if isinstance(found, BaseException):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def _plain(error: BaseException) -> Exception:
    """Ray's errors carry what happened in the engine with all its traceback."""
    if _is_gone(error):
        return DeviceGone(why_gone(error))
    if isinstance(error, ServiceError):
        return error
    logger.error("an engine raised", exc_info=error)
    return RuntimeError(f"the engine raised {type(error).__name__}")
