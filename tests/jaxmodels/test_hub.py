"""Fetching from the Hub, against a small server on this machine that answers like it."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxmodels
from jaxmodels import hub
from jaxmodels.checkpoints import diffusers, lerobot
from jaxmodels.checkpoints.diffusers_names import places
from jaxmodels.errors import CheckpointError, HubError
from jaxmodels.transformer2d import Transformer2DConfig

FIRST, SECOND = "1" * 40, "2" * 40


class StubHub:
    """Repos of files at commits; `requests` is every path that was asked for."""

    def __init__(self, repos: dict[str, dict[str, dict[str, bytes]]]):
        self.repos = repos  # repo id -> commit -> file name -> content
        self.refs = {"main": FIRST, "v1": FIRST}
        self.denied: dict[str, tuple[int, str]] = {}  # repo id -> status and error code
        self.requests: list[str] = []
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub.requests.append(self.path)
                self.close_connection = True  # or a closed server would go on answering through kept connections
                status, headers, body = stub.answer(self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        kind, revision, *rest = [*(parts[4:] if is_api else parts[2:]), "revision", "main"]
        if repo in self.denied:
            status, code = self.denied[repo]
            return status, {"X-Error-Code": code}, b"{}"
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.refs.get(revision, revision)
        if commit not in self.repos[repo]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.repos[repo][commit]
        if kind == "revision":
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": []}).encode()
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for name, raw in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        raw = files["/".join(rest[:-2])]
        return 200, {"ETag": f'"{hashlib.sha1(raw).hexdigest()}"', "X-Repo-Commit": commit}, raw


@pytest.fixture(scope="module")
def policies(small_of, checkpoint_for, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of two policies."""
    folders = [tmp_path_factory.mktemp("source") / "policy" for _ in range(2)]
    for seed, folder in enumerate(folders):
        lerobot.write(folder, checkpoint_for(small_of(), seed=seed, rate=25.0))
    return [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]


@pytest.fixture
def stub(policies, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # it asks the real Hub
    monkeypatch.delenv("HF_TOKEN", raising=False)
    others = {"pytorch_model.bin": b"cos\nsystem\n", "README.md": b"# hello", "train_config.json": b"{}"}
    stub = StubHub({"someone/arm": {FIRST: {**policies[0], **others}, SECOND: policies[1]}})
    yield stub
    stub.close()


@pytest.fixture
def fetch(stub: StubHub, tmp_path: Path):
    def call(repo: str = "someone/arm", revision: str | None = None, **options) -> Path:
        return hub.fetch(repo, revision, endpoint=stub.url, cache=tmp_path / "cache", **options)

    return call


def test_a_repo_is_fetched_at_the_commit_its_branch_points_to(fetch, stub: StubHub, observation_of, small) -> None:
    told: list[str] = []
    folder = fetch(on_progress=told.append)
    assert told == ["downloading"]
    assert folder.name == FIRST
    downloads = [path for path in stub.requests if "/resolve/" in path]
    assert downloads
    assert all(f"/resolve/{FIRST}/" in path for path in downloads)
    policy = jaxmodels.load_policy(folder)
    assert policy.requirements.rate == 25.0
    assert np.isfinite(policy.act(observation_of(small()))).all()


def test_only_files_of_a_policy_are_fetched(fetch, stub: StubHub) -> None:
    names = {path.name for path in fetch().iterdir()}
    assert names == {path.name for path in fetch(revision=SECOND).iterdir()}
    assert "robojax.json" in names
    assert not [path for path in stub.requests if "pytorch_model" in path or "README" in path or "train_" in path]


def test_a_revision_may_be_a_tag_or_a_commit(fetch, stub: StubHub) -> None:
    assert fetch(revision="v1").name == FIRST
    assert fetch(revision=SECOND).name == SECOND
    stub.refs["main"] = SECOND
    assert fetch().name == SECOND


def test_what_is_cached_is_not_fetched_again(fetch, stub: StubHub) -> None:
    first = fetch()
    stub.requests.clear()
    assert fetch() == first
    assert not [path for path in stub.requests if "/resolve/" in path]


def test_without_the_hub_the_cached_copy_is_used(fetch, stub: StubHub) -> None:
    first, second = fetch(), fetch(revision=SECOND)
    stub.close()
    assert fetch() == first
    assert fetch(revision=SECOND) == second


def test_without_the_hub_and_without_a_copy_the_error_says_what_to_do(fetch, stub: StubHub) -> None:
    stub.close()
    with pytest.raises(HubError, match=r"'someone/arm'.*cannot be reached.*connect once, or give a local folder"):
        fetch()
    with pytest.raises(HubError, match="cannot be reached"):
        fetch(revision=SECOND)


def test_half_a_copy_is_no_copy(fetch, stub: StubHub) -> None:
    link = fetch() / "model.safetensors"
    link.resolve().unlink()
    link.unlink(missing_ok=True)
    stub.close()
    with pytest.raises(HubError, match="no complete copy is cached"):
        fetch()


@pytest.mark.parametrize(
    ("denied", "words"),
    [
        ((403, "GatedRepo"), "is gated; accept its terms"),
        ((404, "RepoNotFound"), "no such repo, or it is private"),
        ((401, ""), "the Hub does not allow it; set HF_TOKEN"),
        ((500, ""), "did not answer as expected"),
    ],
)
def test_what_the_hub_refuses_is_said_in_plain_words(fetch, stub: StubHub, denied, words: str) -> None:
    stub.denied["someone/arm"] = denied
    with pytest.raises(HubError, match=words):
        fetch()


def test_an_unknown_revision_is_named(fetch) -> None:
    with pytest.raises(HubError, match="'someone/arm' at 'v9': the repo has no such revision"):
        fetch(revision="v9")


@pytest.mark.parametrize("repo", ["../secrets", "/etc/passwd", "a/b/c", "", "a b", ".hidden/x", "a/.."])
def test_what_is_no_repo_id_never_reaches_the_network(fetch, stub: StubHub, repo: str) -> None:
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):
        fetch(repo)
    assert stub.requests == []


