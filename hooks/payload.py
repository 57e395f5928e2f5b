"""Payload of a Hub webhook, version 3, and a sample of each scope.

Only ``event.action``, ``event.scope``, ``repo.id``, ``repo.name``, ``repo.type`` and ``webhook.id`` are required; all
are text. Unknown fields are kept, and other fields of an undocumented type become None, so that a receiver survives
changes of the Hub.
Source: https://huggingface.co/docs/hub/webhooks, and huggingface_hub 2.4.
"""

import copy
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from hooks.errors import InvalidWebhook

T = TypeVar("T")


def _validate_or_none(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


# An optional field: None if the payload has another type, so the delivery stays valid.
Lenient = Annotated[T | None, WrapValidator(_validate_or_none)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True, serialize_by_alias=True)


class ObjectId(_Part):
    """Part of a payload with an id.

    Example:
        >>> ObjectId(id="628b753283ef59b5be89e937").id
        '628b753283ef59b5be89e937'
    """

    id: str


class WebhookPayloadUrl(_Part):
    """Links to a repo, discussion or comment: ``web`` for people, ``api`` for programs.

    Example:
        >>> WebhookPayloadUrl(web="https://huggingface.co/lab/arm").api is None
        True
    """

    web: str
    api: Lenient[str] = None


class WebhookPayloadMovedTo(_Part):
    """New name of a repo that was moved.

    Example:
        >>> WebhookPayloadMovedTo.model_validate({"name": "lab/arm-2", "owner": {"id": "628b"}}).owner.id
        '628b'
    """

    name: str
    owner: Lenient[ObjectId] = None


class WebhookPayloadWebhook(ObjectId):
    """Webhook that sent this delivery.

    Example:
        >>> WebhookPayloadWebhook(id="6390e855e30d9209411de93b", version=3).version
        3
    """

    version: Lenient[int] = None


class WebhookPayloadEvent(_Part):
    """Event of the delivery: an action within a scope.

    Attributes:
        action: ``create``, ``delete``, ``move``, ``update``, or a newer one.
        scope: ``repo``, ``repo.content``, ``repo.config``, ``discussion``, ``discussion.comment``, or a narrower one.

    Example:
        >>> WebhookPayloadEvent(action="update", scope="repo.content").scope
        'repo.content'
    """

    action: str
    scope: str


class WebhookPayloadDiscussionChanges(_Part):
    """Base and merge commit of a pull request.

    Example:
        >>> WebhookPayloadDiscussionChanges(base="refs/heads/main").mergeCommitId is None
        True
    """

    base: str
    mergeCommitId: Lenient[str] = None


class WebhookPayloadComment(ObjectId):
    """Comment of a discussion; a hidden comment has no ``content``.

    Example:
        >>> WebhookPayloadComment(id="6399f585", content="How many cubes?").content
        'How many cubes?'
    """

    author: Lenient[ObjectId] = None
    hidden: Lenient[bool] = False
    content: Lenient[str] = None
    url: Lenient[WebhookPayloadUrl] = None


class WebhookPayloadDiscussion(ObjectId):
    """Discussion or pull request.

    Example:
        >>> discussion = {"id": "6399f585", "num": 19, "title": "Grasp", "isPullRequest": True, "status": "open"}
        >>> WebhookPayloadDiscussion.model_validate(discussion).isPullRequest
        True
    """

    num: int
    author: Lenient[ObjectId] = None
    url: Lenient[WebhookPayloadUrl] = None
    title: str
    isPullRequest: bool
    status: str
    changes: Lenient[WebhookPayloadDiscussionChanges] = None
    pinned: Lenient[bool] = None


class WebhookPayloadRepo(ObjectId):
    """Repo of the event.

    Attributes:
        head_sha: commit of the default branch, ``headSha`` on the wire; set for scopes of ``repo``, but not of buckets.
        type: ``model``, ``dataset``, ``space``, ``bucket``, or a newer one.

    Example:
        >>> repo = {"id": "628b", "type": "model", "name": "lab/arm", "headSha": "5b1f3c"}
        >>> WebhookPayloadRepo.model_validate(repo).head_sha
        '5b1f3c'
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
        """Same as ``head_sha``, by its name on the wire."""
        return self.head_sha


class WebhookPayloadUpdatedRef(_Part):
    """Branch or tag that moved; ``oldSha`` is None for a new ref, ``newSha`` for a deleted ref.

    Example:
        >>> WebhookPayloadUpdatedRef(ref="refs/heads/main", newSha="5b1f3c").oldSha is None
        True
    """

    ref: str
    oldSha: str | None = None
    newSha: str | None = None


class WebhookPayloadUpdatedFile(_Part):
    """File of a bucket that was added, overwritten or deleted.

    Example:
        >>> WebhookPayloadUpdatedFile(path="episode_0.mcap", action="added", size=1024).size
        1024
    """

    path: str
    action: str
    xetHash: str | None = None
    size: int | None = None


class WebhookPayload(_Part):
    """Body of one webhook delivery of the Hub.

    Example:
        >>> from hooks.payload import sample
        >>> payload = WebhookPayload.model_validate(sample("repo.content", repo="lab/arm"))
        >>> payload.is_about("repo"), payload.new_sha("main") == payload.repo.head_sha
        (True, True)
    """

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
        """Whether the event belongs to a scope; ``repo`` includes ``repo.content`` and all other ``repo.*``."""
        return f"{self.event.scope}.".startswith(f"{scope}.")

    def new_sha(self, ref: str) -> str | None:
        """Return the commit that a ref (``refs/heads/main`` or ``main``) moved to; None without a move or a commit."""
        names = (ref,) if ref.startswith("refs/") else (f"refs/heads/{ref}", f"refs/tags/{ref}")
        return next((moved.newSha for moved in self.updatedRefs or () if moved.ref in names and moved.newSha), None)


HUB = "https://huggingface.co"
OLD_SHA = hashlib.sha1(b"the commit before").hexdigest()
USER = {"id": "628b753283ef59b5be89e937"}
# Scope of a sample to its action and the parts that only events of this scope have.
SAMPLES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "repo": ("move", {"movedTo": {"name": "robotics-lab/renamed", "owner": USER}}),
    "repo.content": ("update", {"updatedRefs": [{"ref": "refs/heads/main", "oldSha": OLD_SHA, "newSha": OLD_SHA}]}),
    "repo.config": ("update", {"updatedConfig": {"private": False}}),
    "discussion": ("create", {}),
    "discussion.comment": (
        "create",
        {"comment": {"id": "6399f58518721fdd27fc9caa", "author": USER, "hidden": False, "content": "How many?"}},
    ),
}


def sample(
    scope: str = "repo.content",
    *,
    repo: str = "robotics-lab/pick-cubes",
    repo_type: str = "model",
    sha: str | None = None,
) -> dict[str, Any]:
    """Build a sample payload of a scope in ``SAMPLES``; ``sha`` is the commit that the event is about."""
    if scope not in SAMPLES:
        raise InvalidWebhook(f"there is no sample of scope {scope!r}; wanted: {', '.join(SAMPLES)}")
    action, parts = SAMPLES[scope]
    head = sha or hashlib.sha1(repo.encode()).hexdigest()
    prefix = "" if repo_type == "model" else f"{repo_type}s/"
    url = {"web": f"{HUB}/{prefix}{repo}", "api": f"{HUB}/api/{prefix or 'models/'}{repo}"}
    payload: dict[str, Any] = {
        "event": {"action": action, "scope": scope},
        "repo": {
            "type": repo_type,
            "name": repo,
            "id": hashlib.sha256(f"{repo_type} {repo}".encode()).hexdigest()[:24],
            "private": False,
            "url": url,
            "owner": USER,
        },
        "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
        **copy.deepcopy(parts),
    }
    if scope.startswith("repo"):
        payload["repo"]["headSha"] = head
    else:
        payload["discussion"] = {
            "id": "6399f58518721fdd27fc9ca9",
            "title": "Update the model card",
            "status": "open",
            "author": USER,
            "num": 19,
            "isPullRequest": False,
            "url": {name: f"{address}/discussions/19" for name, address in url.items()},
        }
    for moved in payload.get("updatedRefs", ()):
        moved["newSha"] = head
    return payload
