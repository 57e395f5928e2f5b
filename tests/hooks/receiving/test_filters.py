"""Which deliveries an endpoint wants."""

import pytest

from hooks.receiving.endpoint import Filter
from hooks.receiving.payloads import Facts

PUSH = Facts(
    webhook_id="w",
    repo_id="1",
    repo="robots/act-cubes",
    repo_type="model",
    scope="repo.content",
    action="update",
    refs=("refs/heads/main", "refs/tags/v1.2"),
)


@pytest.mark.parametrize(
    ("wanted", "is_wanted"),
    [
        ({}, True),
        ({"repos": "robots/act-cubes"}, True),
        ({"repos": ["others/*", "robots/*"]}, True),
        ({"repos": "robots"}, False),
        ({"repo_types": ("model", "bucket")}, True),
        ({"repo_types": "dataset"}, False),
        ({"scopes": "repo"}, True),
        ({"scopes": "repo.content"}, True),
        ({"scopes": "repo.content.files"}, False),
        ({"scopes": "rep"}, False),
        ({"actions": ["create", "update"]}, True),
        ({"actions": "create"}, False),
        ({"refs": "main"}, True),
        ({"refs": "refs/heads/main"}, True),
        ({"refs": "v1.*"}, True),
        ({"refs": "refs/tags/v2*"}, False),
        ({"refs": "heads/main"}, False),
        ({"events": "repo:update"}, True),
        ({"events": ["discussion", "repo.content"]}, True),
        ({"events": "repo.content:create"}, False),
        ({"repos": "robots/*", "actions": "create"}, False),
    ],
)
def test_everything_that_is_named_has_to_hold(wanted: dict, is_wanted: bool) -> None:
    assert Filter.of(**wanted).wants(PUSH) is is_wanted


def test_a_delivery_that_does_not_say_is_not_wanted_by_a_filter_that_asks() -> None:
    assert Filter().wants(Facts())
    for wanted in ({"repos": "*"}, {"repo_types": "model"}, {"scopes": "repo"}, {"refs": "*"}, {"events": "repo"}):
        assert Filter.of(**wanted).wants(Facts()) is ("repos" in wanted)
