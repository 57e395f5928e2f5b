"""The stub is driven by the real client and the real CLI, or nothing that is tested against it means anything."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.errors as hub_errors
import pytest
from huggingface_hub import HfApi, snapshot_download

from tests.testing.stub_hub import DeliveryPlan, Receiver, StubHub

WEIGHTS = bytes(range(256)) * 40
FILES = {"config.json": '{"type": "act"}', "model.safetensors": WEIGHTS, "notes/a.txt": "a"}
WATCHED: list = [{"type": "model", "name": "someone/arm"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with StubHub() as hub:
        yield hub


@pytest.fixture
def api(hub: StubHub) -> HfApi:
    return HfApi(endpoint=hub.url, token="hf_someone")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def test_the_client_manages_webhooks(api: HfApi, hub: StubHub) -> None:
    made = api.create_webhook(url="https://example.com/a", watched=WATCHED, secret="a secret")
    assert (made.url, made.secret, made.disabled) == ("https://example.com/a", "a secret", False)
    assert made.domains == ["repo", "discussion"]
    assert api.list_webhooks() == [made] == [api.get_webhook(made.id)]
    assert api.disable_webhook(made.id).disabled is True
    assert api.enable_webhook(made.id).disabled is False
    moved = api.update_webhook(made.id, url="https://example.com/b", watched=WATCHED, domains=["repo"])
    assert (moved.url, moved.domains, moved.secret) == ("https://example.com/b", ["repo"], "a secret")
    assert api.update_webhook(made.id, url="https://example.com/b").watched == []  # as the client really sends it
    job = api.create_webhook(job_id="687f911eaea852de79c4a50a", watched=WATCHED, secrets={"KEY": "1"})
    assert job.url is None
    assert job.job is not None
    assert job.job.secrets == {"KEY": "1"}
    api.delete_webhook(made.id)
    assert list(hub.webhooks) == [job.id]
    with pytest.raises(hub_errors.HfHubHTTPError, match="404"):
        api.get_webhook(made.id)


def test_a_secret_may_be_write_only(api: HfApi, hub: StubHub) -> None:
    hub.webhooks.echoes_secrets = False
    made = api.create_webhook(url="https://example.com/a", watched=WATCHED, secret="a secret")
    assert made.secret is None
    assert hub.webhooks[made.id].secret == "a secret"


def test_only_who_has_the_token_manages_webhooks(hub: StubHub, api: HfApi) -> None:
    assert api.whoami()["name"] == "someone"
    hub.token = "hf_another"
    for token in (False, "hf_someone"):
        with pytest.raises(hub_errors.HfHubHTTPError, match="401"):
            api.list_webhooks(token=token)


def test_the_real_command_line_manages_webhooks(hub: StubHub, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_someone",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }

    def hf(*words: str) -> str:
        command = [str(Path(sys.executable).parent / "hf"), "webhooks", *words]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    hf("create", "--url", "https://example.com/a", "--watch", "model:someone/arm", "--secret", "a secret")
    (made,) = hub.webhooks
    assert json.loads(hf("ls", "--format", "json"))[0]["id"] == made
    hf("disable", made)
    assert hub.webhooks[made].disabled is True
    hf("delete", made, "--yes")
    assert not hub.webhooks


def test_a_commit_is_fetched_verified_and_not_asked_for_again(api: HfApi, hub: StubHub, tmp_path: Path) -> None:
    first = hub.push("someone/arm", FILES, tag="v1")
    second = hub.push("someone/arm", {"config.json": "{}", "notes/a.txt": None})
    assert [api.model_info("someone/arm", revision=name).sha for name in ("main", "v1", first)] == [
        second,
        first,
        first,
    ]
    folder = Path(snapshot_download("someone/arm", revision=first, cache_dir=tmp_path, endpoint=hub.url))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    checked = api.verify_repo_checksums("someone/arm", revision=first, cache_dir=tmp_path)
    assert (checked.checked_count, checked.mismatches, checked.missing_paths) == (3, [], [])
    hub.requests.clear()
    snapshot_download("someone/arm", revision=first, cache_dir=tmp_path, endpoint=hub.url)
    assert hub.requests == []
    sizes = {item.rfilename: item.size for item in api.model_info("someone/arm", files_metadata=True).siblings or ()}
    assert sizes == {"config.json": 2, "model.safetensors": len(WEIGHTS)}


def test_refs_commits_and_trees_are_listed(api: HfApi, hub: StubHub) -> None:
    hub.page = 2
    made = [hub.push("someone/arm", {"deep/er/a.txt": str(number)}) for number in range(5)]
    hub.push("someone/arm", {"b": ""}, ref="refs/pr/1")
    hub.push("someone/arm", {"b": ""}, ref="next")
    hub.tag("someone/arm", "step/100", made[1])
    assert [commit.commit_id for commit in api.list_repo_commits("someone/arm")] == made[::-1]
    assert [commit.commit_id for commit in api.list_repo_commits("someone/arm", revision="step/100")] == made[1::-1]
    refs = api.list_repo_refs("someone/arm", include_pull_requests=True)
    assert [ref.name for ref in refs.branches] == ["main", "next"]
    assert [ref.target_commit for ref in refs.tags] == [made[1]]
    assert [ref.ref for ref in refs.pull_requests or ()] == ["refs/pr/1"]
    assert [item.path for item in api.list_repo_tree("someone/arm")] == ["deep"]
    assert [item.path for item in api.list_repo_tree("someone/arm", recursive=True)] == [
        "deep",
        "deep/er",
        "deep/er/a.txt",
    ]
    assert [item.path for item in api.list_repo_tree("someone/arm", "deep/er")] == ["deep/er/a.txt"]


@pytest.mark.parametrize(
    ("repo", "revision", "error"),
    [
        ("someone/else", "main", hub_errors.RepositoryNotFoundError),
        ("someone/arm", "v9", hub_errors.RevisionNotFoundError),
        ("someone/gated", "main", hub_errors.GatedRepoError),
    ],
)
def test_what_cannot_be_read_is_the_client_s_own_error(
    api: HfApi, hub: StubHub, repo: str, revision: str, error: type[Exception]
) -> None:
    hub.push("someone/arm", FILES)
    hub.denied["someone/gated"] = (403, "GatedRepo")
    with pytest.raises(error):
        api.model_info(repo, revision=revision)
    with pytest.raises(hub_errors.RemoteEntryNotFoundError):
        api.hf_hub_download("someone/arm", "missing.json", cache_dir="/nonexistent")


def test_same_size_corruption_is_only_found_by_verifying(api: HfApi, hub: StubHub, tmp_path: Path) -> None:
    sha = hub.push("someone/arm", FILES)
    hub.script(r"GET .*/resolve/.*safetensors", "corrupt")
    folder = Path(snapshot_download("someone/arm", revision=sha, cache_dir=tmp_path, endpoint=hub.url))
    assert len((folder / "model.safetensors").read_bytes()) == len(WEIGHTS)
    checked = api.verify_repo_checksums("someone/arm", revision=sha, cache_dir=tmp_path)
    assert [mismatch["path"] for mismatch in checked.mismatches] == ["model.safetensors"]


def test_a_short_body_is_refused_and_a_cut_one_is_asked_for_again(hub: StubHub, tmp_path: Path) -> None:
    sha = hub.push("someone/arm", {"model.safetensors": WEIGHTS})
    hub.script(r"GET .*safetensors", "short")
    with pytest.raises(OSError, match="Consistency check failed"):
        snapshot_download("someone/arm", revision=sha, cache_dir=tmp_path, endpoint=hub.url)
    hub.script(r"GET .*safetensors", "cut")
    folder = Path(snapshot_download("someone/arm", revision=sha, cache_dir=tmp_path, endpoint=hub.url))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    # The client resumes only what is longer than its chunks of 10 MB, so the range is asked for here.
    part = urllib.request.Request(f"{hub.url}/someone/arm/resolve/{sha}/model.safetensors")
    part.add_header("Range", "bytes=100-199")
    with urllib.request.urlopen(part) as answer:
        assert (answer.status, answer.read()) == (206, WEIGHTS[100:200])


def test_the_client_waits_and_asks_again_when_it_is_limited(hub: StubHub, tmp_path: Path) -> None:
    sha = hub.push("someone/arm", FILES)
    limited = hub.script(r"GET .*/resolve/.*safetensors", 429)
    snapshot_download("someone/arm", revision=sha, cache_dir=tmp_path, endpoint=hub.url)
    assert limited.met == 1


def test_a_hanging_hub_is_only_left_by_a_timeout(hub: StubHub, api: HfApi) -> None:
    hub.push("someone/arm", FILES)
    hub.script("GET .*/revision/main", "hang", times=None)
    with pytest.raises(Exception, match="timed out"):
        api.model_info("someone/arm", revision="main", timeout=0.2)
    hub.script("GET .*/refs", 503, times=1)
    with pytest.raises(hub_errors.HfHubHTTPError, match="503"):
        api.list_repo_refs("someone/arm")


def test_a_push_is_delivered_to_who_watches_it(api: HfApi, hub: StubHub, receiver: Receiver) -> None:
    hook = api.create_webhook(url=receiver.url, watched=WATCHED, secret="a secret")
    api.create_webhook(url=receiver.url, watched=[{"type": "org", "name": "someone"}], domains=["discussion"])
    api.create_webhook(url=receiver.url, watched=[{"type": "dataset", "name": "someone/arm"}])
    off = api.create_webhook(url=receiver.url, watched=WATCHED)
    api.disable_webhook(off.id)
    sha = hub.push("someone/arm", FILES, tag="v1")
    hub.settle()
    (headers, payload), (_, tagged) = receiver.got
    assert headers["x-webhook-secret"] == "a secret"
    assert payload.webhook.id == hook.id
    assert (payload.event.action, payload.event.scope) == ("update", "repo.content")
    assert payload.repo.head_sha == payload.new_sha("main") == sha
    assert tagged.new_sha("refs/tags/v1") == sha
    assert len(set(receiver.ids)) == 2
    hub.emit("someone/arm", "move", "repo", movedTo={"name": "someone/leg", "owner": {"id": "1"}})
    hub.push("someone/arm", {"a": "b"}, deliver=False)
    hub.settle()
    assert receiver.got[2][1].movedTo is not None
    assert len(receiver.got) == 3


def test_deliveries_may_come_twice_and_in_any_order_and_some_never(
    api: HfApi, hub: StubHub, receiver: Receiver
) -> None:
    api.create_webhook(url=receiver.url, watched=WATCHED)
    hub.plan = DeliveryPlan(copies=2, reorder=4, lose=1)
    made = [hub.push("someone/arm", {"step": str(number)}) for number in range(5)]
    hub.settle()
    got = [payload.new_sha("main") for _, payload in receiver.got]
    assert sorted(got, key=lambda sha: made.index(str(sha))) == sorted(made[1:] * 2, key=made.index)
    assert got != sorted(got, key=lambda sha: made.index(str(sha)))
    assert len(set(receiver.ids)) == 4


def test_a_webhook_that_keeps_failing_is_suspended_and_its_deliveries_may_be_replayed(
    api: HfApi, hub: StubHub, receiver: Receiver
) -> None:
    hook = api.create_webhook(url=receiver.url, watched=WATCHED)
    hub.plan = DeliveryPlan(attempts=2, pause=0, suspend_after=2)
    receiver.status = 500
    for number in range(3):
        hub.push("someone/arm", {"step": str(number)})
    hub.settle()
    assert api.get_webhook(hook.id).disabled == "suspended-after-failure"
    assert [delivery.statuses for delivery in hub.log] == [[500, 500], [500, 500], []]
    assert receiver.ids == [hub.log[0].id] * 2 + [hub.log[1].id] * 2
    api.enable_webhook(hook.id)
    receiver.status = 200
    request = urllib.request.Request(
        f"{hub.url}/api/settings/webhooks/{hook.id}/replay/{hub.log[2].id}",
        headers={"Authorization": "Bearer hf_someone"},
        method="POST",
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer) == {"status": 200}
    assert receiver.ids[-1] == hub.log[2].id


def test_it_runs_from_a_shell_and_takes_pushes_from_other_processes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.testing.stub_hub"], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        told = {"repo": "someone/arm", "files": {"config.json": "{}", "a.bin": {"base64": "AAEC"}}}
        request = urllib.request.Request(f"{url}/_stub/push", json.dumps(told).encode(), method="POST")
        with urllib.request.urlopen(request) as answer:
            sha = json.load(answer)["sha"]
        assert HfApi(endpoint=url).model_info("someone/arm").sha == sha
        running.terminate()
        assert running.wait(60) == 0
