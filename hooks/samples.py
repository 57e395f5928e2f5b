"""One payload as the Hub sends it, for every kind of event that it documents."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from hooks.errors import InvalidWebhook

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
    place = f"{PLURAL.get(kind, '')}{repo}"
    found: Payload = {
        "event": {"action": action, "scope": scope},
        "repo": {
            "type": kind,
            "name": repo,
            "id": _id(f"{kind} {repo}"),
            "private": False,
            "url": {"web": f"{HUB}/{place}", "api": f"{HUB}/api/{PLURAL.get(kind, 'models/')}{repo}"},
            "owner": {"id": OWNER},
        },
        "webhook": {"id": WEBHOOK_ID, "version": 3},
    }
    # The head of the main branch: with scopes of `repo`, and never of a bucket, which has no commits.
    if scope.startswith("repo") and kind != "bucket":
        found["repo"]["headSha"] = sha
    return found


def _content(kind: str, repo: str, sha: str, ref: str, old: str | None, new: str | None) -> Payload:
    moved = {"ref": ref, "oldSha": old, "newSha": new}
    return {**_base(kind, repo, sha, "update", "repo.content"), "updatedRefs": [moved]}


def _discussion(kind: str, repo: str, sha: str, action: str, *, is_pull_request: bool, status: str = "open") -> Payload:
    found = _base(kind, repo, sha, action, "discussion")
    web = f"{found['repo']['url']['web']}/discussions/19"
    found["discussion"] = {
        "id": "6399f58518721fdd27fc9ca9",
        "title": "Update the model card",
        "url": {"web": web, "api": f"{found['repo']['url']['api']}/discussions/19"},
        "status": status,
        "author": {"id": AUTHOR},
        "num": 19,
        "isPullRequest": is_pull_request,
    }
    if is_pull_request:
        found["discussion"]["changes"] = {"base": "refs/heads/main"}
    return found


def _comment(kind: str, repo: str, sha: str, action: str, *, is_hidden: bool = False) -> Payload:
    found = _discussion(kind, repo, sha, "update", is_pull_request=False)
    found["event"] = {"action": action, "scope": "discussion.comment"}
    found["comment"] = {
        "id": "6399f58518721fdd27fc9caa",
        "author": {"id": AUTHOR},
        "hidden": is_hidden,
        "url": {"web": f"{found['discussion']['url']['web']}#6399f58518721fdd27fc9caa"},
    }
    if not is_hidden:
        found["comment"]["content"] = "Please add the number of episodes."
    return found


def _move(kind: str, repo: str, sha: str) -> Payload:
    new = f"{repo}-renamed"
    return {**_base(kind, repo, sha, "move", "repo"), "movedTo": {"name": new, "owner": {"id": OWNER}}}


def _bucket(kind: str, repo: str, sha: str) -> Payload:
    found = _base("bucket", repo, sha, "update", "repo.content")
    found["updatedFiles"] = [
        {"path": "episodes/000.parquet", "action": "add", "xetHash": hashlib.sha256(b"0").hexdigest(), "size": 1024},
        {"path": "episodes/old.parquet", "action": "delete"},
    ]
    found["updatedFilesTruncated"] = False
    return found


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
SCOPES = tuple(SAMPLES)


def sample(
    scope: str = "repo.content",
    *,
    repo: str = "robotics-lab/pick-cubes",
    repo_type: str = "model",
    sha: str | None = None,
) -> Payload:
    """A payload of the Hub.

    Args:
        scope: one of ``SCOPES``.
        sha: the commit that it is about; one made up of the repo's name when None.

    Raises:
        InvalidWebhook: the Hub documents no such event.
    """
    if scope not in SAMPLES:
        raise InvalidWebhook(f"there is no sample of {scope!r}; wanted one of {', '.join(SCOPES)}")
    return SAMPLES[scope](repo_type, repo, sha or _sha(repo))