CONFIG = Transformer2DConfig(2, 8, 32, num_layers=2, cross_attention_dim=12)


@pytest.fixture
def model(stub: StubHub, tmp_path: Path) -> dict[str, np.ndarray]:
    """The weights of a model that the stub has in a pipeline, in shards, and beside them as half-precision variant."""
    rng = np.random.default_rng(0)
    weights = {place.ours: rng.standard_normal(place.whole, np.float32) for place in places(CONFIG)}
    halves = {name: array.astype(np.float16) for name, array in weights.items()}
    folder = tmp_path / "source" / "transformer"
    diffusers.write(folder, CONFIG, weights, max_shard_bytes=20_000)
    diffusers.write(folder, CONFIG, halves, variant="fp16")
    others = {"model_index.json": b"{}", "vae/config.json": b"{}", "transformer/diffusion_pytorch_model.bin": b"cos"}
    written = {f"transformer/{path.name}": path.read_bytes() for path in folder.iterdir()}
    stub.repos["someone/painter"] = {FIRST: {**written, **others}}
    return weights


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_model_of_a_pipeline_is_fetched_alone(fetch, stub: StubHub, model, variant: str | None) -> None:
    folder = fetch("someone/painter", files=diffusers.files(subfolder="transformer", variant=variant))
    assert folder.name == FIRST
    config, weights = diffusers.read(folder, subfolder="transformer", variant=variant, dtype=np.float32)
    assert config == CONFIG
    wanted = {name: array.astype(np.float16) for name, array in model.items()} if variant else model
    assert all(np.array_equal(weights[name], array) for name, array in wanted.items())
    fetched = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert not any(name.startswith("vae") or name.endswith(".bin") for name in fetched)
    assert any("fp16" in name for name in fetched) == (variant == "fp16")
    assert any("-of-" in name for name in fetched) == (variant is None)


def test_a_model_is_read_from_the_cache_without_the_hub(fetch, stub: StubHub, model) -> None:
    files = diffusers.files(subfolder="transformer", variant="fp16")
    first = fetch("someone/painter", files=files)
    stub.close()
    assert fetch("someone/painter", files=files) == first
    assert diffusers.read(first, subfolder="transformer", variant="fp16")[0] == CONFIG


def test_a_pipeline_fetched_without_its_subfolder_says_what_it_is(fetch, stub: StubHub, model) -> None:
    with pytest.raises(CheckpointError, match="a pipeline, not a model; give the subfolder"):
        diffusers.read(fetch("someone/painter", files=diffusers.files()))


@pytest.mark.parametrize("subfolder", ["..", "a/../b", "/a", "*", "a//b", "[a]"])
def test_a_subfolder_is_no_pattern_and_no_way_out(subfolder: str) -> None:
    with pytest.raises(CheckpointError, match="is no folder of a repo"):
        diffusers.files(subfolder=subfolder)
