"""Observers of a session's frames, chunks and ticks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tick:
    """One tick of the control loop, or a stop.

    Attributes:
        at: monotonic time.
        command: command (a,) float32, or None.
        is_sent: whether the link took the command (never in a dry run).
        pose: measured pose (a,), or None while a joint has no value.
        hold: stable code of the hold, or None while the robot may move.
    """

    at: float
    command: np.ndarray | None
    is_sent: bool
    pose: np.ndarray | None
    hold: str | None


class SessionObserver(Protocol):
    """Observer of a session, whose methods run on the event loop between two ticks and must neither wait nor raise."""

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Receive a usable frame: uint8 (h, w, 3), RGB, which is not changed later."""
        ...

    def on_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        """Receive an accepted chunk (t, a) for the observation at ``observed_at``."""
        ...

    def on_tick(self, tick: Tick) -> None:
        """Receive a tick."""
        ...


class SessionObservers:
    """All observers of one session. An observer that raises is detached.

    Attributes:
        attached: present observers; the tuple is replaced, so that it may change during a notification.
    """

    def __init__(self) -> None:
        self.attached: tuple[SessionObserver, ...] = ()

    def attach(self, observer: SessionObserver) -> Callable[[], None]:
        """Attach an observer; the returned function detaches it, and may be called twice."""
        self.attached = (*self.attached, observer)
        return lambda: self._detach(observer)

    def notify_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Notify all observers of a frame."""
        self._notify("on_frame", camera, image, observed_at)

    def notify_chunk(self, chunk: np.ndarray, observed_at: float, at: float) -> None:
        """Notify all observers of a chunk."""
        self._notify("on_chunk", chunk, observed_at, at)

    def notify_tick(self, tick: Tick) -> None:
        """Notify all observers of a tick."""
        self._notify("on_tick", tick)

    def _notify(self, method: str, *arguments: object) -> None:
        for observer in self.attached:
            try:
                getattr(observer, method)(*arguments)
            except Exception:
                logger.exception("observer %s failed and is detached", type(observer).__name__)
                self._detach(observer)

    def _detach(self, observer: SessionObserver) -> None:
        self.attached = tuple(other for other in self.attached if other is not observer)
