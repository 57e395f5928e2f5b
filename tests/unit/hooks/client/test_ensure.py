"""``ensure``: one webhook, however often and however badly it is asked for. And ``heal``."""

import json

import pytest

from hooks.client import WebhooksClient
from hooks.errors import HubTrouble, InvalidWebhook, UnknownWebhook

URL, SECRET = "https://example.com/hook", "a-long-enough-secret"
SUSPENDED = "suspended-after-failure"


@pytest.fixture
def ensure(hub):
    """``ensure`` as it is called from a script that is run again and again, and what it did."""

    def call(**more) -> list[str]:
        did: list[str] = []
        wanted = {"url": URL, "watched": ["model:someone/arm"], "secret": SECRET, "tell": did.append}
        WebhooksClient(hub.url, "hf_token").ensure(**wanted | more)
        return did

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


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"watched": "org:someone"}, ("watched", [{"type": "org", "name": "someone"}])),
        ({"domains": ["repo"]}, ("domains", ["repo"])),
    ],
)
def test_what_differs_is_changed(hub, ensure, change, seen):
    ensure(secret=None)
    assert ensure(secret=None, **change) == ["updated"]
    assert getattr(the_one(hub), seen[0]) == seen[1]
    assert ensure(secret=None, **change) == ["unchanged"]


def test_domains_that_are_not_named_stay(hub, ensure):
    ensure(domains=["repo"])
    ensure()
    assert the_one(hub).domains == ["repo"]


@pytest.mark.parametrize("disabled", [True, SUSPENDED])
def test_one_that_is_disabled_is_enabled_unless_not_wanted(hub, ensure, disabled):
    ensure(secret=None)
    the_one(hub).disabled = disabled
    assert ensure(secret=None, enable=False) == ["unchanged"]
    assert the_one(hub).disabled == disabled
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
    """An answer of 500 is scripted in its place; the others are made and then break off."""
    if how == 500:
        WebhooksClient(hub.url, "hf_token").create_webhook(url=URL, watched="model:someone/arm")
        made = dict(hub.webhooks)
        hub.webhooks.clear()
        request = hub.answer

        def late(asked):
            if asked.method == "POST" and not hub.webhooks:
                hub.webhooks.update(made)
                hub.script("POST /api/settings/webhooks$", 500, 1)
            return request(asked)

        hub.answer = late
    else:
        failure = hub.script("POST", how, 1)
        if how == "stall":
            limit_ends_at(failure)
    hub.requests.clear()
    assert ensure() == ["updated"]
    assert methods(hub) == ["GET", "POST", "GET", "POST"]
    assert len(hub.webhooks) == 1
    assert the_one(hub).secret == SECRET


@pytest.mark.parametrize("how", ["hang", "drop", 429, 503])
def test_one_that_was_not_made_is_asked_for_again_after_a_look(hub, ensure, how, limit_ends_at):
    failure = hub.script("POST", how, 1, **({"retry_after": 0} if how == 429 else {}))
    if how == "hang":
        limit_ends_at(failure)
    assert ensure() == ["created"]
    assert methods(hub) == ["GET", "POST", "GET", "POST"]
    assert len(hub.webhooks) == 1


def test_a_refusal_is_not_asked_for_again(hub, ensure):
    hub.script("POST", 403, None)
    with pytest.raises(HubTrouble, match="403"):
        ensure()
    assert methods(hub) == ["GET", "POST"]


def test_a_secret_that_can_be_guessed_is_refused(hub, ensure):
    with pytest.raises(InvalidWebhook, match="at least 16"):
        ensure(secret="my-secret")
    assert hub.requests == []


def test_a_job_is_found_where_the_hub_tells_it_and_asked_about_where_not(hub, ensure):
    assert ensure(url=None, job_id="687f") == ["created"]
    with pytest.raises(HubTrouble, match="name it with webhook_id"):
        ensure(url=None, job_id="687f")
    assert ensure(url=None, job_id="687f", webhook_id=the_one(hub).id, secret=None) == ["updated"]
    the_one(hub).job["sourceId"] = "687f"
    assert ensure(url=None, job_id="687f", secret=None) == ["unchanged"]
    assert ensure(url=None, job_id="other", secret=None) == ["created"]


def test_heal_enables_what_the_hub_suspended_and_nothing_else(stub, client):
    for disabled in (False, True, SUSPENDED):
        made = client.create_webhook(url=f"{URL}/{disabled}", watched="model:someone/arm")
        stub.webhooks[made.id].disabled = disabled
    (healed,) = client.heal()
    assert (healed.is_healed, healed.webhook.status, healed.webhook.url) == (True, "enabled", f"{URL}/{SUSPENDED}")
    assert [webhook.disabled for webhook in stub.webhooks.values()] == [False, True, False]
    assert client.heal() == []


def test_heal_of_one_that_is_not_suspended_says_so(stub, client):
    made = client.create_webhook(url=URL, watched="model:someone/arm")
    (left,) = client.heal(made.id)
    assert (left.is_healed, left.reason) == (False, "it is not suspended but enabled")
    with pytest.raises(UnknownWebhook):
        client.heal("nope")


@pytest.mark.parametrize(
    ("status", "is_healed"), [(200, True), (202, True), (302, False), (404, False), (500, False), (401, True)]
)
def test_heal_tries_the_address_first(stub, client, receiver, status, is_healed):
    receiver.status = status
    made = client.create_webhook(url=receiver.url, watched="model:someone/arm")
    stub.webhooks[made.id].disabled = SUSPENDED
    (healed,) = client.heal(try_first=True)
    assert healed.is_healed == is_healed
    assert f"answered {status}" in healed.reason
    assert client.get_webhook(made.id).status == ("enabled" if is_healed else "suspended")
    ((headers, body),) = receiver.got
    payload = json.loads(body)
    assert payload["webhook"] == {"id": made.id, "version": 3}
    assert (payload["event"]["scope"], payload["repo"]["name"]) == ("webhook.test", "someone/arm")
    assert headers["webhook-id"].startswith("self-test-")
    assert "authorization" not in headers
    assert "x-webhook-secret" not in headers


def test_the_secret_goes_with_the_try_and_must_be_right(stub, client, receiver):
    receiver.secret = SECRET
    made = client.create_webhook(url=receiver.url, watched="model:someone/arm", secret=SECRET)
    stub.webhooks[made.id].disabled = SUSPENDED
    (left,) = client.heal(try_first=True, secret="not-the-one-it-has")
    assert (left.is_healed, "answered 403" in left.reason) == (False, True)
    (healed,) = client.heal(try_first=True)  # this Hub tells it
    assert healed.is_healed


def test_an_address_that_nobody_answers_at_is_left_suspended(stub, client, receiver):
    made = client.create_webhook(url=receiver.url, watched="model:someone/arm")
    stub.webhooks[made.id].disabled = SUSPENDED
    receiver.close()
    (left,) = client.heal(try_first=True)
    assert (left.is_healed, "cannot be reached" in left.reason) == (False, True)
