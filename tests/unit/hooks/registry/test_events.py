"""Webhooks that each event reaches, and the content of the event."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from aiohttp import web

from hooks.errors import HooksError, UnknownWebhook
from hooks.payload import WebhookPayload, sample
from hooks.registry.registry import Registry
from hooks.registry.store import Watched, Webhook
from tests.testing.target import TargetServer
from tests.testing.waiting import until
from tests.unit.hooks.registry.serving import settings, until_finished

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with Registry(settings()).running() as running:
        yield running


async def add(registry: Registry, url: str, **named: Any) -> Webhook:
    body = {"url": url, "watched": [{"type": "model", "name": "lab/act"}], **named}
    return await registry.create_webhook(body)


async def until_disabled(registry: Registry, webhook: Webhook) -> Any:
    """Return the value of ``disabled`` when the webhook is disabled."""

    async def disabled() -> Any:
        return (await registry.get_webhook(webhook.id)).to_json()["disabled"]

    return await until(disabled)


@pytest.mark.parametrize(
    ("watched", "scope", "repo", "matches"),
    [
        ("model:lab/act", "repo.content", "model:lab/act", True),
        ("model:Lab/ACT", "repo", "model:lab/act", True),
        ("model:lab/act", "repo.content", "dataset:lab/act", False),
        ("model:lab/act", "repo.content", "model:lab/act2", False),
        ("model:lab/act", "discussion.comment", "model:lab/act", False),
        ("org:lab", "repo.content", "dataset:lab/anything", True),
        ("user:lab", "repo.config", "space:lab/anything", True),
        ("user:lab", "repo.content", "model:labs/act", False),
        ("user:act", "repo.content", "model:act", False),
        ("model:act", "repo.content", "model:act", True),
        ("bucket:lab/b", "repo.content", "bucket:lab/b", True),
        ("model:lab/act", "repo.something.new", "model:lab/act", True),
    ],
)
def test_a_webhook_matches_events_of_its_watched_repos(watched: str, scope: str, repo: str, matches: bool) -> None:
    webhook = Webhook("1", "http://x", watched=(Watched(*watched.split(":")),), domains=("repo",))
    assert webhook.matches(scope, *repo.split(":")) is matches
    assert not webhook.is_watching_sessions


async def test_an_event_is_valid_for_huggingface_hub_and_for_this_product(
    registry: Registry, target: TargetServer
) -> None:
    webhook = await add(registry, target.url, secret="s" * 20)
    assert await registry.emit_repo("lab/act", NEW, OLD) == 1
    assert await registry.emit_repo("lab/other", NEW, OLD) == 0
    await target.wait_for(1)
    [got] = target.got
    hub_payload = huggingface_hub.WebhookPayload.model_validate_json(got.body)
    payload = WebhookPayload.model_validate_json(got.body)
    assert (hub_payload.repo.name, hub_payload.event.scope, hub_payload.webhook.id) == (
        "lab/act",
        "repo.content",
        webhook.id,
    )
    assert payload.webhook.version == 3
    assert (payload.repo.head_sha, payload.new_sha("main")) == (NEW, NEW)
    assert payload.updatedRefs is not None
    assert payload.updatedRefs[0].oldSha == OLD


async def test_session_events_reach_every_webhook_of_the_session_domain(
    registry: Registry, target: TargetServer
) -> None:
    await add(registry, f"{target.url}/repo")
    webhook = await add(registry, f"{target.url}/session", watched=[], domains=["session"], secret="x" * 20)
    plain = {"session_id": "s1", "missed_ticks": 0}
    data = plain | {"rate": float("nan"), "path": Path("/p"), "list": (1, {"a": None}), "no\udcfftext": "\ud800.bin"}
    assert await registry.emit_session("session.policy.swapped", data) == 1
    await target.wait_for(1)
    body = target.got[0].json
    assert set(body) == {"type", "timestamp", "data"}
    assert body["type"] == "session.policy.swapped"
    assert body["timestamp"].endswith("Z")
    assert body["data"] == plain | {"rate": None, "path": "/p", "list": [1, {"a": None}], "no?text": "?.bin"}
    assert (await until_finished(registry, webhook.id))["subject"] == "session:s1"
    with pytest.raises(ValueError, match=r"wanted words separated by dots, e\.g\. session\.started"):
        await registry.emit_session("Session Started!", {})


async def test_a_hub_event_is_relayed_once_to_each_webhook_of_its_repo(
    registry: Registry, target: TargetServer
) -> None:
    payload = sample(repo="lab/act", sha=NEW)
    payload["repo"]["somethingNew"] = {"kept": True}
    first, second = await add(registry, f"{target.url}/1"), await add(registry, f"{target.url}/2")
    await add(registry, f"{target.url}/3", watched=[{"type": "dataset", "name": "lab/act"}])
    assert await registry.emit_payload(payload, event_id="delivery-1") == 2
    assert await registry.emit_payload(WebhookPayload.model_validate(payload), event_id="delivery-1") == 0
    await target.wait_for(2)
    assert len({got.id for got in target.got}) == 2
    bodies = [got.json for got in target.got]
    assert await registry.emit_payload(bodies[0]) == 0, "an event of this registry is not relayed again"
    assert {body.pop("webhook")["id"] for body in bodies} == {first.id, second.id}
    del payload["webhook"]
    assert bodies == [payload, payload]
    with pytest.raises(ValueError, match="event"):
        await registry.emit_payload({"no": "payload"})


async def test_a_webhook_that_answers_410_is_disabled(registry: Registry, target: TargetServer) -> None:
    webhook = await add(registry, target.url)
    target.answers = [web.Response(status=410)]
    await registry.emit_repo("lab/act", NEW, OLD)
    await target.wait_for(1)
    assert await until_disabled(registry, webhook) is True
    assert await registry.emit_repo("lab/act", OLD, NEW) == 0


async def test_a_failing_webhook_is_suspended_until_it_is_enabled(target: TargetServer) -> None:
    async with Registry(settings(waits=(0.0, 0.01), suspend_after=2)).running() as registry:
        webhook = await add(registry, target.url)
        target.answers = [web.Response(status=500) for _ in range(4)]
        await registry.emit_repo("lab/act", NEW, OLD)
        await registry.emit_repo("lab/act", OLD, NEW)
        assert await until_disabled(registry, webhook) == "suspended-after-failure"
        assert await registry.emit_repo("lab/act", NEW, OLD) == 0
        enabled = await registry.enable_webhook(webhook.id)
        assert enabled.disabled == ""
        assert await registry.emit_repo("lab/act", NEW, OLD) == 1
        await target.wait_for(5)
        entries = await registry.list_deliveries(webhook.id, 100, None)
        assert [entry["status"] for entry in entries].count("failed") == 2


async def test_a_success_between_failures_prevents_suspension(target: TargetServer) -> None:
    async with Registry(settings(waits=(0.0,), suspend_after=2)).running() as registry:
        webhook = await add(registry, target.url)
        target.answers = [web.Response(status=status) for status in (500, 200, 500)]
        for _ in range(3):
            await registry.emit_repo("lab/act", NEW, OLD)
        await target.wait_for(3)
        await until_finished(registry, webhook.id)
        assert not (await registry.get_webhook(webhook.id)).disabled


async def test_a_deleted_webhook_gets_no_more_deliveries(registry: Registry, target: TargetServer) -> None:
    webhook = await add(registry, target.url)
    target.gate.clear()
    await registry.emit_repo("lab/act", NEW, OLD)
    await target.wait_for(1)
    await registry.emit_repo("lab/act", OLD, NEW)
    await registry.delete_webhook(webhook.id)
    target.gate.set()
    await asyncio.sleep(0.05)
    assert len(target.got) == 1
    with pytest.raises(UnknownWebhook):
        await registry.list_deliveries(webhook.id, 100, None)


async def test_events_are_refused_while_the_registry_does_not_run() -> None:
    with pytest.raises(HooksError, match="does not run; start its server"):
        await Registry(settings()).emit_session("session.started", {})
