"""Fetching from the Hub, tested with the stub Hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxmodels
from jaxmodels import hub
from jaxmodels.errors import CheckpointError, HubError
from jaxmodels.policies import lerobot_folder
from jaxmodels.transformer2d import Transformer2DConfig, diffusers_folder
from jaxmodels.transformer2d.diffusers_folder import tensor_names
from tests.testing.stub_hub import StubHub


@pytest.fixture(scope="module")
def policies(small, checkpoint_of, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """Return the files of two policies."""
    folders = [tmp_path_factory.mktemp("source") / "policy" for _ in range(2)]
    for seed, folder in enumerate(folders):
        lerobot_folder.write_checkpoint(folder, checkpoint_of(small(), seed=seed, rate=25.0))
    return [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]


@pytest.fixture
def stub(policies, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # Telemetry calls the real Hub.
    monkeypatch.delenv("HF_TOKEN", raising=False)
    others = {"pytorch_model.bin": b"cos\nsystem\n", "README.md": b"# hello", "train_config.json": b"{}"}
    others |= {"owner/vlm/tokenizer.json": b"{}", ".git/config.json": b"{}", "a/b/c/d/config.json": b"{}"}
    with StubHub() as stub:
        first = stub.push("someone/arm", {**policies[0], **others}, tag="v1")
        stub.push("someone/arm", {**policies[1], **dict.fromkeys(others)})
        stub.repo("someone/arm").refs["refs/heads/main"] = first
        yield stub


@pytest.fixture
def commits(stub: StubHub) -> list[str]:
    """Return both commits of the repo; its branch and a tag are at the first."""
    return list(stub.repo("someone/arm").commits)


def requests_of(stub: StubHub) -> list[str]:
    return [request.path for request in stub.requests]


@pytest.fixture
def fetch(stub: StubHub, tmp_path: Path):
    def call(repo: str = "someone/arm", revision: str | None = None, **options) -> Path:
        return hub.fetch(repo, revision, endpoint=stub.url, cache=tmp_path / "cache", **options)

    return call


def test_repo_is_fetched_at_one_commit(fetch, stub: StubHub, commits, observation_of, small) -> None:
    progresses: list[str] = []
    folder = fetch(on_progress=progresses.append)
    assert set(progresses) == {"downloading"}
    assert all(isinstance(progress, hub.Downloading) for progress in progresses)
    # The total is 0 until the Hub has announced the size.
    first, *_, last = [progress for progress in progresses if progress.total]
    assert first.done == 0 < last.done == last.total == first.total
    assert folder.name == commits[0]
    downloads = [path for path in requests_of(stub) if "/resolve/" in path]
    assert downloads
    assert all(f"/resolve/{commits[0]}/" in path for path in downloads)
    policy = jaxmodels.load_policy(folder)
    assert policy.requirements.rate == 25.0
    assert np.isfinite(policy.act(observation_of(small()))).all()


def test_only_files_of_a_policy_are_fetched(fetch, stub: StubHub, commits, caplog) -> None:
    caplog.set_level("INFO")
    first, second = ({path.name for path in fetch(revision=commit).iterdir()} for commit in commits)
    assert first == {*second, "owner"}
    assert (fetch() / "owner" / "vlm" / "tokenizer.json").is_file()
    assert "robojax.json" in second
    assert "pytorch_model.bin may run code" in caplog.text
    assert not [path for path in requests_of(stub) if "pytorch_model" in path or "README" in path or "train_" in path]


def test_revision_may_be_a_tag_or_a_commit(fetch, stub: StubHub, commits) -> None:
    first, second = commits
    with pytest.raises(HubError, match="'someone/arm' at 'v9': the repo has no such revision"):
        fetch(revision="v9")
    assert fetch(revision="v1").name == first
    assert fetch(revision=second).name == second
    stub.repo("someone/arm").refs["refs/heads/main"] = second
    assert fetch().name == second


def test_cached_files_are_not_fetched_again(fetch, stub: StubHub) -> None:
    first = fetch()
    stub.requests.clear()
    assert fetch() == first
    assert not [path for path in requests_of(stub) if "/resolve/" in path]


def test_cache_of_the_environment_is_used(stub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert hub.fetch("someone/arm", endpoint=stub.url).is_relative_to(tmp_path / "elsewhere")


def test_offline_fetch_uses_the_cache_or_explains_it(fetch, stub: StubHub, commits) -> None:
    first = fetch()
    stub.close()
    assert fetch() == first
    assert fetch(revision=commits[0]) == first
    with pytest.raises(HubError, match=r"'someone/arm'.*cannot be reached.*connect once, or give a local folder"):
        fetch(revision=commits[1])


def test_incomplete_copy_is_not_used(fetch, stub: StubHub) -> None:
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
def test_refusals_of_the_hub_are_explained(fetch, stub: StubHub, denied, words: str) -> None:
    stub.denied["someone/arm"] = denied
    with pytest.raises(HubError, match=words):
        fetch()


@pytest.mark.parametrize("answer", [(404, "RepoNotFound"), (401, ""), (500, "")])
def test_missing_folder_is_named_before_the_hub(stub: StubHub, monkeypatch, tmp_path, answer) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", stub.url)
    stub.denied["someone/arm"] = answer
    for load in (jaxmodels.load_policy, jaxmodels.read_requirements):
        with pytest.raises(HubError) as caught:
            load("someone/arm")
        text = str(caught.value)
        assert text.startswith("no folder 'someone/arm' here; it also reads as a Hub repo id, and the Hub ")
        assert "a relative path starts in the working directory" in text
    # A path of three parts can only be a folder.
    with pytest.raises(HubError, match=r"'runs/two/policy' is neither a folder here nor .* working directory"):
        jaxmodels.load_policy("runs/two/policy")


@pytest.mark.parametrize("repo", ["../secrets", "/etc/passwd", "a/b/c", "", "a b", ".hidden/x", "a/.."])
def test_invalid_repo_id_never_reaches_the_network(fetch, stub: StubHub, repo: str) -> None:
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):
        fetch(repo)
    assert stub.requests == []


CONFIG = Transformer2DConfig(2, 8, 32, num_layers=2, cross_attention_dim=12)


@pytest.fixture
def model(stub: StubHub, tmp_path: Path) -> dict[str, np.ndarray]:
    """Return the weights of a model that the stub has in a pipeline, in shards and as a half-precision variant."""
    rng = np.random.default_rng(0)
    weights = {place.ours: rng.standard_normal(place.whole, np.float32) for place in tensor_names(CONFIG)}
    halves = {name: array.astype(np.float16) for name, array in weights.items()}
    folder = tmp_path / "source" / "transformer"
    diffusers_folder.write(folder, CONFIG, weights, max_shard_bytes=20_000)
    diffusers_folder.write(folder, CONFIG, halves, variant="fp16")
    others = {"model_index.json": b"{}", "vae/config.json": b"{}", "transformer/diffusion_pytorch_model.bin": b"cos"}
    written = {f"transformer/{path.name}": path.read_bytes() for path in folder.iterdir()}
    stub.push("someone/painter", {**written, **others})
    return weights


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_only_the_model_of_a_pipeline_is_fetched(fetch, stub: StubHub, model, variant: str | None) -> None:
    folder = fetch("someone/painter", files=diffusers_folder.files(subfolder="transformer", variant=variant))
    assert folder.name == stub.head("someone/painter")
    with pytest.raises(CheckpointError, match="a pipeline, not a model; give the subfolder"):
        diffusers_folder.read(folder)
    config, weights = diffusers_folder.read(folder, subfolder="transformer", variant=variant, dtype=np.float32)
    assert config == CONFIG
    wanted = {name: array.astype(np.float16) for name, array in model.items()} if variant else model
    assert all(np.array_equal(weights[name], array) for name, array in wanted.items())
    fetched = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert not any(name.startswith("vae") or name.endswith(".bin") for name in fetched)
    assert any("fp16" in name for name in fetched) == (variant == "fp16")
    assert any("-of-" in name for name in fetched) == (variant is None)


@pytest.mark.parametrize("subfolder", ["..", "a/../b", "/a", "*", "a//b", "[a]"])
def test_subfolder_with_patterns_or_parents_is_refused(subfolder: str) -> None:
    with pytest.raises(CheckpointError, match="is no folder of a repo"):
        diffusers_folder.files(subfolder=subfolder)


def test_repo_is_fetched_only_within_the_size_limit(fetch, stub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"its files have \d+ bytes; allowed are 1000"):
        fetch(largest=1000)
    assert not list(tmp_path.rglob("model.safetensors"))
    assert (fetch(largest=1 << 30) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("files", "missing", "words"),
    [
        (("adapter_config.json",), "config.json", "is an adapter .*merge_and_unload"),
        (("model_index.json",), "config.json", "is a pipeline of diffusers"),
        (("meta/info.json",), "config.json", "is a LeRobotDataset"),
        (("pytorch_model.bin",), "config.json", "has only pickle files"),
        (("notes.txt",), "config.json", "wanted the repo of a policy"),
        (("adapter_config.json", "config.json"), "model.safetensors", "is an adapter .*merge_and_unload"),
        (("pytorch_model.bin", "config.json", "runs/log.txt"), "model.safetensors", "only pickle"),
    ],
)
def test_repos_without_a_policy_are_described(fetch, stub: StubHub, files, missing: str, words: str) -> None:
    stub.push("someone/other", dict.fromkeys(files, b"{}"))
    with pytest.raises(HubError, match=f"'someone/other': the repo has no {missing}; .*{words}"):
        fetch("someone/other")


def test_folder_of_the_policy_in_a_training_repo_is_named(fetch, stub: StubHub) -> None:
    for step in ("000100", "000200"):
        where = f"checkpoints/{step}/pretrained_model"
        stub.push("someone/run", {f"{where}/config.json": b"{}", f"{where}/model.safetensors": b"x"})
    with pytest.raises(HubError, match=r"policy is in its folder checkpoints/000200/pretrained_model: .*hf download"):
        fetch("someone/run")
