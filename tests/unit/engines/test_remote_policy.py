"""Policy in a remote engine, used like a policy of this process."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jaxmodels.errors import CheckpointError, HubError, ObservationError
from service.engines import remote_loader
from service.engines.messages import Loaded, LocalFolder, Refusal
from service.engines.remote_loader import RemoteLoader
from service.engines.remote_policy import RemotePolicy, check_answer
from service.errors import PolicyFailed
from service.inference.device_worker import DeviceGone
from service.inference.loaded_policy import InferenceStuck
from tests.testing.doubles import SO100_REQUIREMENTS

SIZES = {"front": (48, 64)}


class Engines:
    """Double of the engine set, which records the artifacts that each engine receives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.likes: list[str | None] = []
        self.artifacts: list[LocalFolder] = []
        self.copies: list[str] = []
        self.not_ready: list[tuple[str, str, str]] = []
        self.answers: dict[str, Any] = {}
        self.idle: Sequence[str] = ()
        self.stages: dict[str, str] = {}

    def pick(self) -> tuple[str, Sequence[str]]:
        return "one", self.idle

    def ask(self, engine: str, method: str, *arguments: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        try:
            answer.set_result(self._answer(engine, method, arguments))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def ask_briefly(self, engine: str, method: str, *arguments: Any) -> Any:
        return self.ask(engine, method, *arguments).result()

    def _answer(self, engine: str, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((engine, method))
        method = f"{engine} {method}" if f"{engine} {method}" in self.answers else method
        if method in self.answers:
            if isinstance(self.answers[method], Exception):
                raise self.answers[method]
            return self.answers[method]
        if method == "load":
            artifact, like = arguments
            self.artifacts.append(artifact)
            self.likes.append(like)
            return Loaded(artifact.sha, SO100_REQUIREMENTS, {frozenset(SIZES.items()): 0.125})
        return {"try_out": (np.zeros((1, 20, 6), np.float32), 0.25), "compile": 0.5}.get(method)

    def read_stages(self, engines: Collection[str], sha: str) -> list[str]:
        return [self.stages[engine] for engine in engines if engine in self.stages]

    def load(self, engine: str, files: LocalFolder, like: str | None) -> "Future[Loaded]":
        loading: Future[Loaded] = Future()
        try:
            loading.set_result(check_answer(self.ask(engine, "load", files, like).result()))
            self.copies.append(engine)
        except Exception as error:
            loading.set_exception(error)
        return loading

    def record_failure(self, engine: str, handle: str, why: str) -> None:
        self.not_ready.append((engine, handle, why))


def make_loader(engines: Engines) -> RemoteLoader:
    """Return a loader whose engines get the folder itself."""

    return RemoteLoader(cast(Any, engines), LocalFolder.of)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a policy that no engine loads."""
    (tmp_path / "config.json").write_text('{"type": "act"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def policy(engines: Engines, folder: Path) -> RemotePolicy:
    return make_loader(engines)(str(folder))


def test_a_load_sends_the_files_and_the_handle_of_a_like_policy(engines: Engines, folder: Path) -> None:
    policy = make_loader(engines)(str(folder))
    assert (policy.device, policy.requirements, policy.handle) == ("one", SO100_REQUIREMENTS, engines.artifacts[0].sha)
    assert engines.artifacts[0].path == str(folder)
    assert set(engines.artifacts[0].identities) == {"config.json", "model.safetensors"}
    assert engines.copies == ["one"]
    make_loader(engines)(str(folder), like=policy)
    make_loader(engines)(str(folder), like=object())
    assert engines.likes == [None, policy.handle, None]


def test_a_missing_folder_is_refused_before_engines_load_it(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):
        make_loader(engines)(str(tmp_path / "none"))
    assert engines.calls == []


def test_a_copy_uses_the_same_files(engines: Engines, policy: RemotePolicy) -> None:
    other = policy.on("two")
    assert (other.device, other.handle) == ("two", policy.handle)
    assert engines.artifacts[0] is engines.artifacts[1]
    assert engines.calls == [("one", "load"), ("two", "load")]
    assert engines.copies == ["one", "two"]


def test_idle_engines_load_at_once_and_update_in_turn(engines: Engines, folder: Path) -> None:
    engines.idle = ("two", "three")
    policy = make_loader(engines)(str(folder))
    assert engines.calls == [("one", "load"), ("two", "load"), ("three", "load")]
    assert [policy.on(engine).device for engine in ("two", "three")] == ["two", "three"]
    assert len(engines.calls) == 3, "a copy uses the load that has begun"
    update = make_loader(engines)(str(folder), like=policy)
    assert engines.calls[3:] == [("one", "load")]
    update.on("two")
    assert engines.calls[4:] == [("two", "load")]
    assert engines.not_ready == []


@pytest.mark.parametrize(
    "why", [Refusal("policy", "out of memory"), Refusal("engine", "its disk is full"), DeviceGone("it ended")]
)
def test_another_engine_loads_the_policy_if_one_fails(engines: Engines, folder: Path, why: Any) -> None:
    engines.idle, engines.answers["one load"] = ("two",), why
    policy = make_loader(engines)(str(folder))
    assert policy.device == "two"
    text = why.text if isinstance(why, Refusal) else str(why)
    with pytest.raises(DeviceGone, match=f"one: {text}"):
        policy.on("one")
    assert engines.not_ready == [("one", policy.handle, text)]
    assert engines.calls == [("one", "load"), ("two", "load")], "the failed load is not repeated"
    del engines.answers["one load"]
    assert policy.on("one").device == "one"


def test_an_unexpected_error_shows_only_its_type(engines: Engines, policy: RemotePolicy) -> None:
    engines.answers["two load"] = ValueError("a secret")
    with pytest.raises(DeviceGone, match=r"two: \(ValueError\)"):
        policy.on("two")
    assert "secret" not in str(engines.not_ready)


def test_an_update_that_one_engine_cannot_load_is_refused(engines: Engines, policy: RemotePolicy, folder: Path) -> None:
    update = make_loader(engines)(str(folder), like=policy)
    engines.answers["two load"] = Refusal("policy", "out of memory")
    with pytest.raises(CheckpointError, match=r"^two: out of memory$"):
        update.on("two")
    engines.answers["two load"] = DeviceGone("it ended")
    with pytest.raises(DeviceGone, match=r"^two: it ended$"):
        update.on("two")


def test_an_error_of_the_policy_has_priority_if_no_engine_loads_it(engines: Engines, folder: Path) -> None:
    engines.idle = ("two", "three")
    engines.answers |= {"one load": DeviceGone("it ended"), "load": Refusal("policy", "config.json: no such type")}
    with pytest.raises(CheckpointError, match=r"^config.json: no such type$"):
        make_loader(engines)(str(folder))
    engines.answers["load"] = DeviceGone("so did it")
    with pytest.raises(CheckpointError, match=r"no engine could load it \(one: it ended; two: so did it; three: "):
        make_loader(engines)(str(folder))
    assert engines.not_ready == []


def test_progress_is_reported_for_the_slowest_engine(
    engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_loader, "POLL_PERIOD", 0.001)
    engines.idle, words = ("two",), []
    slow = {name: Future[Any]() for name in ("one", "two")}
    stages = iter(
        [
            {"one": "reading", "two": "reading"},
            {"one": "compiling", "two": "reading"},
            {"one": "compiling", "two": "compiling"},
            {"two": "compiling"},
        ]
    )

    def load_slowly(engine: str, files: LocalFolder, like: str | None) -> "Future[Any]":
        engines.artifacts.append(files)
        engines.stages = next(stages) if engine == "one" else engines.stages
        return slow[engine]

    def report(word: str) -> None:
        words.append(word)
        if len(words) > 1:
            engines.stages = next(stages, {})
        if len(words) == 5:  # One report is from reading the folder here, and four are from the engines.
            for loading in slow.values():
                loading.set_result(
                    Loaded(engines.artifacts[0].sha, SO100_REQUIREMENTS, {frozenset(SIZES.items()): 0.125})
                )

    monkeypatch.setattr(engines, "load", load_slowly)
    make_loader(engines)(str(folder), on_progress=report)
    assert words == ["reading", "reading", "reading", "compiling", "compiling"]


def test_a_remote_policy_acts_and_reports_its_timings(engines: Engines, policy: RemotePolicy) -> None:
    assert policy.act({}).shape == (1, 20, 6)
    assert policy.timings == {"to_device": 0.0, "compute": 0.25, "to_host": 0.0}
    assert policy.profile() == 0.125
    policy.prepare_task("lift it")
    assert engines.calls[-1] == ("one", "prepare_task")


def test_a_policy_is_compiled_once_per_frame_size(engines: Engines, policy: RemotePolicy) -> None:
    before = len(engines.calls)
    assert policy.is_compiled()
    assert policy.is_compiled(1, {"front": (48, 64)})
    assert not policy.is_compiled(1, {"front": (8, 8)})
    policy.compile(1, None)
    assert len(engines.calls) == before
    for _ in range(2):
        policy.compile(1, {"front": (8, 8)})
    assert len(engines.calls) == before + 1
    assert policy.is_compiled(1, {"front": (8, 8)})
    assert policy.profile(1, {"front": (8, 8)}) == 0.5
    assert not policy.is_compiled(1, {"front": (8, 8)}, with_plan=True)
    policy.compile(1, {"front": (8, 8)}, with_plan=True)
    assert policy.is_compiled(1, {"front": (8, 8)}, with_plan=True)
    engines.answers["compile"] = Refusal("policy", "too large")
    with pytest.raises(CheckpointError, match="too large"):
        policy.compile(1, {"front": (9, 9)})
    assert not policy.is_compiled(1, {"front": (9, 9)})


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("input", ObservationError),
        ("policy", CheckpointError),
        ("unknown", DeviceGone),
        ("engine", DeviceGone),
        ("failed", PolicyFailed),
        ("stuck", InferenceStuck),
    ],
)
def test_each_refusal_raises_its_error(kind: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="why"):
        check_answer(Refusal(kind, "why"))
    assert (check_answer(3), check_answer(None)) == (3, None)
