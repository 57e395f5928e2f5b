"""Pushes that follow each other closely become one look at the head. Pure: every method takes ``now``, in seconds."""

from collections.abc import Iterable
from dataclasses import dataclass

from hooks.deployment.trigger import Target

# Deliveries that are known by their ids for one look at a head, the newest of them: whoever has the secret may send any
# number while a deployment lasts, and each would be written down with its record.
DELIVERIES = 100


@dataclass(frozen=True)
class Hint:
    """A target to look at again, and what said so.

    Attributes:
        trigger: ``webhook`` if any delivery was among it, else ``poll`` or ``folder``.
        webhook_id: of the last delivery.
        delivery_ids: each once, in the order they came; the newest `DELIVERIES`.
    """

    target: Target
    trigger: str
    webhook_id: str | None = None
    delivery_ids: tuple[str, ...] = ()

    def after(self, earlier: "Hint | None") -> "Hint":
        """This one and an earlier one of the same target as one."""
        if earlier is None:
            return self
        return Hint(
            self.target,
            "webhook" if "webhook" in (self.trigger, earlier.trigger) else self.trigger,
            self.webhook_id or earlier.webhook_id,
            newest((*earlier.delivery_ids, *self.delivery_ids)),
        )


def newest(delivery_ids: Iterable[str]) -> tuple[str, ...]:
    """Each once, in this order; the oldest are left out where there are more than `DELIVERIES`."""
    return tuple(dict.fromkeys(delivery_ids))[-DELIVERIES:]


@dataclass
class _Waiting:
    hint: Hint
    first: float
    last: float


class Debounce:
    """Hints, held until nothing further came for ``quiet`` seconds, but no longer than ``longest``."""

    def __init__(self, quiet: float, longest: float):
        self.quiet = quiet
        self.longest = longest
        self._waiting: dict[Target, _Waiting] = {}

    def add(self, hint: Hint, now: float) -> None:
        """Hold one; a delivery that came before (the same id) does not make the wait longer."""
        held = self._waiting.get(hint.target)
        if held is None:
            self._waiting[hint.target] = _Waiting(hint, now, now)
            return
        is_news = not hint.delivery_ids or not set(hint.delivery_ids) <= set(held.hint.delivery_ids)
        held.hint = hint.after(held.hint)
        # A poll that sees what a delivery already told is no further push.
        if is_news and hint.trigger == "webhook":
            held.last = now

    def due(self, now: float) -> list[Hint]:
        """Those whose time has come; they are held no more."""
        ripe = [target for target in self._waiting if self._at(target) <= now]
        return [self._waiting.pop(target).hint for target in ripe]

    def next_at(self) -> float | None:
        """When the next is due."""
        return min(map(self._at, self._waiting), default=None)

    def _at(self, target: Target) -> float:
        held = self._waiting[target]
        return min(held.last + self.quiet, held.first + self.longest)
