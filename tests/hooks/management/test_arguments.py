"""What a webhook may be made of: said before anything is sent, and never with the secret."""

import logging

import huggingface_hub
import pytest

from hooks.errors import InvalidWebhook
from hooks.management.arguments import (
    check_job_secrets,
    check_secret,
    check_target,
    check_webhook_id,
    read_domains,
    read_watched,
)
from hooks.management.webhooks import WebhookWatchedItem

URL = "https://example.com/hook"


@pytest.mark.parametrize(
    ("url", "job_id", "said"),
    [
        (URL, "687f", "Set `url` or `job_id` but not both."),
        (None, None, "Missing argument for webhook: `url` or `job_id`."),
        (None, " ", "job_id is empty"),
        ("ftp://example.com", None, "wanted https://host/path"),
        ("https://", None, "wanted https://host/path"),
        ("https://[::1", None, "cannot be read"),
        ("https://example.com:port", None, "cannot be read"),
        ("https://example.com/a b", None, "blanks"),
        ("http://example.com/hook", None, "--allow-http example.com"),
        ("http://10.1.2.3/hook", None, "allow_http=['10.1.2.3']"),
        ("http://127.0.0.1.example.com", None, "is http"),
    ],
)
def test_a_target_that_cannot_be_is_refused(url, job_id, said):
    with pytest.raises(InvalidWebhook) as caught:
        check_target(url, job_id)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("url", [URL, "http://127.0.0.1:8001/x", "http://localhost/x", "http://[::1]:80/x"])
def test_tls_and_loopback_are_taken(url):
    check_target(url, None)


@pytest.mark.parametrize("allowed", ["robot.local", "ROBOT.local", "*"])
def test_http_is_taken_where_it_is_allowed(allowed):
    check_target("http://robot.local/x", None, allow_http=["other", allowed])


def test_http_is_taken_in_an_allowed_network_only():
    check_target("http://10.1.2.3/x", None, allow_http=["10.0.0.0/8"])
    with pytest.raises(InvalidWebhook):
        check_target("http://11.1.2.3/x", None, allow_http=["10.0.0.0/8"])


def test_an_update_needs_no_target():
    check_target(None, None, required=False)


def test_watched_items_are_read_in_any_form_each_once():
    found = read_watched(
        [
            "model:someone/arm",
            {"type": "org", "name": "someone"},
            huggingface_hub.WebhookWatchedItem("model", "someone/arm"),
            WebhookWatchedItem("dataset", "someone/cubes"),
            "org:someone",
        ]
    )
    assert [str(item) for item in found] == ["model:someone/arm", "org:someone", "dataset:someone/cubes"]
    assert found[0] == huggingface_hub.WebhookWatchedItem("model", "someone/arm")
    assert huggingface_hub.WebhookWatchedItem("model", "someone/arm") == found[0]
    assert found[0] != huggingface_hub.WebhookWatchedItem("dataset", "someone/arm")


@pytest.mark.parametrize("one", ["model:a/b", {"type": "model", "name": "a/b"}, WebhookWatchedItem("model", "a/b")])
def test_a_single_watched_item_is_a_list_of_one(one):
    assert read_watched(one) == [huggingface_hub.WebhookWatchedItem("model", "a/b")]


@pytest.mark.parametrize("item", ["arm", ":arm", "model:", "model: arm", {"type": "model"}, {}, 5, None])
def test_a_watched_item_that_cannot_be_read_is_quoted(item):
    with pytest.raises(InvalidWebhook, match="wanted 'type:name'") as caught:
        read_watched([item])
    assert repr(item) in str(caught.value)


def test_a_type_that_is_not_known_is_warned_of_and_kept():
    with pytest.warns(UserWarning, match=r"'modle' is not known \(did you mean 'model'\?\)"):
        assert [str(item) for item in read_watched(["modle:arm"])] == ["modle:arm"]


@pytest.mark.parametrize("kind", ["bucket", "dataset", "kernel", "model", "org", "space", "user"])
def test_types_of_the_hub_are_known(kind):
    read_watched([f"{kind}:name"])


def test_domains_are_read_each_once_and_the_old_name_is_put_right():
    assert read_domains(["discussions", "repo", "discussion"]) == ["discussion", "repo"]
    assert read_domains("repo") == ["repo"]


@pytest.mark.parametrize(("domains", "said"), [([], "is empty"), (["repos"], "did you mean 'repo'"), ([""], "known:")])
def test_domains_that_cannot_be_are_refused(domains, said):
    with pytest.raises(InvalidWebhook) as caught:
        read_domains(domains)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "secret", ["", "short", "with a blank in it all", "übermäßig-geheim-und-lang", "line\nbreak" * 4]
)
def test_a_secret_that_cannot_be_is_refused_and_not_told(secret):
    with pytest.raises(InvalidWebhook, match="at least 16 visible ASCII characters") as caught:
        check_secret(secret)
    assert not secret or secret not in str(caught.value)


def test_a_short_secret_is_warned_of_in_the_log_without_it(caplog):
    with caplog.at_level(logging.WARNING):
        check_secret("my-secret")
    assert "9 characters" in caplog.text
    assert "my-secret" not in caplog.text
    with pytest.raises(InvalidWebhook):
        check_secret("my-secret", shortest=16)


def test_a_long_secret_is_taken_in_silence(caplog):
    check_secret("x" * 16)
    check_secret(None)
    assert not caplog.records


def test_job_secrets_need_a_job():
    check_job_secrets({"HF_TOKEN": "", "OTHER": "x"}, "687f")
    with pytest.raises(InvalidWebhook, match=r"`secrets` can only be set together with `job_id`\."):
        check_job_secrets({"HF_TOKEN": "hf_value"}, None)
    with pytest.raises(InvalidWebhook, match="wanted a name and a text"):
        check_job_secrets({"HF_TOKEN": 5}, "687f")  # type: ignore[dict-item]


@pytest.mark.parametrize("webhook_id", ["", ".", "..", "a/b", "a?b", "a b", "%2e", "ä", None])
def test_an_id_that_would_be_another_path_is_refused(webhook_id):
    with pytest.raises(InvalidWebhook):
        check_webhook_id(webhook_id)
