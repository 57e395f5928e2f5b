"""A policy in an engine elsewhere stands where one of this process stands."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmodels.errors import CheckpointError, HubError, ObservationError
from service.cluster.messages import Loaded, Refusal
from service.cluster.parcels import Parcel
from service.cluster.remote_policy import RemoteLoader, RemotePolicy, answered
from service.engine.device_lane import DeviceGone
from service.engine.scripted_policy import SO100_REQUIREMENTS
from service.errors import PolicyFailed

SIZES = {"front": (48, 64)}


class Engines:
    """Of this process; each has what it was sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.likes: list[str | None] = []
        self.parcels: list[Parcel] = []
        self.kept: list[RemotePolicy] = []
        self.answers: dict[str, Any] = {}
        self.pieces: list[bytes] = []

    def pick(self) -> str:
        return "one"

    def call(self, engine: str, method: str, *arguments: Any) -> Any:
        self.calls.append((engine, method))
        if method in self.answers:
            if isinstance(self.answers[method], Exception):
                raise self.answers[method]
            return self.answers[method]
        if method == "load":
            parcel, like = arguments
            self.parcels.append(parcel)
            self.likes.append(like)
            return Loaded(parcel.sha, SO100_REQUIREMENTS, "cpu:0", [SIZES])
        return {"try_out": (np.zeros((1, 20, 6), np.float32), 0.25), "rehearse": 0.125}.get(method)

    def keep(self, policy: RemotePolicy) -> None:
        self.kept.append(policy)

    def put(self, piece: bytes) -> Any:
        self.pieces.append(piece)
        return len(self.pieces) - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"type": "act"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def policy(engines: Engines, folder: Path) -> RemotePolicy:
    return RemoteLoader(engines)(str(folder))


def test_its_files_go_where_it_is_loaded(engines: Engines, folder: Path) -> None:
    told: list[str] = []
    policy = RemoteLoader(engines)(str(folder), on_progress=told.append)
    assert (policy.device, policy.requirements, policy.handle) == ("one", SO100_REQUIREMENTS, engines.parcels[0].sha)
    assert sorted(engines.pieces) == [b"weights", b'{"type": "act"}']
    assert engines.kept == [policy]
    assert told[-2:] == ["reading", "compiling"]


def test_another_one_may_be_like_one_that_is_there(engines: Engines, policy: RemotePolicy, folder: Path) -> None:
    RemoteLoader(engines)(str(folder), like=policy)
    RemoteLoader(engines)(str(folder), like=object())
    assert engines.likes == [None, policy.handle, None]


def test_a_folder_that_is_none_is_refused_before_anything_is_sent(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):
        RemoteLoader(engines)(str(tmp_path / "none"))
    with pytest.raises(CheckpointError):
        RemoteLoader(engines)(str(tmp_path))
    assert engines.calls == engines.pieces == []


def test_a_copy_is_of_the_same_files(engines: Engines, policy: RemotePolicy) -> None:
    other = policy.on("two")
    assert (other.device, other.handle) == ("two", policy.handle)
    assert engines.parcels[0] is engines.parcels[1]
    assert engines.calls == [("one", "load"), ("two", "load")]
    assert engines.kept == [policy, other]


def test_it_acts_and_says_what_that_took(engines: Engines, policy: RemotePolicy) -> None:
    assert policy.act({}).shape == (1, 20, 6)
    assert policy.timings == {"to_device": 0.0, "compute": 0.25, "to_host": 0.0}
    assert policy.rehearse() == 0.125
    policy.prepare_task("lift it")
    assert engines.calls[-1] == ("one", "prepare_task")


def test_it_is_compiled_once_for_frames_of_a_size_and_asks_nobody_whether_it_is(
    engines: Engines, policy: RemotePolicy
) -> None:
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


def test_one_that_could_not_be_compiled_is_not(engines: Engines, policy: RemotePolicy) -> None:
    engines.answers["compile"] = Refusal("policy", "too large")
    with pytest.raises(CheckpointError, match="too large"):
        policy.compile(1, {"front": (8, 8)})
    assert not policy.is_compiled(1, {"front": (8, 8)})


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("input", ObservationError),
        ("policy", CheckpointError),
        ("unknown", DeviceGone),
        ("engine", DeviceGone),
        ("failed", PolicyFailed),
        ("stuck", PolicyFailed),
    ],
)
def test_each_refusal_is_the_error_that_it_is(kind: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="why"):
        answered(Refusal(kind, "why"))
    assert answered(3) == 3
    assert answered(None) is None


def test_an_engine_that_is_gone_is_gone(engines: Engines, policy: RemotePolicy) -> None:
    engines.answers["rehearse"] = DeviceGone("it ended")
    with pytest.raises(DeviceGone):
        policy.rehearse()
