"""``robojax train``: flags as LeRobot writes them, and refusals that say what was meant."""

import pytest
from typer.testing import CliRunner

from robojax.cli import train
from robojax.cli.train import app
from robojax.cli.train_flags import InvalidFlags, policy_values, read_flags


def test_values_come_after_an_equals_sign_or_a_blank_and_flags_may_stand_alone() -> None:
    given = read_flags(
        ["--policy.type=act", "--steps", "50", "--resume", "--dataset.episodes=[0, 2,5-7]", "--policy.chunk_size=10"]
    )
    assert given.values == {"policy.type": "act", "steps": 50, "resume": True, "dataset.episodes": [0, 2, 5, 6, 7]}
    assert given.policy == {"chunk_size": "10"}


def test_sizes_meshes_betas_and_json_are_read() -> None:
    arguments = ["--image_size=96x128", "--mesh=data:2,fsdp:4", "--optimizer.betas=0.9,0.95", "--resume=false"]
    given = read_flags([*arguments, '--dataset.image_transforms.tfs={"hue": 1}'])
    assert given.values == {
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
        ("--mesh=model:2", "wanted how many devices"),
        ("--wandb.enable=true", "--tensorboard=true"),
        ("--eval_freq=100", "robojax eval"),
        ("act", "'act' is no flag"),
        ("--steps", "--steps is ''; wanted an integer"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_was_meant(argument: str, complaint: str) -> None:
    with pytest.raises(InvalidFlags) as refusal:
        read_flags([argument])
    assert complaint in str(refusal.value)


def test_all_complaints_come_together_and_nothing_is_said_twice() -> None:
    with pytest.raises(InvalidFlags) as refusal:
        read_flags(["--polcy.type=act", "--steps=x", "--seed=1", "--seed=2"])
    assert len(str(refusal.value).splitlines()) == 3


def test_fields_of_a_policy_are_read_as_their_types_want() -> None:
    kinds = {"dropout": "float", "vision_backbone": "str", "use_vae": "bool", "weights": "str | None", "size": "int"}
    texts = {"dropout": "1e-1", "vision_backbone": "18", "use_vae": "True", "weights": "null", "size": "4"}
    assert policy_values(texts, kinds, "act") == {
        "dropout": 0.1,
        "vision_backbone": "18",
        "use_vae": True,
        "weights": None,
        "size": 4,
    }
    with pytest.raises(InvalidFlags, match=r"--policy\.use_vea is not known of act; did you mean --policy\.use_vae\?"):
        policy_values({"use_vea": "true"}, kinds, "act")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--policy.type"),
        (
            ["--policy.type=actt", "--dataset.repo_id=a/b"],
            "--policy.type is 'actt'; wanted act",
        ),
        (["--policy.type=act"], "wanted --dataset.root"),
        (["--policy.type=act", "--policy.path=x", "--dataset.repo_id=a/b"], "one of --policy.type"),
        (["--policy.type=act", "--dataset.root=/nowhere/at/all"], "there is no such folder"),
        (["--policy.type=act", "--dataset.repo_id=a/b", "--resume"], "--resume wants --output_dir"),
        (["--policy.type=act", "--dataset.repo_id=a/b", "--mesh=data:1", "--fsdp"], "one of --mesh and --fsdp"),
    ],
)
def test_flags_that_do_not_go_together_are_a_usage_error(arguments: list[str], complaint: str) -> None:
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
def test_an_unknown_flag_is_answered_before_what_is_missing(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())
    assert "wanted" not in result.output


def test_fields_of_any_policy_pass_until_its_type_is_known() -> None:
    result = CliRunner().invoke(app, ["--policy.bins=4", "--policy.kl_weight=1"])
    assert "wanted one of --policy.type" in result.output


def test_a_log_is_told_of_long_decoding_at_times_and_not_at_each_frame(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(train.time, "monotonic", lambda: now)
    with train.ProgressDisplay(is_enabled=True) as shown:
        for done in range(0, 3000, 100):
            now = done / 100  # seconds
            shown.decoding(done, 3000)
    assert capsys.readouterr().out == "decoding 1000/3000 (33%)\ndecoding 2000/3000 (67%)\n"


def test_help_lists_every_flag_and_the_fields_of_a_policy() -> None:
    result = CliRunner().invoke(app, ["--help", "--policy.type=act"])
    assert result.exit_code == 0
    assert "--gradient_accumulation_steps" in result.output
    assert "--policy.kl_weight" in result.output
    assert "diffusion2d" in CliRunner().invoke(app, ["--help", "--policy.type=actt"]).output
