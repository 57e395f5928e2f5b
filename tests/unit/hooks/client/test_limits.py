"""A Hub that hangs, refuses or disconnects: duration of calls, and repeated requests."""

import asyncio
import subprocess
import sys
import threading
import time

import huggingface_hub
import pytest

from hooks import AsyncWebhooksClient, HubRefused, HubSilent, HubUnreachable, WebhooksClient
from hooks.client.client import read_retry_after
from hooks.errors import HubTrouble

URL = "https://example.com/hook"


@pytest.mark.parametrize("how", ["hang", "stall"])
def test_a_hub_that_hangs_is_an_error_within_the_limit(stub, how, pauses):
    stub.script("GET", how, None)
    began = time.monotonic()
    with pytest.raises(HubSilent, match="did not answer GET") as caught:
        WebhooksClient(stub.url, "hf_token", timeout=1.0).list_webhooks()
    assert 1.0 <= time.monotonic() - began < 2.0 + pauses.lost(began)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, HubTrouble)
    assert caught.value.was_sent


@pytest.mark.alone
async def test_a_hanging_hub_does_not_block_the_event_loop(stub, pauses):
    stub.script("GET", "hang", None)
    client = AsyncWebhooksClient(stub.url, "hf_token", timeout=0.4)
    calls = asyncio.gather(*(client.list_webhooks() for _ in range(40)), return_exceptions=True)
    longest, last = 0.0, time.monotonic()
    while not calls.done():
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, pauses.running(last, now)), now
    assert {type(answer) for answer in await calls} == {HubSilent}
    assert longest < 0.3


def test_a_program_ends_while_the_hub_hangs(stub):
    stub.script("GET", "hang", None)
    program = f"""
import asyncio
from hooks import AsyncWebhooksClient
async def main():
    try:
        await asyncio.wait_for(AsyncWebhooksClient({stub.url!r}, "hf_token", timeout=60).list_webhooks(), 0.3)
    except TimeoutError:
        print("left")
asyncio.run(main())
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=90) == "left\n"


def test_nothing_is_sent_after_the_time_limit(stub, monkeypatch):
    """An address look-up has no time limit. If it ends after the limit of the call, nothing may be sent."""
    found, done = threading.Event(), threading.Event()
    session = huggingface_hub.get_session()
    request = session.request

    def slow(*arguments, **named):
        found.wait(60)
        try:
            return request(*arguments, **named)
        finally:
            done.set()

    monkeypatch.setattr(session, "request", slow)
    with pytest.raises(HubSilent) as caught:
        WebhooksClient(stub.url, "hf_token", timeout=0.3).create_webhook(url=URL, watched="model:someone/arm")
    assert not caught.value.was_sent
    found.set()
    assert done.wait(60)
    assert stub.requests == []
    assert not stub.webhooks


@pytest.mark.parametrize("how", [429, 500, 503, "drop"])
def test_idempotent_requests_are_repeated(stub, client, how):
    made = client.create_webhook(url=URL, watched="model:someone/arm")
    details = {"retry_after": 0} if how == 429 else {}
    for call in (
        lambda: client.get_webhook(made.id),
        lambda: client.disable_webhook(made.id),
        lambda: client.update_webhook(made.id, url=f"{URL}/2", watched="model:a/b", domains="repo"),
    ):
        stub.requests.clear()
        stub.script("webhooks", how, 1, **details)
        call()
        assert len(stub.requests) == 2


def test_retry_after_of_a_429_is_respected(stub, client, pauses):
    stub.script("GET", 429, 1, retry_after=1)
    began = time.monotonic()
    assert client.list_webhooks() == []
    assert 1 <= time.monotonic() - began < 2 + pauses.lost(began)
    assert len(stub.requests) == 2


@pytest.mark.parametrize(
    ("status", "details", "message"),
    [(429, {"retry_after": 300}, "it asks to wait 300 s"), *((status, {}, None) for status in (400, 401, 403, 404))],
)
def test_a_refusal_or_a_long_wait_is_an_error_at_once(stub, client, pauses, status, details, message):
    stub.script("GET", status, None, **details)
    began = time.monotonic()
    with pytest.raises(HubRefused, match=message) as caught:
        client.list_webhooks()
    assert pauses.running(began) < 1
    assert caught.value.status == status
    assert len(stub.requests) == 1


@pytest.mark.parametrize("how", [429, 500, 503, "drop", "hang", "cut"])
def test_the_creation_of_a_webhook_is_never_repeated(stub, client, how, limit_ends_at):
    failure = stub.script("POST", how, None)
    if how == "hang":
        limit_ends_at(failure)
    with pytest.raises(HubTrouble):
        client.create_webhook(url=URL, watched="model:someone/arm")
    assert [request.method for request in stub.requests] == ["POST"]


def test_a_deletion_whose_answer_is_lost_succeeds(stub, client):
    made = client.create_webhook(url=URL, watched="model:someone/arm")
    stub.requests.clear()
    stub.script("DELETE", 500, 1)
    del stub.webhooks[made.id]
    client.delete_webhook(made.id)
    assert [request.method for request in stub.requests] == ["DELETE", "DELETE"]


def test_an_unreachable_hub_is_reported(stub, client):
    stub.close()
    with pytest.raises(HubUnreachable, match="cannot be reached") as caught:
        client.list_webhooks()
    assert isinstance(caught.value, ConnectionError)
    assert not caught.value.was_sent


def test_offline_mode_is_reported(stub, client, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE"):
        client.create_webhook(url=URL, watched="model:someone/arm")
    assert stub.requests == []


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:10 GMT"}, 10.0),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "3"}, 55.0),
        ({"RateLimit": '"api";r=9;t=55'}, None),
    ],
)
def test_retry_after_is_read_from_the_headers(headers, seconds):
    now = 1_445_412_480.0  # Wed, 21 Oct 2015 07:28:00 GMT
    assert read_retry_after(headers, now=now) == seconds


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_an_invalid_limit_is_refused(timeout):
    with pytest.raises(ValueError, match="seconds above 0"):
        WebhooksClient("https://huggingface.co", timeout=timeout)
