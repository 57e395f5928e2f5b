"""Fields of a webhook, its display without secrets, and the source of its secret."""

import copy
import pickle
import stat
from dataclasses import asdict

import huggingface_hub
import pytest

from hooks import WebhookWatchedItem, find_secret
from hooks.client.webhook import check_webhook_id, make_body, mask_url, read_domains, read_watched, read_webhook
from hooks.errors import HubTrouble, InvalidWebhook

URL = "https://example.com/hook"
ANSWER = {
    "id": "654bbbc16f2ec14d77f109cc",
    "url": "https://someone:pass-word-1@example.com/hook?a=1&secret=in-the-url",
    "watched": [{"type": "model", "name": "someone/arm"}],
    "domains": ["repo", "discussion"],
    "secret": "very-secret-indeed",
    "disabled": False,
    "createdAt": "2026-09-01",
}
JOB = {"dockerImage": "python:3.12", "command": ["true"], "secrets": {"HF_TOKEN": "hf_of-the-job"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": URL, "job_id": "687f"}, "Set `url` or `job_id` but not both."),
        ({}, "Missing argument for webhook: `url` or `job_id`."),
        ({"job_id": " "}, "job_id is empty"),
        ({"url": "ftp://example.com"}, "wanted https://host/path"),
        ({"url": "https://[::1"}, "cannot be read"),
        ({"url": "https://example.com/a b"}, "has spaces"),
        ({"url": "http://example.com/hook"}, "--allow-http example.com"),
        ({"url": "http://10.1.2.3/hook"}, "allow_http=['10.1.2.3']"),
        ({"url": "http://11.1.2.3/hook", "allow_http": ["10.0.0.0/8"]}, "is http"),
        ({"url": "http://127.0.0.1.example.com"}, "is http"),
        ({"url": URL, "watched": []}, "watched is empty"),
        ({"url": URL, "watched": ["modle arm"]}, "'modle arm' cannot be read; wanted 'type:name'"),
        ({"url": URL, "domains": []}, "domains is empty"),
        ({"url": URL, "domains": ["repos"]}, "'repos' is unknown; wanted: repo"),
        ({"url": URL, "secrets": {"HF_TOKEN": "hf_value"}}, "`secrets` can only be set together with `job_id`."),
        ({"job_id": "687f", "secrets": {"HF_TOKEN": 5}}, "wanted texts as name and value"),
        *(
            ({"url": URL, "secret": secret}, "at least 16 visible ASCII characters")
            for secret in ("", "short", "with a blank in it all", "übermäßig-geheim-und-lang")
        ),
        ({"url": URL, "secret": "my-secret", "shortest_secret": 16}, "at least 16 visible ASCII characters"),
    ],
)
def test_invalid_arguments_are_refused_without_showing_a_secret(arguments, message):
    with pytest.raises(InvalidWebhook) as caught:
        make_body(**arguments, is_new=True)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not arguments.get("secret") or arguments["secret"] not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"url": url} for url in (URL, "http://127.0.0.1:8001/x", "http://localhost/x", "http://[::1]:80/x")),
        {"url": "http://robot.local/x", "allow_http": ["ROBOT.local"]},
        {"url": "http://robot.local/x", "allow_http": ["*"]},
        {"url": "http://10.1.2.3/x", "allow_http": ["10.0.0.0/8"]},
        {"url": URL, "secret": "x" * 16},
        {"job_id": "687f", "secrets": {"HF_TOKEN": "", "OTHER": "x"}},
        {"is_new": False},
        {"is_new": False, "watched": [], "allow_empty": True},
    ],
)
def test_valid_arguments_are_sent_unchanged(arguments, caplog):
    sent = {"jobSourceId" if name == "job_id" else name: value for name, value in arguments.items()}
    options = {"is_new", "allow_http", "allow_empty"}
    assert make_body(**{"is_new": True} | arguments) == {name: sent[name] for name in set(sent) - options}
    assert not caplog.records


def test_watched_items_are_read_in_any_form_without_duplicates():
    hub_item = huggingface_hub.WebhookWatchedItem("model", "someone/arm")
    item = WebhookWatchedItem("dataset", "someone/cubes")
    forms = ["model:someone/arm", {"type": "org", "name": "someone"}, hub_item, item, "org:someone"]
    found = read_watched(forms)
    names = [f"{item.type}:{item.name}" for item in found]
    assert names == ["model:someone/arm", "org:someone", "dataset:someone/cubes"]
    for form in forms:
        assert len(read_watched(form)) == 1


