"""Management of the registry by the real HfApi and the real hf command."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from huggingface_hub import HfApi, WebhookWatchedItem
from huggingface_hub.errors import BadRequestError, HfHubHTTPError

from hooks.registry.registry import Registry
from tests.testing.target import TargetServer
from tests.unit.hooks.registry.serving import TOKEN, serve, settings, until_finished

WATCHED = [WebhookWatchedItem(type="model", name="lab/act"), WebhookWatchedItem(type="user", name="julien")]
PUBLIC = "http://93.184.215.14/hook"
BASE = "/api/settings/webhooks"


class Served:
    def __init__(self, registry: Registry, url: str):
        self.registry, self.url = registry, url
        self.api = HfApi(endpoint=url, token=TOKEN)

    call = staticmethod(asyncio.to_thread)

    async def request(self, method: str, path: str, token: str | None = TOKEN, **named: Any) -> tuple[int, Any, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, headers=headers, **named) as answer,
        ):
            return answer.status, await answer.json(content_type=None), answer.headers


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[jobs.retrain]\nargv = ["true"]\nsecrets = ["HF_TOKEN"]\nenv = { HIDDEN = "value-of-env" }\n')
    registry = Registry(settings(database=tmp_path / "registry.sqlite3", jobs_file=jobs, max_webhooks=5))
    async with serve(registry) as url:
        yield Served(registry, url)


async def test_hf_api_creates_changes_and_deletes_a_webhook(served: Served) -> None:
    api, call = served.api, served.call
    assert await call(api.list_webhooks) == []
    made = await call(api.create_webhook, url=PUBLIC, watched=WATCHED, domains=["repo"], secret="my-secret")
    assert (made.url, made.watched, made.domains) == (PUBLIC, WATCHED, ["repo"])
    assert (made.secret, made.disabled, made.job) == (None, False, None)
    assert len(made.id) == 24
    assert await call(api.get_webhook, made.id) == made
    assert await call(api.list_webhooks) == [made]
    changed = await call(api.update_webhook, made.id, url=PUBLIC + "/2")
    assert (changed.url, changed.watched, changed.domains) == (PUBLIC + "/2", WATCHED, ["repo"])
    changed = await call(api.update_webhook, made.id, watched=WATCHED[:1], domains=["repo", "discussion"])
    assert (changed.watched, changed.domains) == (WATCHED[:1], ["repo", "discussion"])
    assert (await call(api.disable_webhook, made.id)).disabled is True
    assert (await call(api.enable_webhook, made.id)).disabled is False
    assert await call(api.delete_webhook, made.id) is None
    with pytest.raises(HfHubHTTPError, match="there is no webhook with this id") as error:
        await call(api.get_webhook, made.id)
    assert error.value.response.status_code == 404


@pytest.mark.parametrize(
    ("token", "status", "text"),
    [
        (False, 401, "A token of this registry is needed"),
        ("hf_" + "x" * 30, 401, "Invalid credentials in Authorization header"),
    ],
)
async def test_a_missing_or_wrong_token_is_refused(served: Served, token: Any, status: int, text: str) -> None:
    with pytest.raises(HfHubHTTPError, match=text) as error:
        await served.call(served.api.create_webhook, url=PUBLIC, watched=WATCHED, token=token)
    assert error.value.response.status_code == status
    assert await served.call(served.api.list_webhooks) == []


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"url": "http://169.254.169.254/latest"}, "the metadata server of a cloud"),
        ({"url": "http://10.1.2.3/hook"}, "10.1.2.3 is private.*--registry-allow 10.1.2.0/24"),
        ({"url": "http://u:p@example.com/"}, "user name or password"),
        ({"url": "ftp://example.com"}, "wanted http or https"),
        ({"watched": []}, "watched: wanted at least one item"),
        ({"watched": [{"type": "planet", "name": "x"}]}, "'type'.: Input should be 'bucket', .*, found 'planet'"),
        ({"watched": [{"type": "model", "name": "../x"}]}, "'name'.: wanted name or owner/name, found '../x'"),
        ({"watched": [{"type": "model", "name": "a"}] * 101}, "watched: Tuple should have at most 100 items"),
        ({"domains": ["weather"]}, "domains.0.: Input should be 'repo', 'discussion' or 'session', found 'weather'"),
        ({"domains": []}, "domains: Tuple should have at least 1 item"),
        ({"secret": "geheim-ä"}, "secret: wanted printable ASCII"),
        ({"secret": "x" * 513}, "secret: String should have at most 512 characters"),
    ],
)
async def test_an_invalid_webhook_is_refused_with_the_reason(served: Served, named: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequestError, match=text):
        await served.call(served.api.create_webhook, **{"url": PUBLIC, "watched": WATCHED, **named})
    made = await served.call(served.api.create_webhook, url=PUBLIC, watched=WATCHED)
    if named != {"watched": []}:  # HfApi also sends an empty list if it is not passed.
        with pytest.raises(BadRequestError, match=text):
            await served.call(served.api.update_webhook, made.id, **named)
    assert await served.call(served.api.get_webhook, made.id) == made


async def test_one_error_names_all_invalid_fields(served: Served) -> None:
    body = {"url": 3, "watched": 4, "domains": ["x"], "secret": "\n"}
    status, answer, headers = await served.request("POST", BASE, json=body)
    assert status == 400
    for name in ("url", "watched", "domains", "secret"):
        assert name in answer["error"]
        assert name in headers["X-Error-Message"]
    assert headers["X-Error-Code"] == "BadRequest"


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'"x"', b"[" * 100_000, b"{" + b" " * 300_000])
async def test_a_body_that_is_not_an_object_is_400(served: Served, body: bytes) -> None:
    status, answer, _ = await served.request("POST", BASE, data=body)
    assert status == 400
    assert answer["error"].startswith("body: ")


async def test_a_body_with_contradicting_or_mistyped_fields_is_400(served: Served) -> None:
    for body, text in (
        ({"url": PUBLIC, "jobSourceId": "retrain"}, "exclude each other"),
        ({}, "are missing"),
        ({"job": {"command": ["rm"]}}, "registers jobs"),
        ({"url": PUBLIC, "watched": [5]}, "watched[0]: Input should be a dictionary"),
        ({"url": PUBLIC, "secrets": {"HF_TOKEN": "x"}}, "only jobs have them"),
        ({"jobSourceId": "retrain", "secrets": ["HF_TOKEN"]}, "secrets: Input should be a valid dictionary"),
        ({"jobSourceId": "retrain", "secrets": {"HF TOKEN": "x"}}, "secrets['HF TOKEN']"),
        ({"jobSourceId": "retrain", "secrets": {f"{number}\ud800": 5 for number in range(30)}}, "secrets['0"),
        ({"jobSourceId": "retrain", "secrets": {"HF_TOKEN": 5}}, "secrets['HF_TOKEN']: Input should be a valid string"),
        ({"url": PUBLIC, "secret": 5}, "secret: Input should be a valid string"),
    ):
        status, answer, _ = await served.request("POST", BASE, json={"watched": [], **body})
        assert (status, text in answer["error"]) == (400, True)


async def test_the_limit_on_webhooks_is_reported(served: Served) -> None:
    for _ in range(5):
        await served.call(served.api.create_webhook, url=PUBLIC, watched=WATCHED)
    with pytest.raises(BadRequestError, match="there are 5 webhooks already, the largest number"):
        await served.call(served.api.create_webhook, url=PUBLIC, watched=WATCHED)


async def test_a_job_webhook_needs_a_registered_job_and_known_secrets(served: Served) -> None:
    api, call = served.api, served.call
    with pytest.raises(HfHubHTTPError, match="there is no job 'rm -rf'; the operator registered: retrain") as error:
        await call(api.create_webhook, job_id="rm -rf", watched=WATCHED)
    assert error.value.response.status_code == 404
    with pytest.raises(BadRequestError, match="takes no LD_PRELOAD; it takes: HF_TOKEN"):
        await call(api.create_webhook, job_id="retrain", watched=WATCHED, secrets={"LD_PRELOAD": "/tmp/x.so"})
    made = await call(api.create_webhook, job_id="retrain", watched=WATCHED, secrets={"HF_TOKEN": "hf_hidden"})
    assert (made.url, made.job.labels) == (None, {"id": "retrain"})
    changed = await call(api.update_webhook, made.id, url=PUBLIC)
    assert (changed.url, changed.job) == (PUBLIC, None)
    _, answer, _ = await served.request("GET", f"{BASE}/{made.id}")
    assert "secretNames" not in answer["webhook"]


async def test_an_update_without_a_secret_keeps_the_secret(served: Served) -> None:
    body = {"url": PUBLIC, "watched": [{"type": "model", "name": "act"}], "secret": "of-the-webhook"}
    _, answer, _ = await served.request("POST", BASE, json=body)
    _, answer, _ = await served.request("POST", f"{BASE}/{answer['webhook']['id']}", json={"domains": ["repo"]})
    assert (answer["webhook"]["hasSecret"], answer["webhook"]["domains"]) == (True, ["repo"])


async def test_secrets_are_accepted_but_never_returned(
    served: Served, target: TargetServer, caplog: pytest.LogCaptureFixture
) -> None:
    secret, variable = "very-hidden-secret", "very-hidden-variable"
    caplog.set_level("DEBUG")
    body = {"url": target.url, "watched": [{"type": "model", "name": "act"}], "secret": secret}
    _, answer, _ = await served.request("POST", BASE, json=body)
    texts = [answer]
    webhook = answer["webhook"]["id"]
    assert answer["webhook"]["hasSecret"] is True
    job = {"jobSourceId": "retrain", "watched": body["watched"], "secret": secret, "secrets": {"HF_TOKEN": variable}}
    texts.append((await served.request("POST", BASE, json=job))[1])
    target.answers = []
    await served.registry.emit_repo("act", "b" * 40, "a" * 40)
    await target.wait_for(1)
    assert target.got[0].headers["x-webhook-secret"] == secret
    for path in ("", f"/{webhook}", f"/{webhook}/deliveries"):
        texts.append((await served.request("GET", BASE + path))[1])
    text = json.dumps(texts) + caplog.text
    for hidden in (secret, variable, "value-of-env", TOKEN):
        assert hidden not in text
    _, answer, _ = await served.request("POST", f"{BASE}/{webhook}", json={"watched": [], "secret": ""})
    assert answer["webhook"]["hasSecret"] is False


async def test_a_replay_goes_to_the_current_address_and_is_logged(served: Served, target: TargetServer) -> None:
    watched = [{"type": "model", "name": "act"}]
    made = await served.call(served.api.create_webhook, url=f"{target.url}/old", watched=watched)
    await served.registry.emit_repo("act", "b" * 40, "a" * 40)
    await target.wait_for(1)
    path = f"{BASE}/{made.id}/deliveries"
    await until_finished(served.registry, made.id)
    _, answer, _ = await served.request("GET", path)
    [entry] = answer["deliveries"]
    assert (entry["type"], entry["status"]) == ("repo.content", "delivered")
    assert entry["webhookDeliveryId"] == target.got[0].id
    assert (entry["attempts"][0]["status"], entry["attempts"][0]["excerpt"]) == (200, "fine")
    await served.call(served.api.update_webhook, made.id, url=f"{target.url}/new", secret="new")
    status, answer, _ = await served.request("POST", f"{BASE}/{made.id}/replay/{entry['id']}")
    assert (status, answer) == (200, {"status": 200})
    assert [got.id for got in target.got] == [entry["webhookDeliveryId"]] * 2
    assert target.got[1].headers["x-webhook-secret"] == "new"
    assert target.got[0].body == target.got[1].body
    status, answer, _ = await served.request("POST", f"{BASE}/{made.id}/replay/none")
    assert (status, "no delivery with this id" in answer["error"]) == (404, True)
    for limit in ("0", "201", "x", "-1"):
        assert (await served.request("GET", f"{path}?limit={limit}"))[0] == 400
    assert (await served.request("GET", f"{path}?limit=1&before={entry['id']}"))[1] == {"deliveries": []}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("", "/x", "/x/deliveries")),
        *(("POST", path) for path in ("", "/x", "/x/enable", "/x/disable", "/x/replay/y")),
        ("DELETE", "/x"),
    ],
)
async def test_each_route_needs_a_token_and_a_known_webhook(served: Served, method: str, path: str) -> None:
    for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "t"):
        status, _, headers = await served.request(method, BASE + path, token, data=b"no json")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    if path:
        body = {"watched": []} if path == "/x" and method == "POST" else None
        status, answer, _ = await served.request(method, BASE + path, json=body)
        assert (status, answer["error"]) == (404, "there is no webhook with this id")


async def test_the_hf_command_manages_the_registry(served: Served, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    environment |= {"HF_ENDPOINT": served.url, "HF_TOKEN": TOKEN}
    environment |= {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    async def run(*arguments: str, fails: bool = False) -> str:
        command = [str(Path(sys.executable).with_name("hf")), "webhooks", *arguments]
        process = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60
        )
        assert (process.returncode != 0) is fails, process.stdout + process.stderr
        return process.stdout + process.stderr if fails else process.stdout

    await run("create", "--url", PUBLIC, "--watch", "model:lab/act", "--domain", "repo", "--secret", "my-secret")
    [made] = await served.call(served.api.list_webhooks)
    await run("update", made.id, "--url", PUBLIC + "/2")
    await run("disable", made.id)
    [row] = json.loads(await run("ls", "--format", "json"))
    lists = {"domains": ["repo"], "watched": ["model:lab/act"]}
    assert row == {"id": made.id, "url": PUBLIC + "/2", "disabled": True, **lists}
    await run("delete", made.id, "--yes")
    assert await served.call(served.api.list_webhooks) == []
    refused = await run("create", "--url", "http://10.0.0.1", "--watch", "model:a", fails=True)
    assert "10.0.0.1 is private" in refused
