"""Datasets of the Hub, served by the stub Hub on this machine."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from jaxmodels import hub
from jaxmodels.data import open_dataset
from jaxmodels.errors import HubError
from tests.testing.stub_hub import StubHub
from tests.unit.jaxmodels.data.demonstrations import ACTION, FRONT


@pytest.fixture
def stub(written, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # Telemetry calls the real Hub.
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = written["v2.1"]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with StubHub() as stub:
        # The client of the Hub reads the environment at its import.
        monkeypatch.setattr(hub, "fetch", partial(hub.fetch, endpoint=stub.url))
        stub.push("someone/cubes", {**files, "loader.py": b"print('run')"}, type="dataset")
        yield stub


def downloads(stub: StubHub) -> set[str]:
    return {request.path.rsplit("/", 1)[-1] for request in stub.requests if "/resolve/" in request.path}


def test_dataset_of_the_hub_is_read(stub):
    stages: list[str] = []
    dataset = open_dataset("someone/cubes", on_progress=stages.append)
    np.testing.assert_array_equal(dataset.vectors("action"), ACTION)
    assert dataset.frames(FRONT, np.array([0, 19])).shape == (2, 32, 48, 3)
    assert set(stages) == {"downloading"}
    assert "loader.py" not in downloads(stub)


def test_only_files_of_selected_episodes_are_fetched(stub):
    dataset = open_dataset("someone/cubes", episodes=[1])
    np.testing.assert_array_equal(dataset.vectors("action"), ACTION[6:15])
    files = {name for name in downloads(stub) if name.startswith("episode_")}
    assert files == {"episode_000001.parquet", "episode_000001.mp4"}


def test_path_that_is_neither_folder_nor_repo_is_refused(stub):
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):
        open_dataset("no/such/folder")
    with pytest.raises(HubError, match="no such repo"):
        open_dataset("someone/else")
