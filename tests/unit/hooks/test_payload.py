"""The Hub's payload, version 3: documented fields and unknown fields."""

import pytest
from pydantic import ValidationError

from hooks.payload import WebhookPayload, sample

PUSH = sample(repo="user/act_so101", sha="2" * 40)
PUSH["updatedRefs"] += [
    {"ref": "refs/tags/v1", "oldSha": None, "newSha": "2" * 40},
    {"ref": "refs/heads/old", "oldSha": "1" * 40, "newSha": None},
]


def changed(**changes: object) -> dict:
    copy = {name: dict(part) if isinstance(part, dict) else part for name, part in PUSH.items()}
    for field, value in changes.items():
        *path, name = field.split("__")
        part: dict = copy
        for step in path:
            part = part[step]
        part[name] = value
    return copy


def test_refs_by_long_and_by_short_name() -> None:
    payload = WebhookPayload.model_validate(PUSH)
    assert payload.new_sha("refs/heads/main") == payload.new_sha("main") == "2" * 40
    assert payload.new_sha("v1") == "2" * 40
    assert payload.new_sha("old") is None
    assert payload.new_sha("refs/heads/v1") is None


@pytest.mark.parametrize("value", [None, 5, "text", ["x"], {"x": 1}, [{"x": 1}]])
@pytest.mark.parametrize(
    "field",
    [
        *(f"repo__{name}" for name in ("url", "owner", "headSha", "private", "subdomain", "tags")),
        *("webhook__version", "discussion", "comment", "movedTo"),
        *("updatedRefs", "updatedConfig", "updatedFiles", "updatedFilesTruncated"),
    ],
)
def test_an_invalid_optional_field_does_not_refuse_a_delivery(field: str, value: object) -> None:
    payload = WebhookPayload.model_validate(changed(**{field: value}))
    assert (payload.event.scope, payload.repo.name, payload.webhook.id) == (
        "repo.content",
        "user/act_so101",
        PUSH["webhook"]["id"],  # type: ignore[index]
    )


@pytest.mark.parametrize("value", [None, 5, ["x"], {"x": 1}])
@pytest.mark.parametrize(
    "field", ["event__action", "event__scope", "repo__id", "repo__name", "repo__type", "webhook__id"]
)
def test_a_field_that_names_the_event_must_be_text(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        WebhookPayload.model_validate(changed(**{field: value}))
    assert [error["loc"] for error in refused.value.errors()] == [tuple(field.split("__"))]


def test_a_discussion_is_read_without_its_invalid_fields() -> None:
    data = {"id": "1", "num": 19, "title": "x", "isPullRequest": False, "status": "open", "pinned": "?", "author": 3}
    discussion = WebhookPayload.model_validate(changed(discussion=data)).discussion
    assert discussion is not None
    assert (discussion.num, discussion.pinned, discussion.author, discussion.url) == (19, None, None, None)


def test_a_scope_includes_its_narrower_scopes() -> None:
    payload = WebhookPayload.model_validate(PUSH)
    scopes = ("repo", "repo.content", "repo.config", "rep")
    assert [payload.is_about(scope) for scope in scopes] == [True, True, False, False]