@pytest.mark.parametrize("item", ["arm", ":arm", "model:", "model: arm", {"type": "model"}, {}, 5, None])
def test_a_watched_item_that_cannot_be_read_is_quoted(item):
    with pytest.raises(InvalidWebhook, match="wanted 'type:name'") as caught:
        read_watched([item])
    assert repr(item) in str(caught.value)


def test_domains_are_read_without_duplicates_and_old_names_renamed():
    assert read_domains(["discussions", "repo", "discussion"]) == ["discussion", "repo"]
    assert read_domains("repo") == ["repo"]


@pytest.mark.parametrize("webhook_id", ["", ".", "..", "a/b", "a?b", "a b", "%2e", "ä", "a\n", None])
def test_an_id_that_would_be_another_path_is_refused(webhook_id):
    with pytest.raises(InvalidWebhook):
        check_webhook_id(webhook_id)


def test_a_webhook_extends_huggingface_hubs_and_can_be_copied():
    webhook = read_webhook(ANSWER | {"job": JOB})
    assert isinstance(webhook, huggingface_hub.WebhookInfo)
    assert (webhook.id, webhook.url, webhook.secret) == (ANSWER["id"], ANSWER["url"], ANSWER["secret"])
    assert (webhook.has_secret, webhook.status, webhook.job_id) == (True, "enabled", None)
    assert read_webhook(ANSWER).job is None
    for other in (copy.deepcopy(webhook), pickle.loads(pickle.dumps(webhook))):
        assert (other, other.status) == (webhook, "enabled")
    assert asdict(webhook)["watched"] == ANSWER["watched"]


def test_printed_webhooks_contain_no_secret():
    webhook = read_webhook(ANSWER | {"job": JOB})
    for text in (repr(webhook), str(webhook), f"{webhook}", repr([webhook])):
        for secret in ("very-secret-indeed", "pass-word-1", "in-the-url", "hf_of-the-job"):
            assert secret not in text
        assert "example.com/hook" in text
        assert "HF_TOKEN" in text
    assert webhook.job is not None
    assert webhook.job.secrets == {"HF_TOKEN": "hf_of-the-job"}


@pytest.mark.parametrize(
    ("more", "name", "expected"),
    [
        ({"hasSecret": True}, "has_secret", True),  # Newer Hubs return this field instead of the secret.
        ({"hasSecret": False}, "has_secret", False),
        ({}, "has_secret", False),
        ({"disabled": True}, "status", "disabled"),
        ({"disabled": "suspended-after-failure"}, "status", "suspended"),
        ({"disabled": "by-an-admin"}, "status", "disabled"),
    ],
)
def test_the_state_comes_from_a_bool_or_text(more, name, expected):
    webhook = read_webhook({name: value for name, value in ANSWER.items() if name != "secret"} | more)
    assert (webhook.secret, getattr(webhook, name)) == (None, expected)


@pytest.mark.parametrize(
    "answer", [None, [], "webhook", {}, ANSWER | {"watched": [5]}, ANSWER | {"job": {"expose": 5}}]
)
def test_an_answer_that_is_not_a_webhook_is_refused(answer):
    with pytest.raises(HubTrouble, match="the Hub answered"):
        read_webhook(answer)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.com/hook?a=%20b", "https://example.com/hook?a=%20b"),
        ("https://example.com:99/hook?Secret=x&b=2", "https://example.com:99/hook?Secret=********&b=2"),
        ("https://me:word@example.com:99/", "https://me:********@example.com:99/"),
        ("https://[::1", "********"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url, shown):
    assert mask_url(url) == shown


def test_a_secret_is_read_from_its_file(tmp_path):
    (tmp_path / "secret").write_text(" of-the-file\n")
    assert find_secret() is None
    assert find_secret(file=tmp_path / "secret") == "of-the-file"
    made = find_secret(file=tmp_path / "new", generate=True)
    assert find_secret(file=tmp_path / "new", generate=True) == made == (tmp_path / "new").read_text().strip()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
