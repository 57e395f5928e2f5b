"""Policies with a language model (SmolVLA, pi0, pi0.5), from golden checkpoints: folders, prompts and cameras."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxmodels
from jaxmodels.devices import find_dtype
from jaxmodels.errors import CheckpointError, ConfigError, ObservationError
from jaxmodels.instructions import Prompts
from jaxmodels.normalization import Affine
from jaxmodels.policies import get_policy_type, integrity, lerobot_folder
from jaxmodels.policies.pi0 import config as pi0_config
from jaxmodels.program import Part, Programs
from tests.testing.models import edit_json, relative_error

SMOLVLA, PI05, RELATIVE = "smolvla_two_cameras", "pi05_two_cameras", "pi05_relative_actions"
PREPROCESSOR = "policy_preprocessor.json"
TOKENIZE, NEW_LINE = "tokenizer_processor", "smolvla_new_line_processor"
STATE = "pi05_prepare_state_tokenizer_processor_step"
TOKENIZERS = {SMOLVLA: "vlm/tokenizer.json", PI05: "google/paligemma-3b-pt-224/tokenizer.json"}


@pytest.fixture(scope="module")
def policies(golden_folder) -> Callable[[str], jaxmodels.Policy]:
    loaded: dict[str, jaxmodels.Policy] = {}
    return lambda name: loaded.setdefault(name, jaxmodels.load_policy(golden_folder(name)))


@pytest.fixture
def folder(golden_folder, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(golden_folder(name), tmp_path / name))


def recorded(folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Return the observation and the noise of a golden checkpoint."""
    with np.load(folder / "io.npz") as io:
        seen: dict[str, Any] = {
            name.removeprefix("in.0."): io[name] for name in io.files if name.startswith("in.0.observation")
        }
        return seen | {"task": io["in.0.task"].tolist()}, io["in.0.noise"]


def step(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in values["steps"] if entry["registry_name"] == name)


