"""Triggers: webhook deliveries and polls, debounced into refs whose head is looked at again."""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hooks.payload import WebhookPayload
from service.rollout.rollout import FollowingSession

BRANCH, TAG = "refs/heads/", "refs/tags/"
# Pull requests and the Hub's own conversions are not releases.
IGNORED_REFS = ("refs/pr/", "refs/convert/")


@dataclass(frozen=True)
class TriggerTarget:
    """A ref of a repo that sessions follow."""

    repo: str
    ref: str

    @classmethod
    def of_session(cls, one: FollowingSession) -> "TriggerTarget":
        """Return the ref that a session follows; the Hub calls every default branch ``main``."""
        return cls(one.repo, one.ref or "main")


@dataclass(frozen=True)
class Interpretation:
    """Effect of a webhook delivery on the sessions."""

    targets: tuple[TriggerTarget, ...] = ()  # refs whose head is to be checked
    alert: tuple[str, str] | None = None  # code and text if a followed repo was moved, deleted or made private
    ignored: str | None = None  # why the delivery has no effect


def is_pattern(ref: str) -> bool:
    """Return whether a ref is a pattern of tags; git allows none of these characters in a name."""
    return any(letter in ref for letter in "*?[")


def matches_ref(followed: str, moved: str) -> bool:
    """Return whether the ref that moved (``refs/heads/main``) is the followed one."""
    if is_pattern(followed):
        return moved.startswith(TAG) and fnmatchcase(moved.removeprefix(TAG), followed.removeprefix(TAG))
    return moved in (followed, BRANCH + followed, TAG + followed)


def interpret_delivery(payload: WebhookPayload, sessions: Iterable[FollowingSession]) -> Interpretation:
    """Interpret a delivery; only which ref moved counts, not the commit that it names."""
    repo, event = payload.repo, payload.event
    followed = {TriggerTarget.of_session(one): None for one in sessions if one.mode != "off" and one.repo == repo.name}
    if repo.type != "model" or not followed:
        return Interpretation(ignored=f"no session follows the {repo.type} {repo.name}")
    if payload.is_about("repo.content"):
        return _interpret_push(payload, list(followed))
    if event.scope == "repo" and event.action == "delete":
        code, what = "repo_deleted", "was deleted"
    elif event.scope == "repo" and event.action == "move":
        code, what = "repo_moved", f"was moved{f' to {payload.movedTo.name}' if payload.movedTo else ''}"
    elif payload.is_about("repo.config") and (payload.updatedConfig or {}).get("private") is True:
        code, what = "repo_private", "was made private"
    else:
        return Interpretation(ignored=f"{event.action} of {event.scope} changes no policy")
    return Interpretation(alert=(code, f"{repo.name} {what}; sessions go on with what they run"))


def _interpret_push(payload: WebhookPayload, followed: list[TriggerTarget]) -> Interpretation:
    if payload.updatedRefs is None:
        return Interpretation(tuple(followed))  # the delivery names no ref, so all followed refs are checked
    moved = [ref.ref for ref in payload.updatedRefs if ref.newSha is not None and not ref.ref.startswith(IGNORED_REFS)]
    targets = tuple(target for target in followed if any(matches_ref(target.ref, ref) for ref in moved))
    if not targets:
        named = ", ".join(f"{ref.ref} deleted" if ref.newSha is None else ref.ref for ref in payload.updatedRefs)
        return Interpretation(ignored=f"no session follows {named or 'what moved'}")
    return Interpretation(targets)


# Newest delivery ids that one trigger keeps: a sender may send any number, and all would be saved with the record.
MAX_DELIVERY_IDS = 100


@dataclass(frozen=True)
class Trigger:
    """A ref whose head is to be checked, and the cause."""

    target: TriggerTarget
    kind: str  # ``webhook`` if any delivery caused it, else ``poll`` or ``folder``
    webhook_id: str | None = None  # webhook of the last delivery
    delivery_ids: tuple[str, ...] = ()  # unique, in the order of arrival; the newest `MAX_DELIVERY_IDS`

    def merge(self, earlier: "Trigger | None") -> "Trigger":
        """Merge this trigger with an earlier trigger of the same ref."""
        if earlier is None:
            return self
        kind = "webhook" if "webhook" in (self.kind, earlier.kind) else self.kind
        ids = newest_ids((*earlier.delivery_ids, *self.delivery_ids))
        return Trigger(self.target, kind, self.webhook_id or earlier.webhook_id, ids)


def newest_ids(delivery_ids: Iterable[str]) -> tuple[str, ...]:
    """Return each id once, in this order; the oldest are left out where there are more than `MAX_DELIVERY_IDS`."""
    return tuple(dict.fromkeys(delivery_ids))[-MAX_DELIVERY_IDS:]


@dataclass
class _Waiting:
    trigger: Trigger
    first: float
    last: float


class TriggerQueue:
    """Holds triggers until nothing further came for ``quiet`` seconds, but no longer than ``longest``."""

    def __init__(self, quiet: float, longest: float, now: Callable[[], float]):
        self.quiet = quiet
        self.longest = longest
        self._now = now
        self._waiting: dict[TriggerTarget, _Waiting] = {}
        self._has_incoming = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether no trigger is held."""
        return not self._waiting

    def put(self, trigger: Trigger) -> None:
        """Hold a trigger; a delivery that came before (the same id) does not make the wait longer."""
        self._has_incoming.set()
        now, held = self._now(), self._waiting.get(trigger.target)
        if held is None:
            self._waiting[trigger.target] = _Waiting(trigger, now, now)
            return
        is_news = not trigger.delivery_ids or not set(trigger.delivery_ids) <= set(held.trigger.delivery_ids)
        held.trigger = trigger.merge(held.trigger)
        # A poll that finds the same head as a delivery is not another push.
        if is_news and trigger.kind == "webhook":
            held.last = now

    def take_due(self) -> list[Trigger]:
        """Remove and return the triggers that are due."""
        now = self._now()
        ripe = [target for target in self._waiting if self._due_at(target) <= now]
        return [self._waiting.pop(target).trigger for target in ripe]

    def next_at(self) -> float | None:
        """Return when the next trigger is due."""
        return min(map(self._due_at, self._waiting), default=None)

    def _due_at(self, target: TriggerTarget) -> float:
        held = self._waiting[target]
        return min(held.last + self.quiet, held.first + self.longest)

    async def wait_for_due(self) -> Sequence[Trigger]:
        """Wait for triggers that are due, and return them."""
        while not (ripe := self.take_due()):
            self._has_incoming.clear()
            at = self.next_at()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if at is None else max(0.0, at - self._now())):
                    await self._has_incoming.wait()
        return ripe


class Retries:
    """Exponential backoff per key, up to a longest wait."""

    def __init__(self, first: float, longest: float):
        self.first = first
        self.longest = longest
        self._failed: dict[Hashable, tuple[int, float]] = {}

    def record_failure(self, key: Hashable, now: float) -> None:
        """Start a wait that is twice as long as the wait before."""
        count = self._failed.get(key, (0, 0.0))[0]
        self._failed[key] = (count + 1, now + min(self.first * 2.0 ** min(count, 60), self.longest))

    def may_retry(self, key: Hashable, now: float) -> bool:
        """Return whether the wait is over, if there was any."""
        return self._failed.get(key, (0, now))[1] <= now

    def record_success(self, key: Hashable) -> None:
        """Forget earlier failures."""
        self._failed.pop(key, None)
