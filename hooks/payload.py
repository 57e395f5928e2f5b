"""What the Hub sends to a webhook, version 3, with huggingface_hub's class names.

Forward compatible: fields and values that are not known here are kept and never refused, so that a Hub that learns
something new does not silence a receiver. Source: https://huggingface.co/docs/hub/webhooks, and huggingface_hub 2.4.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

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


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True, serialize_by_alias=True)


class ObjectId(_Part):
    """Anything with an id of its own."""

    id: str


class WebhookPayloadUrl(_Part):
    """Where something is found: for people, and for programs."""

    web: str
    api: str | None = None


class WebhookPayloadMovedTo(_Part):
    """The new name of a repo that was moved."""

    name: str
    owner: ObjectId


class WebhookPayloadWebhook(ObjectId):
    """The webhook that this delivery is for."""

    version: int


class WebhookPayloadEvent(_Part):
    """What happened.

    Attributes:
        action: one of ``ACTIONS``, or one that came later.
        scope: one of ``SCOPES``, or a narrower one that came later; it is at least an update of the broader one.
    """

    action: str
    scope: str


class WebhookPayloadDiscussionChanges(_Part):
    """What a pull request changes."""

    base: str
    mergeCommitId: str | None = None


class WebhookPayloadComment(ObjectId):
    """A comment; ``content`` is missing when it is hidden."""

    author: ObjectId
    hidden: bool = False
    content: str | None = None
    url: WebhookPayloadUrl


class WebhookPayloadDiscussion(ObjectId):
    """A discussion or a pull request."""

    num: int
    author: ObjectId
    url: WebhookPayloadUrl
    title: str
    isPullRequest: bool
    status: str
    changes: WebhookPayloadDiscussionChanges | None = None
    pinned: bool | None = None


class WebhookPayloadRepo(ObjectId):
    """The repo it happened to.

    Attributes:
        head_sha: commit of the default branch, ``headSha`` on the wire; with scopes of ``repo``, never of buckets.
        type: one of ``REPO_TYPES``, or one that came later.
    """

    owner: ObjectId
    head_sha: str | None = Field(default=None, alias="headSha")
    name: str
    private: bool = False
    subdomain: str | None = None
    tags: list[str] | None = None
    type: str
    url: WebhookPayloadUrl | None = None

    @property
    def headSha(self) -> str | None:
        """``head_sha`` by its name on the wire."""
        return self.head_sha


class WebhookPayloadUpdatedRef(_Part):
    """A branch or tag that moved; ``oldSha`` is None for a new one, ``newSha`` for a deleted one."""

    ref: str
    oldSha: str | None = None
    newSha: str | None = None


class WebhookPayloadUpdatedFile(_Part):
    """A file of a bucket that was added (or overwritten) or deleted."""

    path: str
    action: str
    xetHash: str | None = None
    size: int | None = None


class WebhookPayload(_Part):
    """One delivery's body."""

    event: WebhookPayloadEvent
    repo: WebhookPayloadRepo
    discussion: WebhookPayloadDiscussion | None = None
    comment: WebhookPayloadComment | None = None
    webhook: WebhookPayloadWebhook
    movedTo: WebhookPayloadMovedTo | None = None
    updatedRefs: list[WebhookPayloadUpdatedRef] | None = None
    updatedConfig: dict[str, Any] | None = None
    updatedFiles: list[WebhookPayloadUpdatedFile] | None = None
    updatedFilesTruncated: bool | None = None

    def is_about(self, scope: str) -> bool:
        """Whether it happened within this scope: ``repo`` holds ``repo.content`` and whatever else begins with it."""
        return within(self.event.scope, (scope,))

    def new_sha(self, ref: str) -> str | None:
        """The commit that a ref (``refs/heads/main``, or ``main``) moved to; None when it did not move, or is gone."""
        names = (ref,) if ref.startswith("refs/") else (f"refs/heads/{ref}", f"refs/tags/{ref}")
        return next((moved.newSha for moved in self.updatedRefs or () if moved.ref in names and moved.newSha), None)


def within(scope: str, scopes: Sequence[str]) -> bool:
    """Whether a scope is one of these or a narrower part of one."""
    return any(scope == wider or scope.startswith(f"{wider}.") for wider in scopes)
