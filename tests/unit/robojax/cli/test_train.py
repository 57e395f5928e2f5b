"""``robojax train``: LeRobot's flags, and refusals with suggestions."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxmodels.data import DatasetWriter
from robojax.cli import train
from robojax.cli.train import app
from robojax.cli.train_flags import InvalidFlags, policy_values, read_flags
from tests.testing.compiling import compiling_quickly


def test_flags_of_train_are_parsed() -> None:
    arguments = ["--policy.type=act", "--steps", "50", "--resume", "--dataset.episodes=[0, 2,5-7]"]
    given = read_flags([*arguments, "--policy.chunk_size=10"])
    assert given.values == {"policy.type": "act", "steps": 50, "resume": True, "dataset.episodes": [0, 2, 5, 6, 7]}
    assert given.policy == {"chunk_size": "10"}

    arguments = ["--image_size=96x128", "--mesh=data:2,fsdp:4", "--optimizer.betas=0.9,0.95", "--resume=false"]
    assert read_flags([*arguments, '--dataset.image_transforms.tfs={"hue": 1}']).values == {
        "image_size": (96, 128),
        "mesh": {"data": 2, "fsdp": 4},
        "optimizer.betas": (0.9, 0.95),
        "resume": False,
        "dataset.image_transforms.tfs": {"hue": 1},
    }
    assert read_flags(["--image_size=64"]).values == {"image_size": (64, 64)}


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--polcy.type=act", "did you mean --policy.type?"),
        ("--lr=1e-3", "did you mean --optimizer.lr?"),
        ("--batchsize=8", "did you mean --batch_size?"),
        ("--steps=many", "--steps is 'many'; wanted an integer"),
        ("--resume=perhaps", "wanted true or false"),
        ("--image_size=0", "wanted pixels"),
        ("--mesh=model:2", "wanted numbers of devices"),
        ("--wandb.enable=true", "--tensorboard=true"),
        ("--eval_freq=100", "robojax eval"),
        ("act", "'act' is not a flag"),
        ("--steps", "--steps is ''; wanted an integer"),
    ],
)
def test_unreadable_flag_is_refused_with_a_suggestion(argument: str, complaint: str) -> None:
    with pytest.raises(InvalidFlags) as refusal:
        read_flags([argument])
    assert complaint in str(refusal.value)


def test_all_complaints_are_reported_together_and_once() -> None:
    with pytest.raises(InvalidFlags) as refusal:
        read_flags(["--polcy.type=act", "--steps=x", "--seed=1", "--seed=2"])
    assert len(str(refusal.value).splitlines()) == 3


def test_fields_of_a_policy_are_parsed_by_their_types() -> None:
    kinds = {"dropout": "float", "vision_backbone": "str", "use_vae": "bool", "weights": "str | None", "size": "int"}
    texts = {"dropout": "1e-1", "vision_backbone": "18", "use_vae": "True", "weights": "null", "size": "4"}
    values = {"dropout": 0.1, "vision_backbone": "18", "use_vae": True, "weights": None, "size": 4}
    assert policy_values(texts, kinds, "act") == values
    with pytest.raises(InvalidFlags, match=r"--policy\.use_vea is not known of act; did you mean --policy\.use_vae\?"):
        policy_values({"use_vea": "true"}, kinds, "act")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--policy.type"),
        (["--policy.bins=4", "--policy.kl_weight=1"], "wanted either --policy.type"),
        (["--policy.type=actt", "--dataset.repo_id=a/b"], "--policy.type is 'actt'; wanted act"),
        (["--policy.type=act"], "wanted --dataset.root"),
        (["--policy.type=act", "--policy.path=x", "--dataset.repo_id=a/b"], "wanted either --policy.type"),
        (["--policy.type=act", "--dataset.root=/nowhere/at/all"], "there is no such folder"),
        (["--policy.type=act", "--dataset.repo_id=a/b", "--resume"], "--resume needs --output_dir"),
        (["--policy.type=act", "--dataset.repo_id=a/b", "--mesh=data:1", "--fsdp"], "--mesh and --fsdp exclude"),
    ],
)
def test_conflicting_flags_are_a_usage_error(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy.tpye=act"], "--policy.tpye is not known; did you mean --policy.type?"),
        (["--policy.pth=me/it", "--datset.root=x"], "--datset.root is not known; did you mean --dataset.root?"),
        (["--policy.tpye=act", "--dataset.root=/nowhere"], "--policy.tpye is not known; did you mean --policy.type?"),
        (["--policy.type=act", "--policy.chunk_sze=4"], "of act; did you mean --policy.chunk_size?"),
        (["--policy.type=act", "--policy.bins=4"], "--policy.bins is not known of act"),
        (["--policy.path=me/it", "--policy.revison=main"], "did you mean --policy.revision?"),
    ],
)
def test_unknown_flag_is_reported_before_missing_flags(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())
    assert "wanted" not in result.output


def test_decoding_progress_is_logged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(train.time, "monotonic", lambda: now)
    with train.ProgressDisplay(is_enabled=True) as shown:
        for done in range(0, 3000, 100):
            now = done / 100  # Seconds.
            shown.decoding(done, 3000)
    assert capsys.readouterr().out == "decoding 1000/3000 (33%)\ndecoding 2000/3000 (67%)\n"


def test_help_lists_each_flag_and_the_fields_of_a_policy() -> None:
    result = CliRunner().invoke(app, ["--help", "--policy.type=act"])
    assert result.exit_code == 0
    assert "--gradient_accumulation_steps" in result.output
    assert "--policy.kl_weight" in result.output
    assert "diffusion2d" in CliRunner().invoke(app, ["--help", "--policy.type=actt"]).output


@pytest.mark.timeout(600)  # A slow machine compiles for a minute.
def test_same_command_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", "off")
    with DatasetWriter(tmp_path / "demos", fps=10, joint_names=("x",), environment_state=("where",)) as writer:
        for place in np.float32((0.1, 0.5, 0.9)):
            for share in np.linspace(0, 1, 5, dtype=np.float32):
                state = {"observation.state": np.array([share * place]), "action": np.array([place])}
                writer.add({**state, "observation.environment_state": np.array([place])})
            writer.end_episode("reach")
    arguments = [
        *("--policy.type=act", "--preset=small", "--policy.device=cpu", "--policy.dim_model=16"),
        *("--policy.dim_feedforward=16", "--policy.n_encoder_layers=1"),
        *("--policy.chunk_size=4", "--policy.n_action_steps=2", "--optimizer.lr=0.01"),
        *(f"--dataset.root={tmp_path / 'demos'}", "--dataset.episodes=0-1", f"--output_dir={tmp_path / 'run'}"),
        *("--steps=4", "--batch_size=4", "--log_freq=2", "--dataset.image_transforms.noise=0.02"),
    ]
    with compiling_quickly():
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 episodes, 10 frames at 10 Hz; 4 steps of 4" in result.output
    assert "step 4/4  loss" in result.output
    config = json.loads((tmp_path / "run" / "policy" / "config.json").read_text())
    assert (config["dim_model"], config["device"], config["push_to_hub"]) == (16, "cpu", False)
    setup = json.loads((tmp_path / "run" / "training.json").read_text())
    assert setup["training"]["optimizer"]["lr"] == 0.01
    assert setup["training"]["optimizer"]["lr_backbone"] == 1e-3
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 3
    assert "--resume=true" in again.output
    with compiling_quickly():
        assert CliRunner().invoke(app, [*arguments, "--resume=true"]).exit_code == 0
