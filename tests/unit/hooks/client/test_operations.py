"""The seven operations and replay: requests to a stub Hub and their results."""

import inspect
import json
import logging
import pickle
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

import hooks as management
from hooks import AsyncWebhooksClient, HubRefused, WebhookInfo, WebhooksClient, WebhookWatchedItem
from hooks.errors import HubTrouble, InvalidWebhook, UnknownWebhook
from tests.testing.stub_hub.answers import Answer, Refusal

URL, SECRET = "https://example.com/hook", "a-long-enough-secret"
WATCHED = [WebhookWatchedItem("user", "someone"), {"type": "org", "name": "others"}]
ALL = {"url": URL, "watched": WATCHED, "domains": ["repo", "discussion"], "secret": SECRET}


def bodies(hub) -> list[object]:
    return [json.loads(request.body) for request in hub.requests if request.body]


def wire(hub) -> list[tuple[str, str, object]]:
    found = [(request.method, request.path, json.loads(request.body or b"null")) for request in hub.requests]
    hub.requests.clear()
    return found


def _functions(endpoint: str) -> SimpleNamespace:
    options = {"endpoint": endpoint, "token": "hf_token"}
    names = [name for name in management.__all__ if name.endswith(("_webhook", "_webhooks"))]
    return SimpleNamespace(**{name: partial(getattr(management, name), **options) for name in names})


@pytest.mark.parametrize("make_client", [WebhooksClient, AsyncWebhooksClient, _functions])
async def test_a_webhook_is_created_changed_and_deleted(hub, make_client):
    client = _functions(hub.url) if make_client is _functions else make_client(hub.url, "hf_token")

    async def ask(name, *arguments, **named):
        result = getattr(client, name)(*arguments, **named)
        return await result if inspect.isawaitable(result) else result

    made = await ask("create_webhook", **ALL)
    assert isinstance(made, WebhookInfo)
    assert made.url == URL
    assert made.watched == [huggingface_hub.WebhookWatchedItem("user", "someone"), WebhookWatchedItem("org", "others")]
    assert (made.domains, made.status, made.has_secret) == (["repo", "discussion"], "enabled", True)
    assert made.secret == (SECRET if hub.webhooks.echoes_secrets else None)
    assert await ask("get_webhook", made.id) == made
    assert (await ask("update_webhook", made.id, url=f"{URL}/new")).url == f"{URL}/new"
    assert [webhook.id for webhook in await ask("list_webhooks")] == [made.id]
    assert (await ask("disable_webhook", made.id)).status == "disabled"
    assert (await ask("enable_webhook", made.id)).disabled is False
    assert await ask("delete_webhook", made.id) is None
    assert await ask("list_webhooks") == []
    with pytest.raises(UnknownWebhook, match=made.id):
        await ask("get_webhook", made.id)
    with pytest.raises(InvalidWebhook):
        await ask("create_webhook", watched=[])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("create_webhook", ALL),
        ("create_webhook", {"job_id": "687f", "watched": WATCHED, "secrets": {"HF_TOKEN": "hf_x"}}),
        ("create_webhook", {"url": URL, "watched": WATCHED, "domains": ["repo"]}),
        ("update_webhook", {"webhook_id": f"{1:024x}", **ALL}),
        *((f"{name}_webhook", {"webhook_id": f"{1:024x}"}) for name in ("enable", "disable", "get", "delete")),
        ("list_webhooks", {}),
    ],
)
def test_requests_equal_those_of_huggingface_hub(stub, client, name, arguments):
    reference = HfApi(stub.url, "hf_token")
    for _ in range(2):
        reference.create_webhook(url=URL, watched=[{"type": "model", "name": "someone/arm"}])
    stub.requests.clear()
    getattr(client, name)(**arguments)
    (request,) = wire(stub)
    if name == "delete_webhook":
        arguments, request = (
            {"webhook_id": f"{2:024x}"},
            (request[0], request[1].replace(f"{1:024x}", f"{2:024x}"), request[2]),
        )
    getattr(reference, name)(**arguments)
    assert [request] == wire(stub)


def test_an_update_of_only_the_url_keeps_the_watched_items(hub):
    client = WebhooksClient(hub.url, "hf_token")
    made = client.create_webhook(**ALL | {"domains": ["repo"]})
    changed = client.update_webhook(made.id, url=f"{URL}/new")
    watched = [{"type": "user", "name": "someone"}, {"type": "org", "name": "others"}]
    assert bodies(hub)[-1] == {"watched": watched, "domains": ["repo"], "url": f"{URL}/new"}
    assert (changed.url, changed.watched, changed.has_secret) == (f"{URL}/new", made.watched, True)
    # huggingface_hub sends an empty list with the same call, and the webhook watches nothing afterwards.
    HfApi(hub.url, "hf_token").update_webhook(made.id, url=f"{URL}/new")
    assert bodies(hub)[-1] == {"watched": [], "url": f"{URL}/new"}
    assert client.get_webhook(made.id).watched == []


