"""``ensure``: exactly one webhook, also after repeated calls and lost answers."""

import pytest

from hooks import WebhooksClient
from hooks.errors import HubTrouble, InvalidWebhook

URL, SECRET = "https://example.com/hook", "a-long-enough-secret"
SUSPENDED = "suspended-after-failure"
ROOT = "/api/settings/webhooks"


@pytest.fixture
def ensure(hub):
    """Call ``ensure`` as a script does at each start, and return the effects of its requests."""

    def call(**more) -> list[str]:
        before = len(hub.requests)
        arguments = {"url": URL, "watched": ["model:someone/arm"], "secret": SECRET}
        webhook = WebhooksClient(hub.url, "hf_token").ensure(**arguments | more)
        paths = [request.path.removeprefix(ROOT) for request in hub.requests[before:] if request.method == "POST"]
        effects = {"": "created", f"/{webhook.id}": "updated", f"/{webhook.id}/enable": "enabled"}
        return [effects[path] for path in paths] or ["unchanged"]

    return call


def only_webhook(hub):
    (webhook,) = hub.webhooks.values()
    return webhook


def methods(hub) -> list[str]:
    return [request.method for request in hub.requests]


def test_ensure_creates_once_and_sends_the_secret_each_time(hub, ensure):
    assert ensure() == ["created"]
    only_webhook(hub).secret = "another-secret"
    assert ensure() == ["updated"]
    assert only_webhook(hub).secret == SECRET
    assert ensure(secret=None) == ["unchanged"]
    assert only_webhook(hub).domains == ["repo", "discussion"]


def test_only_fields_that_differ_are_changed(hub, ensure):
    ensure(secret=None)
    for change in ({"watched": "org:someone"}, {"watched": "org:someone", "domains": ["repo"]}):
        assert ensure(secret=None, **change) == ["updated"]
        assert ensure(secret=None, **change) == ["unchanged"]
    assert (only_webhook(hub).watched, only_webhook(hub).domains) == ([{"type": "org", "name": "someone"}], ["repo"])
    assert ensure() == ["updated"]
    assert only_webhook(hub).domains == ["repo"], "the domains stay if the argument is missing"


@pytest.mark.parametrize("disabled", [True, SUSPENDED])
def test_a_disabled_webhook_is_enabled(hub, ensure, disabled):
    ensure(secret=None)
    only_webhook(hub).disabled = disabled
    assert ensure(secret=None) == ["enabled"]
    only_webhook(hub).disabled = disabled
    assert ensure() == ["updated", "enabled"]
    assert only_webhook(hub).disabled is False


def test_two_webhooks_with_the_same_address_are_an_error(hub, ensure):
    client = WebhooksClient(hub.url, "hf_token")
    ids = [client.create_webhook(url=URL, watched="model:someone/arm").id for _ in range(2)]
    client.create_webhook(url=f"{URL}/other", watched="model:someone/arm")
    with pytest.raises(HubTrouble, match="2 webhooks send to") as caught:
        ensure()
    assert all(name in str(caught.value) for name in ids)
    assert ensure(webhook_id=ids[0]) == ["updated"]


@pytest.mark.parametrize("how", [500, "cut", "stall"])
def test_a_webhook_whose_creation_lost_its_answer_is_found(hub, ensure, how, limit_ends_at):
    if how == 500:
        WebhooksClient(hub.url, "hf_token").create_webhook(url=URL, watched="model:someone/arm")
        webhook, answer = dict(hub.webhooks), hub.answer
        hub.webhooks.clear()

        def make_and_fail(request):
            if request.method == "POST" and not hub.webhooks:
                hub.webhooks.update(webhook)
                hub.script("POST /api/settings/webhooks$", 500, 1)
            return answer(request)

        hub.answer = make_and_fail
    else:
        failure = hub.script("POST", how, 1)
        if how == "stall":
            limit_ends_at(failure)
    hub.requests.clear()
    assert ensure() == ["created", "updated"]
    assert methods(hub) == ["GET", "POST", "GET", "POST"]
    assert len(hub.webhooks) == 1
    assert only_webhook(hub).secret == SECRET


@pytest.mark.parametrize("how", ["hang", "drop", 429, 503])
def test_a_failed_creation_is_repeated_after_a_check(hub, ensure, how, limit_ends_at):
    failure = hub.script("POST", how, 1, **({"retry_after": 0} if how == 429 else {}))
    if how == "hang":
        limit_ends_at(failure)
    assert ensure() == ["created", "created"]
    assert methods(hub) == ["GET", "POST", "GET", "POST"]
    assert len(hub.webhooks) == 1


def test_a_short_secret_is_refused(hub, ensure):
    with pytest.raises(InvalidWebhook, match="at least 16"):
        ensure(secret="my-secret")
    assert hub.requests == []


def test_a_second_webhook_of_a_job_needs_its_webhook_id(hub, ensure):
    assert ensure(url=None, job_id="687f") == ["created"]
    with pytest.raises(HubTrouble, match="choose a webhook with webhook_id"):
        ensure(url=None, job_id="687f")
    assert ensure(url=None, job_id="687f", webhook_id=only_webhook(hub).id, secret=None) == ["updated"]
