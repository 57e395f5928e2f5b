"""What a delivery says to continuous delivery: look again at these refs, tell somebody, or nothing. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hooks.deployment.rollout import Follower
from hooks.payload import WebhookPayload

BRANCH, TAG = "refs/heads/", "refs/tags/"
# Proposals and what the Hub converts by itself are nobody's release.
IGNORED_REFS = ("refs/pr/", "refs/convert/")


@dataclass(frozen=True)
class Target:
    """What sessions follow: a ref of a repo."""

    repo: str
    ref: str

    @classmethod
    def of(cls, one: Follower) -> "Target":
        """That of a session; the Hub calls every default branch ``main``."""
        return cls(one.repo, one.ref or "main")


@dataclass(frozen=True)
class Reading:
    """What a delivery means.

    Attributes:
        targets: refs whose head is to be looked at again.
        alert: a code and a text for people: what is followed was moved, deleted or made private. Serving goes on.
        ignored: why it means nothing, if it does.
    """

    targets: tuple[Target, ...] = ()
    alert: tuple[str, str] | None = None
    ignored: str | None = None


def is_pattern(ref: str) -> bool:
    """Whether a ref stands for all tags of a kind; git allows none of these letters in a name."""
    return any(letter in ref for letter in "*?[")


def is_about(followed: str, moved: str) -> bool:
    """Whether the ref that moved (``refs/heads/main``) is the one that is followed."""
    if is_pattern(followed):
        return moved.startswith(TAG) and fnmatchcase(moved.removeprefix(TAG), followed.removeprefix(TAG))
    return moved in (followed, BRANCH + followed, TAG + followed)


def read(payload: WebhookPayload, followers: Iterable[Follower]) -> Reading:
    """What to do about a delivery; the commit that it names is not looked at, only which ref moved."""
    repo, event = payload.repo, payload.event
    followed = {Target.of(one): None for one in followers if one.mode != "off" and one.repo == repo.name}
    if repo.type != "model" or not followed:
        return Reading(ignored=f"no session follows the {repo.type} {repo.name}")
    if payload.is_about("repo.content"):
        return _moved(payload, list(followed))
    if event.scope == "repo" and event.action == "delete":
        return Reading(alert=("repo_deleted", f"{repo.name} was deleted; sessions go on with what they run"))
    if event.scope == "repo" and event.action == "move":
        where = f" to {payload.movedTo.name}" if payload.movedTo else ""
        return Reading(alert=("repo_moved", f"{repo.name} was moved{where}; sessions go on with what they run"))
    if payload.is_about("repo.config") and (payload.updatedConfig or {}).get("private") is True:
        return Reading(alert=("repo_private", f"{repo.name} was made private; sessions go on with what they run"))
    return Reading(ignored=f"{event.action} of {event.scope} changes no policy")


def _moved(payload: WebhookPayload, followed: list[Target]) -> Reading:
    if payload.updatedRefs is None:
        return Reading(tuple(followed))  # it does not say which, so all of them are looked at
    moved = [ref.ref for ref in payload.updatedRefs if ref.newSha is not None and not ref.ref.startswith(IGNORED_REFS)]
    targets = tuple(target for target in followed if any(is_about(target.ref, ref) for ref in moved))
    if not targets:
        named = ", ".join(f"{ref.ref} deleted" if ref.newSha is None else ref.ref for ref in payload.updatedRefs)
        return Reading(ignored=f"no session follows {named or 'what moved'}")
    return Reading(targets)
