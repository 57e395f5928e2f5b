"""Payload of a Hub webhook, version 3, and samples.

A delivery is refused only for the fields that name its event: ``event.action``, ``event.scope``, ``repo.id``,
``repo.name``, ``repo.type`` and ``webhook.id``, all text. Unknown fields and values are kept, and any other field that
does not have its documented type is None, so that a change of the Hub does not silence a receiver.
Source: https://huggingface.co/docs/hub/webhooks, and huggingface_hub 2.4.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
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

# What the Hub documents. Fields below are plain strings: any other value is accepted too.
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


# A field that no delivery is refused for: None where the payload has another type.
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
        action: one of ``ACTIONS``, or one that came later.
        scope: one of ``SCOPES``, or a narrower one that came later; it is at least an update of the broader one.
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
        type: one of ``REPO_TYPES``, or one that came later.
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
        """Return the commit that a ref (``refs/heads/main`` or ``main``) moved to; None if it did not, or is gone."""
        names = (ref,) if ref.startswith("refs/") else (f"refs/heads/{ref}", f"refs/tags/{ref}")
        return next((moved.newSha for moved in self.updatedRefs or () if moved.ref in names and moved.newSha), None)


def is_in_scope(scope: str, scopes: Sequence[str]) -> bool:
    """Whether a scope is one of these or below one of them."""
    return any(scope == scope_or_parent or scope.startswith(f"{scope_or_parent}.") for scope_or_parent in scopes)


Payload = dict[str, Any]

WEBHOOK_ID = "6390e855e30d9209411de93b"
HUB = "https://huggingface.co"
OWNER, AUTHOR = "628b753283ef59b5be89e937", "61d2f90c3c2083e1c08af22d"
PLURAL = {"dataset": "datasets/", "space": "spaces/", "bucket": "buckets/"}


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def _base(kind: str, repo: str, sha: str, action: str, scope: str) -> Payload:
    url = f"{PLURAL.get(kind, '')}{repo}"
    payload: Payload = {
        "event": {"action": action, "scope": scope},
        "repo": {
            "type": kind,
            "name": repo,
            "id": _id(f"{kind} {repo}"),
            "private": False,
            "url": {"web": f"{HUB}/{url}", "api": f"{HUB}/api/{PLURAL.get(kind, 'models/')}{repo}"},
            "owner": {"id": OWNER},
        },
        "webhook": {"id": WEBHOOK_ID, "version": 3},
    }
    # The head of the main branch: with scopes of `repo`, and never of a bucket, which has no commits.
    if scope.startswith("repo") and kind != "bucket":
        payload["repo"]["headSha"] = sha
    return payload


def _content(kind: str, repo: str, sha: str, ref: str, old: str | None, new: str | None) -> Payload:
    moved = {"ref": ref, "oldSha": old, "newSha": new}
    return {**_base(kind, repo, sha, "update", "repo.content"), "updatedRefs": [moved]}


def _discussion(kind: str, repo: str, sha: str, action: str, *, is_pull_request: bool, status: str = "open") -> Payload:
    payload = _base(kind, repo, sha, action, "discussion")
    web = f"{payload['repo']['url']['web']}/discussions/19"
    payload["discussion"] = {
        "id": "6399f58518721fdd27fc9ca9",
        "title": "Update the model card",
        "url": {"web": web, "api": f"{payload['repo']['url']['api']}/discussions/19"},
        "status": status,
        "author": {"id": AUTHOR},
        "num": 19,
        "isPullRequest": is_pull_request,
    }
    if is_pull_request:
        payload["discussion"]["changes"] = {"base": "refs/heads/main"}
    return payload


def _comment(kind: str, repo: str, sha: str, action: str, *, is_hidden: bool = False) -> Payload:
    payload = _discussion(kind, repo, sha, "update", is_pull_request=False)
    payload["event"] = {"action": action, "scope": "discussion.comment"}
    payload["comment"] = {
        "id": "6399f58518721fdd27fc9caa",
        "author": {"id": AUTHOR},
        "hidden": is_hidden,
        "url": {"web": f"{payload['discussion']['url']['web']}#6399f58518721fdd27fc9caa"},
    }
    if not is_hidden:
        payload["comment"]["content"] = "Please add the number of episodes."
    return payload


def _move(kind: str, repo: str, sha: str) -> Payload:
    new = f"{repo}-renamed"
    return {**_base(kind, repo, sha, "move", "repo"), "movedTo": {"name": new, "owner": {"id": OWNER}}}


def _bucket(kind: str, repo: str, sha: str) -> Payload:
    payload = _base("bucket", repo, sha, "update", "repo.content")
    payload["updatedFiles"] = [
        {"path": "episodes/000.parquet", "action": "add", "xetHash": hashlib.sha256(b"0").hexdigest(), "size": 1024},
        {"path": "episodes/old.parquet", "action": "delete"},
    ]
    payload["updatedFilesTruncated"] = False
    return payload


_OLD = _sha("the commit before")

# name -> the payload, given the type of repo, its name and the commit. A name begins with the scope.
SAMPLES: Mapping[str, Callable[[str, str, str], Payload]] = {
    "repo": lambda kind, repo, sha: _base(kind, repo, sha, "update", "repo"),
    "repo:create": lambda kind, repo, sha: _base(kind, repo, sha, "create", "repo"),
    "repo:delete": lambda kind, repo, sha: _base(kind, repo, sha, "delete", "repo"),
    "repo:move": _move,
    "repo.content": lambda kind, repo, sha: _content(kind, repo, sha, "refs/heads/main", _OLD, sha),
    "repo.content:branch": lambda kind, repo, sha: _content(kind, repo, _OLD, "refs/heads/next", None, sha),
    "repo.content:branch-deleted": lambda kind, repo, sha: _content(kind, repo, sha, "refs/heads/next", _OLD, None),
    "repo.content:tag": lambda kind, repo, sha: _content(kind, repo, sha, "refs/tags/v1.0", None, sha),
    "repo.content:tag-deleted": lambda kind, repo, sha: _content(kind, repo, sha, "refs/tags/v1.0", sha, None),
    "repo.content:pull-request": lambda kind, repo, sha: _content(kind, repo, _OLD, "refs/pr/19", None, sha),
    "repo.content:bucket": _bucket,
    "repo.config": lambda kind, repo, sha: {
        **_base(kind, repo, sha, "update", "repo.config"),
        "updatedConfig": {"private": False},
    },
    "discussion": lambda kind, repo, sha: _discussion(kind, repo, sha, "create", is_pull_request=False),
    "discussion:update": lambda kind, repo, sha: _discussion(
        kind, repo, sha, "update", is_pull_request=False, status="closed"
    ),
    "discussion:delete": lambda kind, repo, sha: _discussion(kind, repo, sha, "delete", is_pull_request=False),
    "discussion:pull-request": lambda kind, repo, sha: _discussion(kind, repo, sha, "create", is_pull_request=True),
    "discussion:merged": lambda kind, repo, sha: _discussion(
        kind, repo, sha, "update", is_pull_request=True, status="merged"
    ),
    "discussion.comment": lambda kind, repo, sha: _comment(kind, repo, sha, "create"),
    "discussion.comment:hidden": lambda kind, repo, sha: _comment(kind, repo, sha, "update", is_hidden=True),
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
        scope: one of ``SCOPES``.
        sha: the commit that it is about; one made up of the repo's name when None.

    Raises:
        InvalidWebhook: the Hub documents no such event.
    """
    if scope not in SAMPLES:
        raise InvalidWebhook(f"there is no sample of {scope!r}; wanted one of {', '.join(SAMPLE_SCOPES)}")
    return SAMPLES[scope](repo_type, repo, sha or _sha(repo))
