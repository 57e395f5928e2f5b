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
        already = len(hub.requests)
        wanted = {"url": URL, "watched": ["model:someone/arm"], "secret": SECRET}
        made = WebhooksClient(hub.url, "hf_token").ensure(**wanted | more)
        paths = [request.path.removeprefix(ROOT) for request in hub.requests[already:] if request.method == "POST"]
        done = {"": "created", f"/{made.id}": "updated", f"/{made.id}/enable": "enabled"}
        return [done[path] for path in paths] or ["unchanged"]

    return call


def the_one(hub):
    (webhook,) = hub.webhooks.values()
    return webhook


def methods(hub) -> list[str]:
    return [request.method for request in hub.requests]


def test_it_is_made_once_and_its_secret_is_sent_each_time(hub, ensure):
    assert ensure() == ["created"]
    the_one(hub).secret = "somebody-else-s"
    assert ensure() == ["updated"]
    assert the_one(hub).secret == SECRET
    assert ensure(secret=None) == ["unchanged"]
    assert the_one(hub).domains == ["repo", "discussion"]


def test_only_fields_that_differ_are_changed(hub, ensure):
    ensure(secret=None)
    for change in ({"watched": "org:someone"}, {"watched": "org:someone", "domains": ["repo"]}):
        assert ensure(secret=None, **change) == ["updated"]
        assert ensure(secret=None, **change) == ["unchanged"]
    assert (the_one(hub).watched, the_one(hub).domains) == ([{"type": "org", "name": "someone"}], ["repo"])
    assert ensure() == ["updated"]
    assert the_one(hub).domains == ["repo"], "without the argument, the domains stay"


@pytest.mark.parametrize("disabled", [True, SUSPENDED])
def test_a_disabled_webhook_is_enabled(hub, ensure, disabled):
    ensure(secret=None)
    the_one(hub).disabled = disabled
    assert ensure(secret=None) == ["enabled"]
    the_one(hub).disabled = disabled
    assert ensure() == ["updated", "enabled"]
    assert the_one(hub).disabled is False


def test_two_that_send_to_the_address_are_an_error_that_names_them(hub, ensure):
    client = WebhooksClient(hub.url, "hf_token")
    ids = [client.create_webhook(url=URL, watched="model:someone/arm").id for _ in range(2)]
    client.create_webhook(url=f"{URL}/other", watched="model:someone/arm")
    with pytest.raises(HubTrouble, match="2 webhooks send to") as caught:
        ensure()
    assert all(name in str(caught.value) for name in ids)
    assert ensure(webhook_id=ids[0]) == ["updated"]


@pytest.mark.parametrize("how", [500, "cut", "stall"])
def test_one_that_was_made_before_its_answer_broke_off_is_found(hub, ensure, how, limit_ends_at):
    if how == 500:
        WebhooksClient(hub.url, "hf_token").create_webhook(url=URL, watched="model:someone/arm")
        made, answer = dict(hub.webhooks), hub.answer
        hub.webhooks.clear()

        def make_and_fail(request):
            if request.method == "POST" and not hub.webhooks:
                hub.webhooks.update(made)
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
    assert the_one(hub).secret == SECRET


@pytest.mark.parametrize("how", ["hang", "drop", 429, 503])
def test_one_that_was_not_made_is_asked_for_again_after_a_look(hub, ensure, how, limit_ends_at):
    failure = hub.script("POST", how, 1, **({"retry_after": 0} if how == 429 else {}))
    if how == "hang":
        limit_ends_at(failure)
    assert ensure() == ["created", "created"]
    assert methods(hub) == ["GET", "POST", "GET", "POST"]
    assert len(hub.webhooks) == 1


def test_a_secret_that_can_be_guessed_is_refused(hub, ensure):
    with pytest.raises(InvalidWebhook, match="at least 16"):
        ensure(secret="my-secret")
    assert hub.requests == []


def test_a_job_of_the_hub_has_to_be_named_by_its_webhook(hub, ensure):
    assert ensure(url=None, job_id="687f") == ["created"]
    with pytest.raises(HubTrouble, match="choose a webhook with webhook_id"):
        ensure(url=None, job_id="687f")
    assert ensure(url=None, job_id="687f", webhook_id=the_one(hub).id, secret=None) == ["updated"]
