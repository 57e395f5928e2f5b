"""``robojax eval`` from a user's view, and its report."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from robojax.cli.sim import evaluate as command
from robojax.cli.sim import select_policy
from robojax.sim.evaluation import Evaluation, SuccessGate, hash_policy_files
from robojax.sim.tasks import PICK, TWO_CUBES, Outcome, Score, fisher, wilson
from tests.testing.models import compilation as compilation


def evaluation(task: Any = TWO_CUBES, episodes: int = 4, **options: Any) -> Evaluation:
    return Evaluation(select_policy(PICK, None), None, task, range(10, 10 + episodes), False, **options)


def test_report_counts_by_instruction_and_names_failures():
    run = evaluation()
    for number, (lifted, wrong) in enumerate([(True, None), (False, "red"), (False, None), (True, None)], 1):
        instruction = TWO_CUBES.choose_cube(9 + number).instruction
        run.score.outcomes.append(Outcome(number, 9 + number, instruction, lifted, wrong, 110))
    verdicts = [outcome.verdict for outcome in run.score.outcomes]
    assert verdicts == ["lifted", "wrong, lifted the red cube", "missed", "lifted"]
    assert str(run.score) == "2 of 4 cubes lifted, 1 times a wrong one"
    found = json.loads(json.dumps(run.as_json()))
    assert found["is_complete"] is True
    assert found["all"]["lifted"] == 2
    assert {name: (row["lifted"], row["wrong"], row["episodes"]) for name, row in found["by_instruction"].items()} == {
        "pick up the red cube": (1, 0, 2),
        "pick up the blue cube": (1, 1, 2),
    }
    assert found["by_instruction"]["pick up the red cube"]["wilson_95"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert [episode["wrong"] for episode in found["episodes"]] == [None, "red", None, None]


def test_report_of_an_interrupted_evaluation_is_marked(tmp_path: Path):
    run = evaluation(PICK)
    run.score.outcomes.append(Outcome(1, 10, PICK.instructions[0], True, None, 110))
    found = json.loads(run.save(tmp_path).read_text())
    assert (found["is_complete"], found["all"]["episodes"], found["seeds"]) == (False, 1, {"first": 10, "last": 13})
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]


def test_report_identifies_the_files_of_the_policy(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = hash_policy_files(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert before is not None
    assert before != hash_policy_files(str(tmp_path))
    assert hash_policy_files("owner/name") is None


@pytest.mark.usefixtures("can_draw")
def test_cubes_are_counted_filmed_and_reported(run_command: Callable[..., Result], tmp_path: Path):
    arguments = ("--episodes", "2", "--seed", "5000", "--require", "3", "--output", str(tmp_path / "run"))
    ended = run_command(*arguments)
    assert ended.exit_code == 1, ended.stderr
    assert "at least 3 were required" in ended.stderr
    output = " ".join(ended.stdout.split())
    assert "pick up the red cube 2 2 0 0 100.0 % 34.2-100.0 %" in output, ended.stdout
    found = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert found["task"]["name"] == "pick"
    assert (found["run"]["through"], found["run"]["reads_language"]) == ("the policy alone", False)
    assert {"jax", "mujoco", "robojax"} <= set(found["machine"]["packages"])
    for episode in found["episodes"]:
        assert (tmp_path / "run" / episode["film"]).stat().st_size > 1000
    again = run_command("--output", str(tmp_path / "run"))
    assert again.exit_code == 2
    assert "it is not overwritten" in again.stderr


@pytest.fixture
def run_command() -> Iterator[Callable[..., Result]]:
    """Return a function that runs the command in this process."""
    app, ending = typer.Typer(), signal.getsignal(signal.SIGTERM)
    app.command()(command)
    yield lambda *arguments: CliRunner().invoke(app, arguments)
    signal.signal(signal.SIGTERM, ending)


def test_policy_without_an_evaluation_is_explained(run_command: Callable[..., Result], tmp_path: Path):
    missing = run_command("--policy.path", str(tmp_path))
    assert (missing.exit_code, "the folder is empty" in missing.stderr) == (3, True)
    assert "Traceback" not in missing.stderr
    untrained = run_command("--task", "two-cubes")
    assert (untrained.exit_code, "robojax has none for the task two-cubes" in untrained.stderr) == (3, True)
    assert "robojax record-demo data/two-cubes --task two-cubes" in untrained.stderr
    assert run_command("--whole-stack", "--delay", "1").exit_code == 2


def test_score_before_the_first_episode_is_empty():
    assert Score().interval == (0.0, 1.0)
    assert str(Score()) == "0 of 0 cubes lifted"


@pytest.mark.parametrize(("lifted", "expected"), [(40, 40), (36, 40), (34, 40), (0, 40), (0, 0), (40, 30)])
def test_fewer_successes_are_tested_by_fishers_exact_test(lifted: int, expected: int):
    from scipy.stats import fisher_exact

    table = [[lifted, 40 - lifted], [expected, 40 - expected]]
    result: Any = fisher_exact(table, alternative="less")
    probability = result.pvalue
    assert fisher(lifted, 40, expected, 40) == pytest.approx(probability, abs=1e-12)
    assert SuccessGate(40, lifted, expected, fisher(lifted, 40, expected, 40)).passed == (probability >= 0.05)


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (17, 20), (36, 40), (40, 40), (0, 40), (96, 100)])
def test_interval_is_the_wilson_interval(successes: int, trials: int):
    from scipy.stats import binomtest

    expected = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)
