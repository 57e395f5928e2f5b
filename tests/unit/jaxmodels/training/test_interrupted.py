"""Folders of killed runs and runs on full disks keep complete files, and the rest is removed."""

import errno
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxmodels.errors import TrainingError
from jaxmodels.training.run_folder import (
    LAST,
    POLICY,
    STATE,
    Snapshots,
    claim_folder,
    cut_metrics,
    explain_write_errors,
)

LINES = '{"step": 4, "seconds": 2.5}\n{"step": 8, "seconds": 3.5}\n'


@pytest.fixture
def state() -> dict[str, jax.Array]:
    return {"weights": jnp.arange(6, dtype=jnp.float32)}


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow creating files, but fail each write."""

    def write(path: Path, *_: object) -> None:
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)


def test_only_half_written_files_of_a_killed_run_are_removed(tmp_path: Path, state: dict[str, jax.Array]) -> None:
    with Snapshots(tmp_path, keep=3) as snapshots:
        snapshots.save(8, state)
    for draft in (
        f"000008/.{POLICY}-x1/config.json",
        f"000016/{STATE}.orbax-checkpoint-tmp/d/0",
        f"000016/{POLICY}/model.safetensors",
        f".removed-000004/{STATE}/d/0",
    ):
        path = tmp_path / draft
        path.parent.mkdir(parents=True)
        path.touch()
    with Snapshots(tmp_path, keep=3) as snapshots:
        assert snapshots.newest == 8
        assert entries(tmp_path) == ["000008", LAST]
        assert entries(tmp_path / "000008") == [STATE]
        assert snapshots.restore(8, state)["weights"].tolist() == [0, 1, 2, 3, 4, 5]


def test_resumed_run_repairs_the_link_to_the_last_checkpoint(tmp_path: Path, state: dict[str, jax.Array]) -> None:
    with Snapshots(tmp_path, keep=3) as snapshots:
        snapshots.save(8, state)
        snapshots.save(16, state)
    (tmp_path / LAST).unlink()
    (tmp_path / LAST).symlink_to("000008")
    with Snapshots(tmp_path, keep=3) as snapshots:
        snapshots.restore(16, state)
    assert (tmp_path / LAST).resolve().name == "000016"


def test_full_disk_leaves_the_metrics_unchanged(tmp_path: Path, full_disk: None) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write(LINES)
    with pytest.raises(OSError, match="No space left"):
        cut_metrics(tmp_path, 4)
    assert (tmp_path / "metrics.jsonl").read_text() == LINES


def test_run_without_its_first_file_starts_again(tmp_path: Path, monkeypatch, full_disk: None) -> None:
    with pytest.raises(OSError, match="No space left"):
        claim_folder(tmp_path / "run", {"steps": 4}, resume=False)
    monkeypatch.undo()
    claim_folder(tmp_path / "run", {"steps": 4}, resume=False)
    assert entries(tmp_path / "run") == ["training.json"]


def test_incomplete_policy_is_removed_only_by_its_own_run(tmp_path: Path) -> None:
    claim_folder(tmp_path / "run", {"steps": 4}, resume=False)
    (tmp_path / "run" / ".policy-x1").mkdir()
    with pytest.raises(TrainingError, match="steps: was 4, now 5"):
        claim_folder(tmp_path / "run", {"steps": 5}, resume=True)
    assert ".policy-x1" in entries(tmp_path / "run")
    claim_folder(tmp_path / "run", {"steps": 4}, resume=True)
    assert entries(tmp_path / "run") == ["training.json"]


def test_missing_file_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"), explain_write_errors(tmp_path):
        (tmp_path / "nothing").read_text()