def test_an_update_that_watches_nothing_needs_allow_empty(stub, client):
    made = client.create_webhook(**ALL)
    with pytest.raises(InvalidWebhook, match="allow_empty=True"):
        client.update_webhook(made.id, watched=[])
    assert len(bodies(stub)) == 1
    assert client.update_webhook(made.id, watched=[], allow_empty=True).watched == []


def test_a_job_receives_its_secrets(stub, client):
    made = client.create_webhook(job_id="687f", watched="model:someone/arm", secrets={"HF_TOKEN": "hf_1", "A": "1"})
    assert made.url is None
    assert made.job is not None
    client.update_webhook(made.id, job_id="687f", secrets={"A": ""})
    assert bodies(stub)[-1]["secrets"] == {"A": ""}  # type: ignore[index]
    assert "hf_1" not in repr(made)


def test_an_unknown_webhook_is_an_error_of_both_libraries(stub, client):
    with pytest.raises(UnknownWebhook, match="there is no webhook 'nope'") as caught:
        client.delete_webhook("nope")
    error = caught.value
    assert isinstance(error, HfHubHTTPError)
    assert (error.status, error.response.status_code) == (404, 404)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.status) == (type(error), str(error), 404)


@pytest.mark.parametrize(
    ("token", "message"), [("hf_wrong", "401"), (False, "hf auth login"), (True, "hf auth login"), (None, "HF_TOKEN")]
)
def test_a_wrong_or_missing_token_is_an_error_with_a_remedy(stub, token, message):
    with pytest.raises(HubTrouble) as caught:
        WebhooksClient(stub.url, token).list_webhooks()
    assert message in str(caught.value)


def test_token_precedence_is_call_then_client_then_environment(stub, monkeypatch):
    with pytest.raises(HubRefused):
        WebhooksClient(stub.url, "hf_token").list_webhooks(token="hf_other")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    assert WebhooksClient(stub.url).list_webhooks() == []
    assert stub.requests[-1].headers["user-agent"].startswith("robojax/")


def test_an_invalid_token_is_not_shown():
    with pytest.raises(InvalidWebhook) as caught:
        WebhooksClient("http://127.0.0.1:9", "hf_one\nhf_two").list_webhooks()
    assert "hf_one" not in str(caught.value)


@pytest.mark.parametrize("body", [b"<html>", b'"text"', b'{"webhook": 5}', b"{}"])
def test_an_invalid_answer_is_reported(stub, client, body, monkeypatch):
    monkeypatch.setattr(stub.webhooks, "_one", lambda webhook: Answer(200, body))
    with pytest.raises(HubTrouble, match="answered"):
        client.create_webhook(**ALL)
    assert len(stub.requests) == 1


def test_no_secret_is_in_a_log_or_an_error(hub, caplog, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_DEBUG", True)
    client = WebhooksClient(hub.url, "hf_token")
    with caplog.at_level(logging.DEBUG, "huggingface_hub"), caplog.at_level(logging.DEBUG, "hooks"):
        logging.getLogger("huggingface_hub").addHandler(caplog.handler)
        try:
            made = client.create_webhook(**ALL)
            client.update_webhook(made.id, secret=SECRET, url=URL)
            client.create_webhook(job_id="687f", watched=WATCHED, secrets={"A": "of-the-job"})
            hub.script("POST", 400)
            message = f"secret {SECRET} is not good"  # Some servers repeat the request in the error.
            monkeypatch.setattr("tests.testing.stub_hub.hub.Refusal", lambda status, *_: Refusal(status, message))
            with pytest.raises(HubRefused) as caught:
                client.create_webhook(**ALL)
        finally:
            logging.getLogger("huggingface_hub").removeHandler(caplog.handler)
    error = caught.value
    text = "".join([caplog.text, str(error), repr(error), str(error.server_message), repr(client)])
    assert [secret for secret in (SECRET, "of-the-job", "hf_token") if secret in text] == []
    assert "curl" in caplog.text
    assert "********" in str(error)


def test_a_replay_returns_the_status_of_the_receiver(stub, client, monkeypatch):
    made = client.create_webhook(url=URL, watched="model:someone/arm")
    monkeypatch.setattr(stub.webhooks, "_replay", lambda webhook, log: {"good": 200, "bad": 503}[log])
    assert client.replay(made.id, "good") == 200
    assert client.replay(made.id, "bad") == 503
    with pytest.raises(UnknownWebhook, match="with a delivery 'other'"):
        client.replay(made.id, "other")
