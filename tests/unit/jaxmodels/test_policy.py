"""A policy at inference: checked observations, one compilation per shape, weight swaps without compilation."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmodels
from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.errors import ConfigError, HubError, ObservationError
from jaxmodels.policies import lerobot_folder


@pytest.fixture(scope="module")
def config(small):
    return small(cameras=("front", "wrist"))


@pytest.fixture(scope="module")
def policy(config, checkpoint_of):
    return jaxmodels.Policy(checkpoint_of(config, rate=25.0))


def test_requirements_list_the_inputs_from_a_robot(policy) -> None:
    assert policy.requirements == jaxmodels.Requirements(
        policy_type="act",
        cameras={"front": (32, 32), "wrist": (32, 32)},
        state=6,
        environment_state=None,
        action=5,
        chunk=6,
        action_steps=3,
        joint_names=None,
        rate=25.0,
        temporal_ensemble_coeff=None,
    )
    assert policy.device == "cpu:0"
    assert policy.dtype == "float32"


def test_chunk_has_a_row_per_step_and_stages_are_timed(config, checkpoint_of, observation_of) -> None:
    policy = jaxmodels.Policy(checkpoint_of(config))
    assert dict(policy.timings) == {}
    chunk = policy.act(observation_of(config, batch=2))
    assert chunk.shape == (2, 6, 5)
    assert chunk.dtype == np.float32
    assert chunk.flags.writeable
    assert np.isfinite(chunk).all()
    assert list(policy.timings) == ["to_device", "compute", "to_host"]
    assert all(seconds >= 0 for seconds in policy.timings.values())


def test_chunk_depends_on_each_camera_and_the_state(policy, config, observation_of) -> None:
    observation = observation_of(config)
    wanted = policy.act(observation)
    for name, array in observation.items():
        changed = array // 2 if array.dtype == np.uint8 else array + 1
        assert not np.allclose(policy.act({**observation, name: changed}), wanted, atol=1e-4), name
    front, wrist = "observation.images.front", "observation.images.wrist"
    swapped = {**observation, front: observation[wrist], wrist: observation[front]}
    assert not np.allclose(policy.act(swapped), wanted, atol=1e-4)


def test_frames_of_another_size_are_resized_in_the_program(policy, config, observation_of) -> None:
    observation = observation_of(config)
    doubled = {
        name: array.repeat(2, 1).repeat(3, 2) if array.ndim == 4 else array for name, array in observation.items()
    }
    np.testing.assert_allclose(policy.act(doubled), policy.act(observation), atol=0.05)
    flat = {name: np.full_like(array, 90) if array.ndim == 4 else array for name, array in observation.items()}
    larger = {name: np.full((1, 48, 80, 3), 90, np.uint8) if a.ndim == 4 else a for name, a in flat.items()}
    np.testing.assert_allclose(policy.act(larger), policy.act(flat), atol=1e-5)


def test_compiling_is_done_once_per_shape(config, checkpoint_of, observation_of) -> None:
    policy = jaxmodels.Policy(checkpoint_of(config))
    sizes = {"wrist": (48, 64), "front": (32, 32)}
    assert not policy.is_compiled()
    policy.compile()
    assert policy.is_compiled()
    assert policy.is_compiled(1, dict(policy.requirements.cameras))
    assert not policy.is_compiled(2)
    assert not policy.is_compiled(1, sizes)
    policy.act({**observation_of(config), "observation.images.wrist": np.zeros((1, 48, 64, 3), np.uint8)})
    assert policy.is_compiled(1, sizes)
    with pytest.raises(ObservationError, match=r"cameras are \['front'\]; the policy has \['front', 'wrist'\]"):
        policy.is_compiled(1, {"front": (32, 32)})
    with pytest.raises(ObservationError, match="batch is 0"):
        policy.compile(0)


def test_compiling_in_one_thread_does_not_block_another(config, checkpoint_of, observation_of) -> None:
    policy = jaxmodels.Policy(checkpoint_of(config))
    policy.compile()
    observation = observation_of(config)
    wanted = policy.act(observation)
    thread = threading.Thread(target=policy.compile, args=(3,))
    thread.start()
    for _ in range(20):
        np.testing.assert_array_equal(policy.act(observation), wanted)
    thread.join()
    assert policy.is_compiled(3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": np.zeros((1, 7), np.float32)}, r"observation.state has shape \(1, 7\); wanted \(batch, 6\)"),
        ({"state": np.zeros(6, np.float32)}, r"add a batch axis"),
        ({"state": np.array([["a"] * 6])}, "wanted .* float32"),
        ({"state": np.ones((1, 6), bool)}, "is bool"),
        ({"state": np.array([[0, 0, np.nan, 0, 0, 0]])}, r"holds nan at \[0, 2\]; wanted finite"),
        ({"state": np.full((1, 6), 1e300)}, r"holds 1e\+300 at \[0, 0\]; wanted finite numbers of float32"),
        ({"state": np.zeros((0, 6), np.float32)}, "an empty batch, wanted 1 or more observations$"),
        ({"state": np.zeros((1, 2, 6), np.float32)}, "3 dimensions, wanted 2$"),
        ({"images.front": np.zeros((1, 32, 32, 4), np.uint8)}, r"width, 3\): 4 channels, wanted 3: RGB; drop the"),
        ({"images.front": np.zeros((1, 32, 32, 1), np.uint8)}, "1 channel, wanted 3: RGB; repeat a gray picture"),
        ({"images.front": np.zeros((1, 32, 32, 2), np.uint8)}, "2 channels, wanted 3: RGB$"),
        ({"images.front": np.zeros((1, 32, 32), np.uint8)}, "no axis of channels, wanted 3: RGB; a gray picture"),
        ({"images.front": np.zeros((3, 32, 32), np.uint8)}, "add a batch axis.*, move the channels to the end"),
        ({"images.front": np.zeros((1, 1, 32, 32, 3), np.uint8)}, "5 dimensions, wanted 4$"),
        ({"images.front": np.zeros((0, 32, 32, 3), np.uint8)}, "an empty batch, wanted 1 or more observations$"),
        ({"images.front": np.zeros((1, 0, 32, 3), np.uint8)}, "a picture without pixels"),
        ({"images.front": np.zeros((1, 32, 32, 3), np.uint16)}, "is uint16; wanted uint8 pixels"),
        ({"images.front": np.zeros((2, 32, 32, 3), np.uint8)}, "different batch sizes: .*front': 2"),
    ],
)
def test_invalid_observation_is_refused_with_the_reason(policy, config, observation_of, changes, words: str) -> None:
    with pytest.raises(ObservationError, match=words):
        policy.act(observation_of(config) | {f"observation.{name}": array for name, array in changes.items()})


def test_missing_features_and_unused_noise_are_refused(policy, config, observation_of) -> None:
    observation = observation_of(config)
    with pytest.raises(ObservationError, match="this policy takes no noise"):
        policy.act(observation, noise=np.zeros((1, 6, 5), np.float32))
    del observation["observation.images.wrist"]
    with pytest.raises(ObservationError, match=r"images.wrist is missing; found \['observation.images.front'"):
        policy.act(observation)


def test_unread_features_and_other_dtypes_of_numbers_are_accepted(policy, config, observation_of) -> None:
    observation = observation_of(config)
    observation["observation.state"] = np.arange(6, dtype=np.int64)[None]
    other = {**observation, "observation.images.top": np.zeros((1, 8, 8, 3), np.uint8), "task": np.array("lift")}
    other["observation.state"] = np.arange(6, dtype=np.float64)[None]
    np.testing.assert_array_equal(policy.act(other), policy.act(observation))


def test_swap_of_weights_does_not_compile(config, checkpoint_of, observation_of, monkeypatch) -> None:
    first, second = checkpoint_of(config, seed=0), checkpoint_of(config, seed=1)
    policy = jaxmodels.Policy(first)
    policy.compile()
    observation = observation_of(config)
    before, wanted = policy.act(observation), jaxmodels.Policy(second).act(observation)

    def refuse(*arguments, **options):
        raise AssertionError("compiled again")

    monkeypatch.setattr(jaxmodels.program.Programs, "_compile", refuse)
    swapped = policy.with_weights(second)
    assert swapped.is_compiled()
    np.testing.assert_array_equal(swapped.act(observation), wanted)
    np.testing.assert_array_equal(policy.act(observation), before)  # The old policy still acts as before.
    other_names = dataclasses.replace(config, optimizer_lr=1e-3, kl_weight=1.0, repo_id="someone/else")
    assert policy.fits(checkpoint_of(other_names))
    with pytest.raises(ConfigError, match="another architecture"):
        policy.with_weights(checkpoint_of(dataclasses.replace(config, n_encoder_layers=1)))


def test_loading_like_a_policy_shares_its_programs(config, checkpoint_of, tmp_path: Path) -> None:
    lerobot_folder.write_checkpoint(tmp_path / "second", checkpoint_of(config, seed=1))
    policy = jaxmodels.Policy(checkpoint_of(config))
    policy.compile()
    assert jaxmodels.load_policy(tmp_path / "second", like=policy).is_compiled()
    stages: list[str] = []
    assert not jaxmodels.load_policy(tmp_path / "second", on_progress=stages.append).is_compiled()
    assert stages == ["reading", "ready"]
    assert not jaxmodels.load_policy(tmp_path / "second", dtype="bfloat16", like=policy).is_compiled()


def test_bfloat16_is_requested_by_name_and_close(config, checkpoint_of, observation_of) -> None:
    checkpoint = checkpoint_of(config)
    exact, half = jaxmodels.Policy(checkpoint), jaxmodels.Policy(checkpoint, dtype="bfloat16")
    observation = observation_of(config)
    wanted, found = exact.act(observation), half.act(observation)
    assert half.dtype == "bfloat16"
    assert found.dtype == np.float32
    assert not np.array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, atol=0.1)
    with pytest.raises(ConfigError, match="dtype is 'int4'; wanted one of float32, bfloat16, int8, fp8, "):
        jaxmodels.Policy(checkpoint, dtype="int4")


@pytest.mark.parametrize("name", ["abacus", "cpu:99", "cpu:x"])
def test_unknown_device_is_refused_with_the_existing_devices(config, checkpoint_of, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device is '{name}'; found {jax.devices()[0].platform}:0"):
        jaxmodels.Policy(checkpoint_of(config), device=name)


@pytest.mark.parametrize("read", [jaxmodels.load_policy, jaxmodels.read_requirements])
def test_path_that_is_neither_folder_nor_repo_is_refused(read, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", "./nothing", "~nobody/x", ""):
        with pytest.raises(HubError, match="neither a folder here nor a repo id"):
            read(path)
    with pytest.raises(ConfigError, match=r"is a folder; a revision \('main'\) belongs to a repo"):
        read(tmp_path, revision="main")


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize(("requested", "kept"), [(None, "robojax/xla"), ("here", "here"), ("off", None)])
def test_environment_selects_the_compile_cache(requested, kept, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROBOJAX_COMPILE_CACHE", raising=False)
    if requested is not None:
        monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", requested if requested == "off" else str(tmp_path / requested))
    assert use_compile_cache() == (None if kept is None else tmp_path / kept)


@pytest.mark.usefixtures("no_programs")
def test_unwritable_cache_costs_only_time(monkeypatch, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level("INFO", "jaxmodels.cache_dirs"):
        assert use_compile_cache() is None
    assert "ROBOJAX_COMPILE_CACHE" in caplog.text


SECOND_START = """
import sys
import jax
import numpy as np
import jaxmodels

# Keep every program: whether a small one takes long enough depends on the machine's load.
update = jax.config.update
jax.config.update = lambda name, value: update(name, 0.0 if name.endswith("min_compile_time_secs") else value)
policy = jaxmodels.load_policy(sys.argv[1])
policy.act({
    "observation.state": np.zeros((1, 6), np.float32), "observation.environment_state": np.zeros((1, 4), np.float32)
})
foreign = {"torch", "lerobot", "sanic", "pydantic"} & set(sys.modules)
assert not foreign, foreign
"""


def test_new_process_needs_no_torch_and_fills_the_cache(small, checkpoint_of, tmp_path: Path, monkeypatch) -> None:
    lerobot_folder.write_checkpoint(tmp_path / "policy", checkpoint_of(small()))
    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", str(tmp_path / "cache"))

    def start() -> set[str]:
        subprocess.run([sys.executable, "-c", SECOND_START, str(tmp_path / "policy")], check=True, timeout=300)
        return {path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith("-atime")}

    first = start()
    assert first
    assert start() == first  # Nothing was compiled again.
