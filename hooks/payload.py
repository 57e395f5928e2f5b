"""Payload of a Hub webhook, version 3, and samples.

A delivery is refused only for the fields that name its event: ``event.action``, ``event.scope``, ``repo.id``,
``repo.name``, ``repo.type`` and ``webhook.id``, all text. Unknown fields and values are kept, and any other field that
does not have its documented type is None, so that a change of the Hub does not silence a receiver.
Source: https://huggingface.co/docs/hub/webhooks, and huggingface_hub 2.4.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from hooks.errors import InvalidWebhook

__all__ = [
    "ObjectId",
    "WebhookPayload",
    "WebhookPayloadComment",
    "WebhookPayloadDiscussion",
    "WebhookPayloadDiscussionChanges",
    "WebhookPayloadEvent",
    "WebhookPayloadMovedTo",
    "WebhookPayloadRepo",
    "WebhookPayloadUpdatedFile",
    "WebhookPayloadUpdatedRef",
    "WebhookPayloadUrl",
    "WebhookPayloadWebhook",
]

# Values that the Hub documents. The fields below are plain strings and accept any other value, too.
ACTIONS = ("create", "delete", "move", "update")
SCOPES = ("repo", "repo.content", "repo.config", "discussion", "discussion.comment")
REPO_TYPES = ("model", "dataset", "space", "bucket")
DISCUSSION_STATES = ("closed", "draft", "open", "merged")


T = TypeVar("T")


def _validate_or_none(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


# A field that never makes a delivery invalid: None where the payload has another type.
Lenient = Annotated[T | None, WrapValidator(_validate_or_none)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True, serialize_by_alias=True)


class ObjectId(_Part):
    """Part of a payload that has an id of its own."""

    id: str


class WebhookPayloadUrl(_Part):
    """Links to a repo, discussion or comment: ``web`` for people, ``api`` for programs."""

    web: str
    api: Lenient[str] = None


class WebhookPayloadMovedTo(_Part):
    """New name of a repo that was moved."""

    name: str
    owner: Lenient[ObjectId] = None


class WebhookPayloadWebhook(ObjectId):
    """Webhook that this delivery was sent for."""

    version: Lenient[int] = None


class WebhookPayloadEvent(_Part):
    """Event of the delivery: an action within a scope.

    Attributes:
        action: a value of ``ACTIONS``, or a newer one.
        scope: a value of ``SCOPES``, or a newer and narrower one, which is at least an update of the broader one.
    """

    action: str
    scope: str


class WebhookPayloadDiscussionChanges(_Part):
    """Base and merge commit of a pull request."""

    base: str
    mergeCommitId: Lenient[str] = None


class WebhookPayloadComment(ObjectId):
    """Comment of a discussion; ``content`` is missing when it is hidden."""

    author: Lenient[ObjectId] = None
    hidden: Lenient[bool] = False
    content: Lenient[str] = None
    url: Lenient[WebhookPayloadUrl] = None


class WebhookPayloadDiscussion(ObjectId):
    """Discussion or pull request."""

    num: int
    author: Lenient[ObjectId] = None
    url: Lenient[WebhookPayloadUrl] = None
    title: str
    isPullRequest: bool
    status: str
    changes: Lenient[WebhookPayloadDiscussionChanges] = None
    pinned: Lenient[bool] = None


class WebhookPayloadRepo(ObjectId):
    """Repo that the event happened to.

    Attributes:
        head_sha: commit of the default branch, ``headSha`` on the wire; with scopes of ``repo``, never of buckets.
        type: a value of ``REPO_TYPES``, or a newer one.
    """

    owner: Lenient[ObjectId] = None
    head_sha: Lenient[str] = Field(default=None, alias="headSha")
    name: str
    private: Lenient[bool] = False
    subdomain: Lenient[str] = None
    tags: Lenient[list[str]] = None
    type: str
    url: Lenient[WebhookPayloadUrl] = None

    @property
    def headSha(self) -> str | None:
        """The field ``head_sha`` by its name on the wire."""
        return self.head_sha


class WebhookPayloadUpdatedRef(_Part):
    """Branch or tag that moved; ``oldSha`` is None for a new one, ``newSha`` for a deleted one."""

    ref: str
    oldSha: str | None = None
    newSha: str | None = None


class WebhookPayloadUpdatedFile(_Part):
    """File of a bucket that was added, overwritten or deleted."""

    path: str
    action: str
    xetHash: str | None = None
    size: int | None = None


class WebhookPayload(_Part):
    """Body of one webhook delivery of the Hub."""

    event: WebhookPayloadEvent
    repo: WebhookPayloadRepo
    discussion: Lenient[WebhookPayloadDiscussion] = None
    comment: Lenient[WebhookPayloadComment] = None
    webhook: WebhookPayloadWebhook
    movedTo: Lenient[WebhookPayloadMovedTo] = None
    updatedRefs: Lenient[list[WebhookPayloadUpdatedRef]] = None
    updatedConfig: Lenient[dict[str, Any]] = None
    updatedFiles: Lenient[list[WebhookPayloadUpdatedFile]] = None
    updatedFilesTruncated: Lenient[bool] = None

    def is_about(self, scope: str) -> bool:
        """Whether the event happened within a scope; ``repo`` includes ``repo.content`` and all else below it."""
        return is_in_scope(self.event.scope, (scope,))

    def new_sha(self, ref: str) -> str | None:
        """Return the commit that a ref (``refs/heads/main`` or ``main``) moved to; None without a move or a commit."""
        names = (ref,) if ref.startswith("refs/") else (f"refs/heads/{ref}", f"refs/tags/{ref}")
        return next((moved.newSha for moved in self.updatedRefs or () if moved.ref in names and moved.newSha), None)


def is_in_scope(scope: str, scopes: Sequence[str]) -> bool:
    """Whether a scope is in this list, or below a scope of this list."""
    return any(scope == scope_or_parent or scope.startswith(f"{scope_or_parent}.") for scope_or_parent in scopes)


Payload = dict[str, Any]

HUB = "https://huggingface.co"
OLD_SHA = hashlib.sha1(b"the commit before").hexdigest()
PLURAL = {"dataset": "datasets/", "space": "spaces/", "bucket": "buckets/"}
DISCUSSION: Payload = {
    "id": "6399f58518721fdd27fc9ca9",
    "title": "Update the model card",
    "status": "open",
    "author": {"id": "61d2f90c3c2083e1c08af22d"},
    "num": 19,
    "isPullRequest": False,
}
PULL_REQUEST = DISCUSSION | {"isPullRequest": True, "changes": {"base": "refs/heads/main"}}
COMMENT: Payload = {"id": "6399f58518721fdd27fc9caa", "author": {"id": "61d2f90c3c2083e1c08af22d"}, "hidden": False}
FILES: list[Payload] = [
    {"path": "episodes/000.parquet", "action": "add", "xetHash": hashlib.sha256(b"0").hexdigest(), "size": 1024},
    {"path": "episodes/old.parquet", "action": "delete"},
]
NEW = "NEW"  # stands for the commit that a sample is about


def _move(ref: str, old: str | None, new: str | None) -> Payload:
    return {"updatedRefs": [{"ref": ref, "oldSha": old, "newSha": new}]}


# Name of a sample -> its action, and the parts that only this kind of event has. A name begins with the scope.
SAMPLES: Mapping[str, tuple[str, Payload]] = {
    "repo": ("update", {}),
    "repo:create": ("create", {}),
    "repo:delete": ("delete", {}),
    "repo:move": ("move", {"movedTo": {"owner": {"id": "628b753283ef59b5be89e937"}}}),
    "repo.content": ("update", _move("refs/heads/main", OLD_SHA, NEW)),
    "repo.content:branch": ("update", _move("refs/heads/next", None, NEW)),
    "repo.content:branch-deleted": ("update", _move("refs/heads/next", OLD_SHA, None)),
    "repo.content:tag": ("update", _move("refs/tags/v1.0", None, NEW)),
    "repo.content:tag-deleted": ("update", _move("refs/tags/v1.0", NEW, None)),
    "repo.content:pull-request": ("update", _move("refs/pr/19", None, NEW)),
    "repo.content:bucket": ("update", {"updatedFiles": FILES, "updatedFilesTruncated": False}),
    "repo.config": ("update", {"updatedConfig": {"private": False}}),
    "discussion": ("create", {"discussion": DISCUSSION}),
    "discussion:update": ("update", {"discussion": DISCUSSION | {"status": "closed"}}),
    "discussion:delete": ("delete", {"discussion": DISCUSSION}),
    "discussion:pull-request": ("create", {"discussion": PULL_REQUEST}),
    "discussion:merged": ("update", {"discussion": PULL_REQUEST | {"status": "merged"}}),
    "discussion.comment": (
        "create",
        {"discussion": DISCUSSION, "comment": COMMENT | {"content": "How many episodes?"}},
    ),
    "discussion.comment:hidden": ("update", {"discussion": DISCUSSION, "comment": COMMENT | {"hidden": True}}),
}
SAMPLE_SCOPES = tuple(SAMPLES)


def sample(
    scope: str = "repo.content",
    *,
    repo: str = "robotics-lab/pick-cubes",
    repo_type: str = "model",
    sha: str | None = None,
) -> Payload:
    """Build a sample payload as the Hub sends it.

    Args:
        scope: a name in ``SAMPLES``.
        sha: commit that the event is about; derived from the repo's name when None.

    Raises:
        InvalidWebhook: the Hub documents no such event.
    """
    if scope not in SAMPLES:
        raise InvalidWebhook(f"there is no sample of {scope!r}; wanted one of {', '.join(SAMPLE_SCOPES)}")
    action, parts = SAMPLES[scope]
    kind = "bucket" if "updatedFiles" in parts else repo_type
    head = sha or hashlib.sha1(repo.encode()).hexdigest()
    url = {
        "web": f"{HUB}/{PLURAL.get(kind, '')}{repo}",
        "api": f"{HUB}/api/{PLURAL.get(kind, 'models/')}{repo}",
    }
    payload: Payload = {
        "event": {"action": action, "scope": scope.partition(":")[0]},
        "repo": {
            "type": kind,
            "name": repo,
            "id": hashlib.sha256(f"{kind} {repo}".encode()).hexdigest()[:24],
            "private": False,
            "url": url,
            "owner": {"id": "628b753283ef59b5be89e937"},
        },
        "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
        **copy.deepcopy(parts),
    }
    # The head of the main branch is sent with scopes of `repo`. A bucket has no commits.
    if scope.startswith("repo") and kind != "bucket":
        payload["repo"]["headSha"] = OLD_SHA if scope.endswith((":branch", ":pull-request")) else head
    if "movedTo" in payload:
        payload["movedTo"]["name"] = f"{repo}-renamed"
    for moved in payload.get("updatedRefs", ()):
        moved |= {name: head for name in ("oldSha", "newSha") if moved[name] == NEW}
    if "discussion" in payload:
        payload["discussion"]["url"] = {name: f"{address}/discussions/19" for name, address in url.items()}
    if "comment" in payload:
        payload["comment"]["url"] = {"web": f"{url['web']}/discussions/19#{COMMENT['id']}"}
    return payload