@pytest.mark.parametrize("name", [SMOLVLA, PI05])
def test_tokenizer_must_match_the_model_and_is_never_fetched(
    name: str, folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    policy = folder(name)
    content = (policy / TOKENIZERS[name]).read_bytes()
    if name == SMOLVLA:
        edit_json(policy / TOKENIZERS[name], lambda values: values["model"]["vocab"].update(strange=999))
        with pytest.raises(CheckpointError, match=r"a vocabulary of 352; they are not of one model"):
            jaxmodels.load_policy(policy)
    (policy / TOKENIZERS[name]).unlink()
    model = TOKENIZERS[name].removesuffix("/tokenizer.json")
    with pytest.raises(CheckpointError, match=f"no tokenizer.json of '{model}'.*hf download {model}"):
        jaxmodels.load_policy(policy)
    (policy / "tokenizer.json").write_bytes(content)
    jaxmodels.load_policy(policy)
    (policy / "tokenizer.json").unlink()
    if "/" in model:
        cached = tmp_path / "cache" / f"models--{model.replace('/', '--')}"
        snapshot = cached / "snapshots" / ("0" * 40)
        for path, data in {cached / "refs" / "main": b"0" * 40, snapshot / "tokenizer.json": content}.items():
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        jaxmodels.load_policy(policy)


INDEX, SHARDS = "model.safetensors.index.json", [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def split_weights(folder: Path) -> None:
    """Split the weights into shards with an index, as transformers does."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: SHARDS[number % 2] for number, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if files[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_weights_may_be_in_shards(folder, golden_folder) -> None:
    policy = folder(SMOLVLA)
    split_weights(policy)
    whole = lerobot_folder.read_checkpoint(golden_folder(SMOLVLA)).weights
    shards = lerobot_folder.read_checkpoint(policy)
    assert whole.keys() == shards.weights.keys()
    assert all(np.array_equal(whole[name], shards.weights[name]) for name in whole)
    assert integrity.verify_files(policy) == integrity.verify_files(golden_folder(SMOLVLA))
    lerobot_folder.write_checkpoint(policy, shards)
    assert not [path.name for path in policy.iterdir() if path.name in (INDEX, *SHARDS)]


def move_tensor(policy: Path) -> None:
    edit_json(policy / INDEX, lambda values: values["weight_map"].update({min(values["weight_map"]): SHARDS[1]}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda policy: (policy / SHARDS[1]).unlink(), f"{SHARDS[1]}: cannot be read"),
        (lambda policy: (policy / INDEX).unlink(), f"{SHARDS[0]}, {SHARDS[1]} without {INDEX}"),
        (lambda policy: shutil.copy(policy / SHARDS[0], policy / "model.safetensors"), "in shards .*keep one of them"),
        (lambda policy: shutil.copy(policy / SHARDS[0], policy / SHARDS[0].replace("1", "3")), "names no tensor"),
        (move_tensor, f"is in {SHARDS[0]}, not in {SHARDS[1]}"),
        (lambda policy: edit_json(policy / INDEX, lambda v: v["weight_map"].update(a="../x")), "wanted plain"),
        (lambda policy: edit_json(policy / INDEX, lambda v: v["weight_map"].update(a=SHARDS[0])), "a is not in"),
        (lambda policy: edit_json(policy / INDEX, weight_map=[1]), "has no weight_map"),
    ],
    ids=["missing", "no index", "twice", "stray", "moved", "elsewhere", "unknown", "no map"],
)  # fmt: skip
def test_shards_that_contradict_their_index_are_refused(change, text: str, folder) -> None:
    policy = folder(SMOLVLA)
    split_weights(policy)
    change(policy)
    with pytest.raises(CheckpointError, match=text):
        lerobot_folder.read_checkpoint(policy)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (SMOLVLA, lambda v: step(v, TOKENIZE)["config"].update(max_length=12), "max_length 12"),
        (SMOLVLA, lambda v: step(v, TOKENIZE)["config"].update(padding_side="left"), "padding_side 'left'"),
        (SMOLVLA, lambda v: step(v, TOKENIZE)["config"].update(tokenizer_name="../x"), "tokenizer_name"),
        (SMOLVLA, lambda v: step(v, NEW_LINE).update(registry_name="pi0_new_line_processor"), "does not belong to"),
        (SMOLVLA, lambda v: step(v, NEW_LINE).update(registry_name="x"), "'x' .* is not known"),
        (PI05, lambda v: v["steps"].insert(1, v["steps"].pop(v["steps"].index(step(v, STATE)))), "comes before"),
        (RELATIVE, lambda v: step(v, "relative_actions_processor")["config"].update(enabled=False), "both or none"),
        (RELATIVE, lambda v: step(v, "relative_actions_processor")["config"].update(exclude_joints=[]), "do not agree"),
    ],
    ids=["length", "side", "name", "other type", "unknown", "order", "half relative", "other relative"],
)  # fmt: skip
def test_steps_with_another_meaning_are_refused(name: str, change, text: str, folder) -> None:
    policy = folder(name)
    edit_json(policy / PREPROCESSOR, change)
    with pytest.raises(CheckpointError, match=text):
        jaxmodels.load_policy(policy)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("robojax.json", {"statistics": "so101"}, "'so101', which has no statistics for observation.state"),
        ("stats.json", {"action": {"mean": "a lot"}}, r"stats.json: action.mean is 'a lot'; wanted numbers"),
    ],
)
def test_invalid_statistics_of_a_robot_are_refused(name: str, content, text: str, folder) -> None:
    policy = folder(SMOLVLA)
    for path in policy.glob("policy_*normalizer_processor.safetensors"):
        save_file({f"so100.buffer.{key}": value for key, value in load_file(path).items()}, path)
    (policy / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=text):
        lerobot_folder.read_checkpoint(policy)


def test_requirements_of_a_language_model_policy(policies) -> None:
    requirements = policies(SMOLVLA).requirements
    assert requirements.language
    assert requirements.cameras == {"front": (48, 72), "wrist": (60, 44)}
    # The requirements leave out empty cameras.
    assert policies(RELATIVE).requirements.cameras == {"top": (40, 64)}


def test_camera_may_be_absent_and_unknown_camera_is_named(policies, golden_folder) -> None:
    policy, (seen, noise) = policies(SMOLVLA), recorded(golden_folder(SMOLVLA))
    with np.load(golden_folder(SMOLVLA) / "io.npz") as io:
        whole = io["out.0.chunk"]
    masked = policy.act(seen | {"observation.images.wrist_padding_mask": np.array([False, True])}, noise=noise)
    assert np.abs(masked[1] - whole[1]).max() < 1e-4 * np.abs(whole).max()
    assert np.abs(masked[0] - whole[0]).max() > 1e-3 * np.abs(whole).max()
    left_out = {name: value for name, value in seen.items() if not name.endswith("wrist")}
    wrong = left_out | {"observation.images.wirst": seen["observation.images.wrist"]}
    with pytest.raises(ObservationError, match=r"images\.wirst is no camera .*images\.wrist missing"):
        policy.act(wrong, noise=noise)
    with pytest.raises(ObservationError, match=r"images\.side is no camera of this policy; it has .*images\.front"):
        policy.act(seen | {"observation.images.side": seen["observation.images.wrist"]}, noise=noise)
    with pytest.raises(ObservationError, match="no image at all"):
        policy.act({name: value for name, value in seen.items() if "images" not in name}, noise=noise)
    with pytest.raises(ObservationError, match=r"padding_mask is float64\[2\]; wanted bool\[2\]"):
        policy.act(seen | {"observation.images.wrist_padding_mask": np.ones(2)}, noise=noise)


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        ({"front": "top", "wrist": "front"}, None),
        ({"frnt": "top"}, "rename frnt=top names no camera of the policy, which has front, wrist"),
        ({"top": "front"}, "the policy's name comes first, as front=top"),
        ({"Front": "front"}, r"did you mean front=front\?"),
        ({"observation.images.front": "front"}, r"did you mean front=front\?"),
        ({"front": "wrist"}, "two cameras of the policy one name, front and wrist"),
        ({"front": "top", "wrist": "top"}, "two cameras of the policy one name, front and wrist"),
    ],
    ids=["other names", "unknown", "reversed", "another case", "feature name", "taken", "one for two"],
)
def test_cameras_may_be_renamed(rename, text, policies, golden_folder, tmp_path: Path) -> None:
    if text is not None:
        with pytest.raises(ConfigError, match=text):
            jaxmodels.load_policy(golden_folder(SMOLVLA), rename=rename)
        return
    policy, (seen, noise) = policies(SMOLVLA), recorded(golden_folder(SMOLVLA))
    renamed = jaxmodels.load_policy(golden_folder(SMOLVLA), rename=rename, like=policy)
    assert renamed.requirements.cameras == {"top": (48, 72), "front": (60, 44)}
    named = {name: value for name, value in seen.items() if "images" not in name}
    named |= {f"observation.images.{rename[camera]}": seen[f"observation.images.{camera}"] for camera in rename}
    np.testing.assert_array_equal(renamed.act(named, noise=noise), policy.act(seen, noise=noise))
    # The policy's own front camera is absent now; the robot's camera with that name is another camera.
    alone = {name: value for name, value in named.items() if not name.endswith("top")}
    without = {name: value for name, value in seen.items() if not name.endswith("front")}
    np.testing.assert_array_equal(renamed.act(alone, noise=noise), policy.act(without, noise=noise))
    lerobot_folder.write_checkpoint(tmp_path / "saved", renamed.checkpoint)
    assert jaxmodels.read_requirements(tmp_path / "saved").cameras == renamed.requirements.cameras


def test_other_instructions_use_the_same_program(policies, golden_folder) -> None:
    policy, (seen, noise) = policies(SMOLVLA), recorded(golden_folder(SMOLVLA))
    both = policy.act(seen, noise=noise)
    compiled = len(policy._programs._compiled)
    other = policy.act(seen | {"task": ["open the drawer", "grasp the lid"]}, noise=noise)
    assert len(policy._programs._compiled) == compiled
    assert np.abs(other - both).max() > 1e-3


@pytest.mark.parametrize("name", [SMOLVLA, PI05])
def test_frames_of_another_size_compile_only_their_preparation(name: str, golden_folder, monkeypatch) -> None:
    policy = jaxmodels.load_policy(golden_folder(name))
    policy.compile()
    compile, compiled = Programs._compile, []

    def record(self: Programs, parts: list[Part]) -> Any:
        compiled.append([part.name for part in parts])
        return compile(self, parts)

    monkeypatch.setattr(Programs, "_compile", record)
    cameras = {camera: (height + 3, width + 5) for camera, (height, width) in policy.requirements.cameras.items()}
    policy.compile(1, cameras)
    policy.compile(2)
    assert not policy.is_compiled(2, with_plan=True)
    policy.compile(2, with_plan=True)
    # Prompts of pi0.5 have two lengths. The plan of actions that is continued is an input of the last stage alone.
    lengths = 1 + len(policy.checkpoint.config.short_prompts)
    frames, stages = {"frames": lengths}, {"vision": 1, "prefix": lengths, "denoise": 1}
    assert [Counter(names) for names in compiled] == [frames, frames | stages, frames | {"denoise": 1}]
    seen = {f"observation.images.{camera}": np.zeros((1, *size, 3), np.uint8) for camera, size in cameras.items()}
    seen["observation.state"] = np.zeros((1, policy.requirements.state), np.float32)
    assert np.isfinite(policy.act(seen | {"task": ["pick"]})).all()
    assert len(compiled) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_prompts_give_the_same_actions(dtype: str, golden_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, (seen, noise) = jaxmodels.load_policy(golden_folder(PI05), dtype=dtype), recorded(golden_folder(PI05))
    lengths: list[int] = []
    run = policy._run
    monkeypatch.setattr(
        policy, "_run", lambda program, arrays: lengths.append(arrays.language.tokens.shape[1]) or run(program, arrays)
    )
    short = policy.act(seen | {"task": ["pick"] * 2}, noise=noise)
    monkeypatch.setattr(pi0_config, "SHORT_PROMPTS", ())
    whole = policy.act(seen | {"task": ["pick"] * 2}, noise=noise)
    assert lengths == [64, 72]
    assert relative_error(short, whole) < (1e-6 if dtype == "float32" else 0.01)


def test_long_instruction_is_cut_and_logged(policies, golden_folder, caplog: pytest.LogCaptureFixture) -> None:
    policy, (seen, noise) = policies(SMOLVLA), recorded(golden_folder(SMOLVLA))
    words = " ".join(["cube"] * 60)
    policy.act(seen | {"task": [words, f"{words} and what is behind is not read"]}, noise=noise)
    assert "the policy reads 48; its end is cut off" in caplog.text
    assert policy.prepare_task("push") == 0
    # A begin token and an end token count.
    assert policy.prepare_task(words) == int(re.findall(r"has (\d+) tokens", caplog.text)[0]) - 48 > 0
    assert policies(PI05).prepare_task("push") < policies(PI05).prepare_task(words)
    with pytest.raises(ObservationError, match="blank"):
        policy.act(seen | {"task": ["push", "  "]}, noise=noise)


LONG = "pick up the cube and then " * 9


def move_joints(policy: jaxmodels.Policy, seen: dict[str, Any], noise: np.ndarray, **more: Any) -> float:
    """Return how much the actions change when the joints change."""
    chunks = [
        policy.act({**seen, **more, "observation.state": np.full_like(seen["observation.state"], pose)}, noise=noise)
        for pose in (0.0, 20.0)
    ]
    return float(np.abs(chunks[0] - chunks[1]).max())


def test_long_task_is_shortened_and_joints_are_kept(policies, golden_folder, caplog) -> None:
    policy, (seen, noise) = policies(PI05), recorded(golden_folder(PI05))
    seen["task"] = [LONG] * len(seen["task"])
    assert policy.requirements.prompt_cuts == ("task", "lerobot")
    assert move_joints(policy, seen, noise) > 0.1
    assert move_joints(policy, seen, noise, prompt_cut=["lerobot"] * len(seen["task"])) == 0
    texts = [record.getMessage() for record in caplog.records]
    left_out, cut_off = policy.prepare_task(LONG), policy.prepare_task(LONG, "lerobot")
    assert left_out >= cut_off > 0
    # Each instruction is logged once, although each pose gives another prompt.
    assert len([text for text in texts if "its last" in text and "has room for the joints" in text]) == 1
    assert len([text for text in texts if "joints that the policy does not see" in text]) == 1


def test_task_that_fits_is_the_same_for_both_cuts(policies, golden_folder, caplog) -> None:
    policy, (seen, noise) = policies(PI05), recorded(golden_folder(PI05))
    for cut in ("task", "lerobot"):
        chunk = policy.act({**seen, "prompt_cut": [cut] * len(seen["task"])}, noise=noise)
        np.testing.assert_array_equal(chunk, policy.act(seen, noise=noise))
        assert policy.prepare_task(seen["task"][0], cut) == 0
    assert not caplog.records


def test_prompts_of_the_task_alone_are_cut_at_the_end(policies, golden_folder) -> None:
    policy, (seen, noise) = policies(SMOLVLA), recorded(golden_folder(SMOLVLA))
    seen = {**seen, "task": [LONG] * len(seen["observation.state"])}
    assert policy.requirements.prompt_cuts == ()
    assert policy.prepare_task(LONG) == policy.prepare_task(LONG, "lerobot") > 0
    cut = policy.act({**seen, "prompt_cut": ["lerobot"] * len(seen["observation.state"])}, noise=noise)
    np.testing.assert_array_equal(policy.act(seen, noise=noise), cut)


def test_policy_is_loaded_with_a_prompt_cut(policies, golden_folder) -> None:
    policy, (seen, noise) = policies(PI05), recorded(golden_folder(PI05))
    seen["task"] = [LONG] * len(seen["observation.state"])
    loaded = jaxmodels.load_policy(golden_folder(PI05), prompt_cut="lerobot", like=policy)
    assert move_joints(loaded, seen, noise) == move_joints(loaded.on(None), seen, noise) == 0
    assert move_joints(policy, seen, noise) > 0.1
    assert loaded.prepare_task(LONG) == policy.prepare_task(LONG, "lerobot")
    with pytest.raises(ConfigError, match="prompt_cut is 'end'; wanted one of task, lerobot"):
        jaxmodels.load_policy("nobody/asks/the/hub", prompt_cut="end")
    for given in (["end"] * 2, "lerobot", ["lerobot"] * 3, [["lerobot"]] * 2, np.array([1, 2])):
        with pytest.raises(ObservationError, match=r"prompt_cut is .*; wanted a list with one of task, lerobot"):
            policy.act({**seen, "prompt_cut": given}, noise=noise)


@pytest.mark.parametrize(
    ("text", "whole"),
    [(LONG, True), (LONG.replace(" ", "_"), True), ("cube" * 99, False), ("把方块" * 40, False), ("pick", True)],
)
def test_shortened_task_ends_with_a_word(policies, text: str, whole: bool) -> None:
    prompts = policies(PI05)._prompts
    state = np.zeros(6, np.float32)
    short = prompts._shorten(text, state)
    assert short
    assert text.startswith(short)
    if whole:
        assert short == text.rstrip("_ ") or not text[len(short)].isalnum()
    _, mask, left_out = prompts._tokenize(text, state, "task")
    assert left_out == (prompts._tokenizer(prompts._config.format_prompt(text, state))[2] - mask.sum())
    # The cut is the same for other poses.
    assert short == prompts._shorten(text, np.linspace(-1, 1, 6, dtype=np.float32))
    used = prompts._tokenizer(prompts._config.format_prompt(short, state))
    np.testing.assert_array_equal(prompts._tokenize(text, state, "task")[0], used[0])


def test_state_that_fills_the_prompt_is_cut_and_logged(policies, caplog) -> None:
    checkpoint = policies(PI05).checkpoint
    config = replace(checkpoint.config, tokenizer_max_length=24)
    prompts = Prompts(config, Affine(np.zeros(6), np.ones(6), np.zeros(6)), checkpoint.tokenizer)
    assert prompts.cuts == ("lerobot",)
    assert prompts.count_cut("pick", 6) == prompts.count_cut("pick", 6, "lerobot") > 0
    prompts(["pick"], np.zeros((1, 6), np.float32))
    assert "the joints leave no room for an instruction" in caplog.text
    assert "joints that the policy does not see, as in LeRobot" in caplog.text


@pytest.mark.parametrize("name", [SMOLVLA, PI05, RELATIVE])
def test_saved_policy_is_the_same_policy(name: str, policies, golden_folder, tmp_path: Path) -> None:
    policy, (seen, noise) = policies(name), recorded(golden_folder(name))
    policy.save(tmp_path / "saved")
    again = jaxmodels.load_policy(tmp_path / "saved", like=policy)
    assert again._programs is policy._programs
    assert np.array_equal(again.act(seen, noise=noise), policy.act(seen, noise=noise))


def test_sidecar_selects_the_lerobot_version(folder, golden_folder) -> None:
    policy, (seen, _) = folder(PI05), recorded(golden_folder(PI05))
    now = jaxmodels.load_policy(policy)._prompts
    (policy / "robojax.json").write_text('{"lerobot": "0.4"}')
    before = jaxmodels.load_policy(policy)._prompts
    # LeRobot 0.4 pads the state in the prompt.
    texts, state = seen["task"], seen["observation.state"]
    assert not np.array_equal(now(texts, state).tokens, before(texts, state).tokens)
    assert jaxmodels.load_policy(policy).lerobot == "0.4"
    assert jaxmodels.load_policy(policy, lerobot="0.6").lerobot == "0.6"
    (policy / "robojax.json").write_text('{"lerobot": "1.0"}')
    with pytest.raises(ConfigError, match=r"lerobot is '1.0'; wanted one of 0.4, 0.6"):
        jaxmodels.load_policy(policy)


@pytest.mark.parametrize("name", [SMOLVLA, PI05, "diffusion_env_state_ddim"])
def test_parts_of_a_policy_are_counted_and_timed_separately(name: str, policies) -> None:
    policy, is_language = policies(name), "diffusion" not in name
    counts, times = policy.count_parameters(), policy.profile_stages(runs=1)
    stages = ["vision", "prefix", "denoise"] if is_language else ["encode", "denoise"]
    assert [part.name for part in times] == ["frames", *stages]
    assert set(counts) == ({"vision", "language", "expert"} if is_language else {"denoiser"})
    assert policy.prefix_tokens > policy.checkpoint.config.prompt_length if is_language else policy.prefix_tokens == 0
    assert times[-1].count == (4 if is_language else 8)
    assert all(part.seconds > 0 for part in times)


@pytest.mark.parametrize(
    ("kind", "requested", "platform", "expected"),
    [
        ("smolvla", None, "gpu", "bfloat16"),
        ("pi05", None, "tpu", "bfloat16"),
        ("pi0", None, "cpu", "float32"),
        ("pi0", "float32", "gpu", "float32"),
        ("pi0", "bfloat16", "cpu", "bfloat16"),
        ("act", None, "gpu", "float32"),
        ("diffusion", None, "gpu", "float32"),
    ],
)
def test_language_models_are_in_bfloat16_on_accelerators(kind: str, requested, platform: str, expected: str) -> None:
    assert find_dtype(requested, platform, get_policy_type(kind).accelerator_dtype).name == expected
