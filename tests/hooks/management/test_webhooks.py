"""What is told of a webhook: its state, and its secrets never in sight."""

import copy
import pickle
from dataclasses import asdict

import pytest
from huggingface_hub import WebhookInfo as Theirs

from hooks.errors import HubTrouble
from hooks.management.webhooks import masked_url, read_webhook, status_of

TOLD = {
    "id": "654bbbc16f2ec14d77f109cc",
    "url": "https://someone:pass-word-1@example.com/hook?a=1&secret=in-the-url",
    "watched": [{"type": "model", "name": "someone/arm"}],
    "domains": ["repo", "discussion"],
    "secret": "very-secret-indeed",
    "disabled": False,
    "createdAt": "2026-09-01",
}
JOB = {"dockerImage": "python:3.12", "command": ["true"], "secrets": {"HF_TOKEN": "hf_of-the-job"}}


def test_it_is_huggingface_hubs_with_more():
    webhook = read_webhook(TOLD)
    assert isinstance(webhook, Theirs)
    assert (webhook.id, webhook.url, webhook.secret) == (TOLD["id"], TOLD["url"], TOLD["secret"])
    assert (webhook.has_secret, webhook.status, webhook.job) == (True, "enabled", None)
    assert webhook.raw["createdAt"] == "2026-09-01"


def test_no_secret_is_in_what_is_printed():
    webhook = read_webhook({**TOLD, "job": JOB})
    for text in (repr(webhook), str(webhook), f"{webhook}", repr([webhook]), repr(webhook.raw)):
        for secret in ("very-secret-indeed", "pass-word-1", "in-the-url", "hf_of-the-job"):
            assert secret not in text
        assert "example.com/hook" in text
        assert "HF_TOKEN" in text
    assert webhook.job is not None
    assert webhook.job.secrets == {"HF_TOKEN": "hf_of-the-job"}


def test_it_can_be_copied_and_taken_apart_like_huggingface_hubs():
    webhook = read_webhook({**TOLD, "job": JOB})
    for other in (copy.deepcopy(webhook), pickle.loads(pickle.dumps(webhook))):
        assert (other, other.raw, other.status) == (webhook, webhook.raw, "enabled")
    assert asdict(webhook)["watched"] == TOLD["watched"]
    assert asdict(webhook)["raw"]["secret"] == "********"


@pytest.mark.parametrize(
    ("told", "has_secret"), [({"hasSecret": True}, True), ({"hasSecret": False}, False), ({}, False)]
)
def test_newer_hubs_tell_only_whether_there_is_a_secret(told, has_secret):
    webhook = read_webhook({name: value for name, value in TOLD.items() if name != "secret"} | told)
    assert (webhook.secret, webhook.has_secret) == (None, has_secret)


@pytest.mark.parametrize(
    ("disabled", "status"),
    [(False, "enabled"), (True, "disabled"), ("suspended-after-failure", "suspended"), ("by-an-admin", "disabled")],
)
def test_the_state_comes_from_a_bool_or_text(disabled, status):
    assert status_of(disabled) == read_webhook({**TOLD, "disabled": disabled}).status == status


@pytest.mark.parametrize("told", [None, [], "webhook", {}, {**TOLD, "watched": [5]}, {**TOLD, "job": {"expose": 5}}])
def test_what_is_no_webhook_is_refused(told):
    with pytest.raises(HubTrouble, match="the Hub answered"):
        read_webhook(told)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.com/hook", "https://example.com/hook"),
        ("https://example.com/hook?a=%20b", "https://example.com/hook?a=%20b"),
        ("https://example.com:99/hook?Secret=x&b=2", "https://example.com:99/hook?Secret=********&b=2"),
        ("https://me:word@example.com:99/", "https://me:********@example.com:99/"),
        ("https://[::1", "********"),
    ],
)
def test_an_address_is_shown_without_what_is_secret_in_it(url, shown):
    assert masked_url(url) == shown
