"""Another policy for a running session over HTTP: a changed folder, a request, a rollback, a webhook delivery."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.api.schemas import Deployment
from service.errors import TransportError
from service.rollout import webhooks
from service.rollout.gates import ProbationSettings
from service.rollout.records import Quarantined
from tests.testing.doubles import ScriptedPolicy
from tests.testing.rig import Server, expect_ok, expect_refusal, show, started
from tests.testing.stub_hub import StubHub
from tests.testing.target import target_server
from tests.testing.waiting import until

LOOKS: list[str] = []  # Folders that the server inspected in this test.
QUICK = {"update_quiet": 0.1, "update_probation": 0.2, "update_patience": 1.0, "update_poll": 0.0}
PAYLOAD = {
    "event": {"action": "update", "scope": "repo.content"},
    "repo": {"type": "model", "name": "lab/other", "id": "1", "owner": {"id": "2"}, "private": False},
    "webhook": {"id": "3", "version": 3},
}


def write(folder: Path, step: float = 0.1, **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"step": step, **more}))
    (folder / "model.safetensors").write_bytes(str(step).encode())


def load(path: str, revision: str | None = None, /, *, like: object = None, on_progress: object = None):
    reply = json.loads((Path(path).expanduser() / "config.json").read_text())
    return ScriptedPolicy(step=reply["step"], failures=[np.full((1, 20, 6), np.nan, np.float32)] * reply.get("nan", 0))


class Rig(Server):
    folder: Path
    robot: asyncio.Task[None] | None = None

    async def stats(self) -> dict[str, Any]:
        return (await self.call("GET", "/sessions/arm"))[1]["stats"]

    async def deployments(self) -> list[dict[str, Any]]:
        return (await self.call("GET", "/deployments"))[1]

    async def until(self, claim: Callable[[list[dict[str, Any]]], Any]) -> dict[str, Any]:
        async def claimed() -> list[dict[str, Any]] | None:
            return found if claim(found := await self.deployments()) else None

        return (await until(claimed, within=60))[0]

    async def running(self, auto_update: str = "swap") -> None:
        expect_ok(await self.create(policy_path=str(self.folder), auto_update=auto_update, rate=50))
        self.robot = asyncio.create_task(show(self.transport.link))
        assert (await self.call("POST", "/sessions/arm/start"))[0] == 200


@asynccontextmanager
async def rigged(folder: Path, loads: Any = None, **settings: Any) -> AsyncIterator[Rig]:
    write(folder)
    async with started(Rig, load=loads or load, **(QUICK | settings)) as rig:
        rig.folder = folder
        try:
            yield rig
        finally:
            if rig.robot is not None:
                rig.robot.cancel()


async def watched() -> None:
    """Wait until the server has seen the current state of the followed folders."""
    LOOKS.clear()
    await until(lambda: LOOKS, within=30)


@pytest.fixture(autouse=True)
def quick_and_without_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("service.rollout.webhooks.FOLDER_POLL_INTERVAL", 0.05)
    look_at = webhooks._read_file_states

    def looked_at(folder: str) -> object:
        found = look_at(folder)
        LOOKS.append(folder)
        return found

    monkeypatch.setattr(webhooks, "_read_file_states", looked_at)
    # A busy machine causes no rollback here; tests/integration/rollout/test_rollout.py tests rollbacks.
    monkeypatch.setattr(
        "service.rollout.webhooks.ProbationSettings", partial(ProbationSettings, missed=1e3, starvations=1000)
    )
    monkeypatch.delenv("WEBHOOK_SECRET", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def test_changed_folder_is_swapped_in_unless_it_is_broken(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy") as rig:
        await rig.running()
        first = (await rig.stats())["policy_commit"]
        assert len(first) == 40
        await watched()
        write(rig.folder, 0.2)
        swapped = await rig.until(lambda found: found and found[0]["result"])
        assert (swapped["result"], swapped["trigger"]) == ("swapped", "folder"), swapped
        stats = await rig.stats()
        assert (stats["policy_commit"], stats["policy_before"]) == (swapped["sha"], first)
        write(rig.folder, 90.0)
        refused = await rig.until(lambda found: len(found) == 2 and found[0]["result"])
        assert (refused["result"], refused["reason"]) == ("rejected", "out_of_range"), refused
        assert (await rig.stats())["policy_commit"] == swapped["sha"]
        (bad,) = (await rig.call("GET", "/quarantine"))[1]
        assert (bad["sha"], bad["reason"]) == (refused["sha"], "out_of_range")
        for model, found in ((Deployment, swapped), (Deployment, refused), (Quarantined, bad)):
            model.model_validate(found, strict=True)
            assert set(found) == set(model.model_fields)
        assert (await rig.call("DELETE", f"/quarantine/{bad['sha']}"))[0] == 200
        assert (await rig.call("DELETE", f"/quarantine/{bad['sha']}"))[0] == 404
        assert (await rig.call("GET", f"/deployments/{refused['id']}"))[1] == refused
        assert (await rig.call("GET", "/deployments?session_id=other"))[1] == []
        assert (await rig.call("GET", "/deployments?limit=1"))[1] == [refused]
        assert (await rig.call("GET", f"/deployments?limit=1&before={refused['id']}"))[1] == [swapped]
        assert (await rig.call("GET", f"/deployments?before={swapped['id']}"))[1] == []


async def test_policy_is_requested_and_rolled_back(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy") as rig:
        await rig.running("off")
        first = (await rig.stats())["policy_commit"]
        status, reply = await rig.call("POST", "/sessions/arm/policy")
        assert (status, reply["result"]) == (200, "noop"), reply
        write(rig.folder, 0.2)
        reply = expect_ok(await rig.call("POST", "/sessions/arm/policy", json={}))
        assert reply["result"] in (None, "swapped"), reply
        assert (await rig.stats())["policy_commit"] == reply["sha"] != first
        done = await rig.until(lambda found: found[0]["result"])
        assert (done["id"], done["result"]) == (reply["id"], "swapped")
        status, reply = await rig.call("POST", "/sessions/arm/rollback")
        assert (status, reply["result"]) == (200, "rolled_back"), reply
        assert (await rig.stats())["policy_commit"] == first
        # A rolled-back policy is not deployed again without ``force``.
        refused = await rig.call("POST", "/sessions/arm/policy", json={})
        expect_refusal(refused, 409, "update_failed", "DELETE /quarantine/", '"force": true')
        expect_ok(await rig.call("POST", "/sessions/arm/policy", json={"force": True}))


async def test_staged_policy_waits_for_a_request(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy") as rig:
        await rig.running("stage")
        first = (await rig.stats())["policy_commit"]
        await watched()
        write(rig.folder, 0.2)
        staged = await rig.until(lambda found: found and found[0]["result"])
        assert staged["result"] == "staged", staged
        stats = await rig.stats()
        assert (stats["policy_commit"], stats["policy_staged"]) == (first, staged["sha"])
        expect_ok(await rig.call("POST", "/sessions/arm/policy"))
        stats = await rig.stats()
        assert (stats["policy_commit"], stats["policy_staged"]) == (staged["sha"], None)


async def test_unknown_deployments_and_invalid_limits_are_refused(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy") as rig:
        assert (await rig.call("POST", "/sessions/nobody/policy", json={}))[0] == 404
        assert (await rig.call("POST", "/sessions/nobody/rollback"))[0] == 404
        assert (await rig.call("GET", "/deployments/nothing"))[0] == 404
        for query in ("limit=0", "limit=x", "limit=501", "before=nothing"):
            assert (await rig.call("GET", f"/deployments?{query}"))[0] == 422


async def test_invalid_bodies_and_revisions_are_explained(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy") as rig:
        await rig.running("off")
        for body in ({"revision": ""}, {"revision": 7}, {"unknown": 1}, {"force": "yes"}, []):
            status, reply = await rig.call("POST", "/sessions/arm/policy", json=body)
            assert status == 422, (body, reply)
        refused = await rig.call("POST", "/sessions/arm/policy", json={"revision": "v7"})
        expect_refusal(refused, 409, "update_failed", "'v7'")
        expect_refusal(await rig.call("POST", "/sessions/arm/rollback"), 409, "update_failed")
        status, reply = await rig.create("pinned", policy_path="lab/pick", revision="a" * 40, auto_update="swap")
        assert status == 422
        assert reply["detail"][0]["loc"] == ["body", "auto_update"]


async def test_deliveries_need_the_secret_or_a_loopback_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rigged(tmp_path / "policy") as rig:
        status, reply = await rig.call("POST", "/webhooks/policies", json=PAYLOAD)
        assert (status, reply["status"]) == (200, "ignored"), reply
        proxied = {"x-forwarded-for": "203.0.113.7"}
        assert (await rig.call("POST", "/webhooks/policies", json=PAYLOAD, headers=proxied))[0] == 403
        foreign = {"origin": "https://elsewhere.example"}
        assert (await rig.call("POST", "/webhooks/policies", json=PAYLOAD, headers=foreign))[0] == 403
    secrets = tmp_path / "secrets"
    secrets.write_text("# two, while one replaces the other\nfirst-of-the-secrets\nsecond-of-the-secrets\n")
    async with rigged(tmp_path / "policy", webhook_secret_file=str(secrets)) as rig:
        assert (await rig.call("POST", "/webhooks/policies", json=PAYLOAD))[0] == 401
        wrong = {"x-webhook-secret": "wrong"}
        assert (await rig.call("POST", "/webhooks/policies", json=PAYLOAD, headers=wrong))[0] == 403
        for secret in ("first-of-the-secrets", "second-of-the-secrets"):
            right = {"x-webhook-secret": secret, "webhook-id": secret}
            assert (await rig.call("POST", "/webhooks/policies", json=PAYLOAD, headers=right))[0] == 200
        reply = json.dumps((await rig.call("GET", "/debug/system"))[1])
        assert str(tmp_path) not in reply
        assert "of-the-secrets" not in reply


async def test_push_is_refused_only_for_invalid_event_fields(tmp_path: Path) -> None:
    def change(part: str, **fields: object) -> dict[str, Any]:
        return PAYLOAD | {part: PAYLOAD[part] | fields}

    version = {"webhook": {"id": "w"}}
    owner = {"repo": {name: value for name, value in PAYLOAD["repo"].items() if name != "owner"}}
    accepted = (
        change("repo", url="https://hub/user/arm"),
        change("repo", private=None, tags="robotics", headSha=3, stars=[]),
        change("webhook", version="latest"),
        change("event", scope="repo.weather", action="archived", by={"name": "x"}),
        PAYLOAD | version | owner | {"updatedFiles": "many", "later": [1]},
    )
    refused = (
        (change("repo", name=5), ["repo.name"]),
        (change("repo", type=None, url="x"), ["repo.type"]),
        (change("event", scope=["repo"]), ["event.scope"]),
        (PAYLOAD | {"webhook": {"version": 3}}, ["webhook.id"]),
        (PAYLOAD | {"event": "update"}, ["event"]),
    )
    async with rigged(tmp_path / "policy") as rig:
        for payload in accepted:
            status, reply = await rig.call("POST", "/webhooks/policies", json=payload)
            assert (status, reply["status"]) == (200, "ignored"), (payload, reply)
        for payload, fields in refused:
            status, reply = await rig.call("POST", "/webhooks/policies", json=payload)
            assert (status, reply["fields"]) == (422, fields), (payload, reply)


async def test_session_events_reach_registered_webhooks(tmp_path: Path) -> None:
    from hooks import WebhooksClient

    settings = {"registry": True, "state": str(tmp_path / "state"), "registry_allow": ("127.0.0.0/8",)}
    async with target_server() as target, rigged(tmp_path / "policy", **settings) as rig:
        token = (tmp_path / "state" / "registry-token").read_text().strip()
        assert (tmp_path / "state" / "registry-token").stat().st_mode & 0o077 == 0
        client = WebhooksClient(endpoint=rig.url, token=token)
        made = await asyncio.to_thread(
            client.create_webhook, url=target.url, watched=[{"type": "user", "name": "robojax"}], domains=["session"]
        )
        assert made.status == "enabled"
        await rig.running()
        await watched()
        write(rig.folder, 0.2)
        await rig.until(lambda found: found and found[0]["result"])
        assert (await rig.call("DELETE", "/sessions/arm"))[0] == 200
        await target.wait_for(4, within=60)
    events_received = [one.json for one in target.got]
    events = ("created", "started", "policy.swapped", "deleted")
    assert [one["type"] for one in events_received] == [f"session.{event}" for event in events]
    assert events_received[2]["data"]["sessions"] == ["arm"]


async def test_failed_session_is_not_an_error_of_the_server(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy") as rig:
        rig.transport.refuse = TransportError("no such room")
        assert (await rig.create(policy_path=str(rig.folder)))[0] == 502
        for path in ("/sessions/arm/policy", "/sessions/arm/rollback"):
            expect_refusal(await rig.call("POST", path), 409, "update_failed", "'arm'")


async def test_folder_in_the_home_directory_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with rigged(tmp_path / "policy") as rig:
        rig.folder = Path("~/policy")
        await rig.running()
        await watched()
        write(tmp_path / "policy", 0.2)
        swapped = await rig.until(lambda found: found and found[0]["result"])
        assert swapped["result"] == "swapped", swapped


async def test_missing_folder_is_not_searched_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the Hub, its name may belong to a stranger's repo."""
    monkeypatch.chdir(tmp_path)
    async with rigged(tmp_path / "policies") as rig:
        rig.folder = Path("lab/act")
        (tmp_path / "lab").mkdir()
        write(tmp_path / "lab" / "act")
        with StubHub() as hub:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
            hub.push("lab/act", {"config.json": '{"step": 0.2}', "model.safetensors": b"0.2"})
            await rig.running()
            shutil.rmtree(tmp_path / "lab" / "act")
            status, reply = await rig.call("POST", "/sessions/arm/policy")
            assert (status, reply["code"]) == (409, "update_failed"), reply
            assert "lab/act is not there" in reply["detail"]
            assert hub.requests == []


