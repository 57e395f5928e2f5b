import mmap

import numpy
import pytest
from typer.testing import CliRunner

import jaxmodels
from jaxmodels import Requirements
from robojax.cli.recordings import MEMORY, app, limited_memory, replay
from tests.testing.doubles import ScriptedPolicy

WIDTH = {"COLUMNS": "200"}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run ``robojax replay`` in this process with a policy that repeats the state and is half a unit off."""
    import typer

    def load(path, revision=None, **more):
        needs = Requirements("act", {path: (48, 64)}, state=6, action=6, chunk=8, action_steps=1)
        return ScriptedPolicy(needs, step=0.0)

    monkeypatch.setattr(jaxmodels, "load_policy", load)
    command = typer.Typer(add_completion=False)
    command.command()(replay)
    return lambda *arguments: CliRunner().invoke(command, [str(argument) for argument in arguments], env=WIDTH)


def test_the_table_has_every_joint_and_the_total_mean(run, record):
    found = run(record(episodes=1, ticks=6), "--policy", "front")
    assert found.exit_code == 0, found.output
    assert "Wrist_Roll" in found.output
    # The error is 0.5 of a range of 200 units for five joints, and of 100 units for the jaw.
    summary = "6 steps of 1 episodes at 20 Hz, 6 inferences; mean error 0.29 % of the range"
    assert summary in " ".join(found.output.split())


@pytest.mark.parametrize(("limit", "code"), [("0.3", 0), ("0.28", 1)])
def test_an_error_above_the_limit_is_exit_code_1(run, record, limit, code):
    assert run(record(episodes=1), "--policy", "front", "--limit", limit).exit_code == code


def test_exit_codes_of_a_mismatch_and_a_missing_recording(run, record, tmp_path):
    found = run(record(episodes=1), "--policy", "wrist")
    assert (found.exit_code, "it needs the cameras wrist" in found.output) == (3, True)
    found = run(tmp_path / "no.mcap", "--policy", "front")
    assert (found.exit_code, "no.mcap is not there" in found.output) == (2, True)


def test_rerun_writes_a_file_for_its_viewer(run, record, tmp_path):
    pytest.importorskip("rerun")
    found = run(record(episodes=1, ticks=4), "--policy", "front", "--rerun", "--save", tmp_path / "replay.rrd")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "replay.rrd").read_bytes().startswith(b"RRF")


def test_a_recording_is_described_and_exported_next_to_its_file(record):
    path = record(episodes=2)
    described = CliRunner().invoke(app, ["info", str(path), "--json"])
    assert '"task": "pick up the cube"' in described.output
    exported = CliRunner().invoke(app, ["export", str(path)])
    assert (exported.exit_code, "2 episodes, 24 frames" in exported.output) == (0, True)
    assert CliRunner().invoke(app, ["export", str(path)]).exit_code == 2, "the dataset exists already"
    assert CliRunner().invoke(app, ["info", str(path.with_suffix("")), "--json"]).exit_code == 0


def test_a_process_above_the_memory_limit_gets_the_limit_on_top():
    """A notebook may use more than the limit. A thread without memory for its start would block forever."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with mmap.mmap(-1, MEMORY, mmap.MAP_PRIVATE), limited_memory():  # The mapping is never touched.
        numpy.ones(1 << 28, numpy.uint8)
        with pytest.raises(MemoryError):
            numpy.empty(MEMORY + (1 << 30), numpy.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