async def test_tag_pattern_selects_the_highest_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for number, step in ((9, 0.1), (10, 0.2)):
            files = {"config.json": json.dumps({"step": step}), "model.safetensors": str(step).encode()}
            highest = hub.push("lab/act", files, tag=f"deploy-{number}")
        hub.push("lab/act", {"config.json": "{}"})
        loaded: list[str | None] = []

        def load_noted(path: str, revision: str | None = None, /, **more: Any) -> ScriptedPolicy:
            loaded.append(revision)
            return ScriptedPolicy(commit=revision)

        async with rigged(tmp_path / "policy", loads=load_noted) as rig:
            followed = {"policy_path": "lab/act", "auto_update": "swap"}
            expect_ok(await rig.create(revision="deploy-*", **followed))
            assert loaded == [highest]
            assert (await rig.stats())["policy_commit"] == highest
            status, reply = await rig.create("b", revision="nothing-*", **followed)
            assert status == 422, reply
            assert "no tag is like" in json.dumps(reply)


async def test_session_does_not_load_a_quarantined_policy(tmp_path: Path) -> None:
    async with rigged(tmp_path / "policy", state=str(tmp_path / "state")) as rig:
        await rig.running("off")
        write(rig.folder, 90.0)
        bad = (await rig.call("POST", "/sessions/arm/policy"))[1]
        assert bad["reason"] == "out_of_range"
        assert (await rig.call("GET", "/sessions/arm"))[1]["status"] == "running"
    # The folder still holds the policy, and neither old nor new sessions have a gate.
    async with rigged(tmp_path / "other", state=str(tmp_path / "state")) as rig:
        rig.folder = tmp_path / "policy"
        for making in (rig.call("POST", "/sessions/arm/restart"), rig.create("b", policy_path=str(rig.folder))):
            status, reply = await making
            assert status == 422, reply
            assert f"DELETE /quarantine/{bad['sha']}" in json.dumps(reply)
        assert (await rig.call("GET", "/sessions/arm"))[1]["status"] == "interrupted"
        assert (await rig.call("DELETE", f"/quarantine/{bad['sha']}"))[0] == 200
        expect_ok(await rig.call("POST", "/sessions/arm/restart"))
