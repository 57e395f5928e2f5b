"""Memory and operations of policies, and refusals before building, reading or compiling."""

import resource
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmodels
from jaxmodels import memory
from jaxmodels.devices import Placement, find_placement
from jaxmodels.errors import ConfigError, ObservationError, WeightsMismatch
from jaxmodels.memory import count_layers, measure_program
from jaxmodels.normalization import Affine
from jaxmodels.policies import CONSTANTS, get_policy_type, lerobot_folder, policy_types
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.diffusion2d.policy import Diffusion2dConfig
from jaxmodels.policies.tokens2d.policy import Tokens2dConfig
from jaxmodels.program import Inputs, Programs, Scales
from jaxmodels.types import Feature
from tests.testing.models import edit_json
from tests.unit.jaxmodels.test_ranges import CONFIGS, VALUES

GB = 10**9
ACTION = (Feature("action", "ACTION", (5,)),)


def features(cameras: int = 0, side: int = 32, state: int | None = 6, environment: int | None = None) -> dict[str, Any]:
    seen = [Feature(f"observation.images.c{i}", "VISUAL", (3, side, side)) for i in range(cameras)]
    seen += [] if state is None else [Feature("observation.state", "STATE", (state,))]
    seen += [] if environment is None else [Feature("observation.environment_state", "ENV", (environment,))]
    return {"input_features": tuple(seen), "output_features": ACTION}


def programs_of(config: Any, platform: str = "cpu", dtype: Any = jnp.float32) -> Programs:
    """Return the programs of a policy, with shapes in the place of weights."""

    def plain(feature: Feature | None) -> Affine | None:
        if feature is None:
            return None
        zeros = np.zeros(feature.shape[0], np.float32)
        return Affine(zeros, zeros + 1, zeros)

    kind = get_policy_type(config.type)
    prepare = partial(kind.prepare, config, platform=platform)
    serving: dict[str, Any] = jax.eval_shape(prepare, dict(lerobot_folder.model_blueprint(config).shapes))
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.float32 if name.startswith(CONSTANTS) else dtype)
        for name, x in sorted(serving.items())
    }
    parts: tuple[Any, ...] = (config.state, config.environment_state, config.action)
    images: Any = tuple(map(plain, config.cameras))
    vectors: Any = tuple(map(plain, parts))
    stages = [replace(stage, run=partial(stage.run, config.architecture())) for stage in kind.stages]
    sizes = (None,) * len(config.frames) if config.resizes_frames else config.frames
    fit = kind.fit and partial(kind.fit, config.architecture())
    return Programs(stages, shapes, Scales(images, *vectors), sizes, dtype, find_placement("cpu"), fit)


def inputs_of(config: Any, batch: int = 1, *, continues: bool = True) -> Inputs:
    state, environment = (None if x is None else x.shape[0] for x in (config.state, config.environment_state))
    takes_prefix = get_policy_type(config.type).takes_prefix and continues
    prefix = (config.chunk_size, config.action.shape[0]) if takes_prefix else None
    language = None if config.prompt_length is None else (config.prompt_length,)
    return Inputs(batch, config.frames, state, environment, prefix, language)


def test_operations_of_products_and_loops_are_counted() -> None:
    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        repeated = jax.lax.fori_loop(0, 10, lambda _, y: y @ x, x)
        image = jax.lax.conv(repeated[None, None], kernel, (1, 1), "SAME")
        return jax.lax.platform_dependent(image, cpu=lambda y: y, default=lambda y: (y[0, 0] @ x)[None, None])

    jaxpr = jax.make_jaxpr(run)(jnp.zeros((8, 8)), jnp.zeros((1, 1, 3, 3)))
    products, convolution = 10 * 2 * 8**3, 2 * 64 * 9
    assert measure_program(jaxpr, "cpu").operations == products + convolution
    assert measure_program(jaxpr, "gpu").operations == products + convolution + 2 * 8**3


def test_traffic_is_what_programs_read_at_least() -> None:
    def run(table: jax.Array, rows: jax.Array, weight: jax.Array, ignored: jax.Array) -> jax.Array:
        del ignored
        kept = jnp.sin(table[rows])  # (4, 8), which each of ten steps reads again.

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight) + kept, None

        x, _ = jax.lax.scan(step, kept, None, length=10)
        _, x = jax.lax.while_loop(lambda pair: pair[0] < 2, lambda pair: (pair[0] + 1, pair[1] @ weight), (0, x))
        return x

    arguments = jnp.zeros((1000, 8)), jnp.arange(4), jnp.zeros((8, 8)), jnp.zeros(99)
    jaxpr = jax.make_jaxpr(run)(*arguments)
    row, weight, indices = 4 * 4 * 8, 4 * 8 * 8, 4 * 4
    assert measure_program(jaxpr).traffic == row + indices + 10 * weight + 10 * row


def test_memory_is_the_size_of_values_that_are_live_together() -> None:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = jnp.sin(x)
        return x

    def together(x: jax.Array) -> jax.Array:
        return jnp.stack([jnp.sin(x + i) for i in range(20)])

    x = jnp.zeros(1000)
    assert measure_program(jax.make_jaxpr(chain)(x)).activations == memory.MARGIN * 2 * 4000
    assert measure_program(jax.make_jaxpr(together)(x)).activations >= memory.MARGIN * 20 * 4000


CALIBRATED = {
    "act, two small cameras": ActConfig(
        **features(2, 96), vision_backbone="small_cnn", dim_model=128, n_heads=4, dim_feedforward=256, chunk_size=20,
        n_action_steps=5,
    ),
    "act, no camera, a long chunk": ActConfig(
        **features(environment=8), dim_model=128, dim_feedforward=512, chunk_size=1000, n_action_steps=5
    ),
    "diffusion2d": Diffusion2dConfig(**features(1, 96)),
    "tokens2d, a long chunk": Tokens2dConfig(**features(1, 96), chunk_size=200),
}  # fmt: skip


@pytest.mark.fully_compiled
@pytest.mark.parametrize("config", CALIBRATED.values(), ids=CALIBRATED)
def test_memory_estimate_is_near_the_compilers(config: Any) -> None:
    programs, inputs = programs_of(config), inputs_of(config)
    program = programs.get_program(inputs)
    analysis: Any = program.stages[-1].compiled.memory_analysis()
    assert 0.8 <= programs.measure(inputs).activations / analysis.temp_size_in_bytes <= 3


@pytest.mark.parametrize("config", CALIBRATED.values(), ids=CALIBRATED)
def test_serving_weights_are_bounded_before_they_are_prepared(config: Any) -> None:
    parameters = lerobot_folder.model_blueprint(config).count_parameters()
    assert 0.9 <= (parameters + config.table_numbers) / programs_of(config).count_weights() <= 2.2


@pytest.fixture
def folder(small: Any, checkpoint_of: Any, tmp_path: Path) -> Path:
    lerobot_folder.write_checkpoint(tmp_path / "policy", checkpoint_of(small(cameras=("front",))))
    return tmp_path / "policy"


@pytest.fixture
def nothing_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a module is built, because a million layers would take a quarter of an hour."""
    assert folder.is_dir()

    def build(*_: Any) -> None:
        raise AssertionError("the module was built")

    monkeypatch.setattr(lerobot_folder, "model_blueprint", build)
    monkeypatch.setattr(lerobot_folder, "read_tensors", build)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    return lambda size: monkeypatch.setattr(memory, "get_free_host_memory", lambda: size)


def images(side: int, count: int = 1) -> dict[str, Any]:
    camera = {"type": "VISUAL", "shape": [3, side, side]}
    return {"observation.state": {"type": "STATE", "shape": [6]}} | {
        f"observation.images.{name}": camera for name in ("front", *map(str, range(1, count)))
    }


TABLES = r"tables of positions with \de\+\d\d numbers; wanted 5e\+08 at most"


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_encoder_layers": 1_000_000}, "wanted"),
        ({"input_features": images(100_000)}, "wanted"),
        ({"chunk_size": 10**9}, "wanted"),
        ({"dim_model": 2**40}, "wanted"),
        ({"n_heads": 10**9, "dim_model": 10**9}, "wanted"),
        ({"use_vae": True, "chunk_size": 10_000, "dim_model": 65_536}, TABLES),
        ({"input_features": images(4096, 2), "dim_model": 65_536, "dim_feedforward": 262_144}, TABLES),
    ],
)
def test_oversized_config_is_refused_before_building(folder: Path, changes, words: str) -> None:
    edit_json(folder / "config.json", **changes)
    for read in (jaxmodels.read_requirements, lerobot_folder.read_checkpoint, jaxmodels.load_policy):
        with pytest.raises(ConfigError, match=words):
            read(folder)


@pytest.mark.usefixtures("nothing_is_built")
def test_weights_of_another_config_are_detected_by_their_number(folder: Path) -> None:
    edit_json(folder / "config.json", n_encoder_layers=64, n_decoder_layers=64, n_vae_encoder_layers=64)
    with pytest.raises(WeightsMismatch, match=r"\d+ tensors; the config has 192 layers, which have 768 or more"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize("changes", [{"dim_model": 65_536, "dim_feedforward": 262_144}, {"n_encoder_layers": 3}])
def test_mismatching_weights_are_named_before_the_memory_check(folder: Path, changes: Any, free: Any) -> None:
    edit_json(folder / "config.json", **changes)
    free(GB)
    with pytest.raises(WeightsMismatch, match=r"model\.encoder\.layers\.[02]\.linear1\.weight"):
        jaxmodels.load_policy(folder)


@pytest.mark.parametrize("kind", policy_types())
def test_layers_are_counted_over_all_parts_of_a_config(kind: str) -> None:
    config = get_policy_type(kind).config({"type": kind, **VALUES})
    assert count_layers(config) == {"act": 9, "smolvla": 61, "pi0": 63, "pi05": 63}.get(kind, 0)


def test_too_many_operations_are_refused_before_compiling(folder: Path, monkeypatch: Any) -> None:
    policy = jaxmodels.load_policy(folder)
    monkeypatch.setattr(memory, "MAX_OPERATIONS", 10**5)
    with pytest.raises(ObservationError, match=r"a batch of 1 .* take about \de\+\d\d operations; wanted 1e\+05"):
        policy.compile()
    assert not policy.is_compiled()


# Values of the largest known policies; a type takes the values of its own fields.
LARGEST: dict[str, Any] = {
    "chunk_size": 100,
    "n_action_steps": 100,
    "horizon": 128,
    "num_inference_steps": 100,
    "dim_model": 1024,
    "vision_backbone": "resnet152",
    "pretrained_backbone_weights": None,
    "resize_shape": [480, 640],
    "image_resolution": [448, 448],
    "max_state_dim": 64,
    "max_action_dim": 64,
    "num_vlm_layers": 32,
}


@pytest.mark.parametrize("kind", policy_types())
def test_largest_known_policies_are_within_all_bounds(kind: str) -> None:
    values = {entry.name: LARGEST[entry.name] for entry in fields(CONFIGS[kind]) if entry.name in LARGEST}
    values["input_features"] = {
        f"observation.images.{i}": {"type": "VISUAL", "shape": [3, 1080, 1920]} for i in range(4)
    }
    values["input_features"]["observation.state"] = {"type": "STATE", "shape": [64]}
    values["output_features"] = {"action": {"type": "ACTION", "shape": [64]}}
    config = get_policy_type(kind).config({"type": kind, **values})
    assert config.table_numbers < memory.MAX_TABLE_NUMBERS / 2


def test_policy_that_exceeds_memory_is_refused_with_figures(folder: Path, free: Any) -> None:
    edit_json(folder / "config.json", input_features=images(4096))
    free(GB // 2)
    policy = jaxmodels.load_policy(folder)
    with pytest.raises(ObservationError, match=r"frames of 4096x4096 need about \d\.\d GB of memory; 500 MB are free"):
        policy.compile()
    assert not policy.is_compiled()


def test_frames_are_checked_before_compiling(folder: Path, free: Any) -> None:
    for size in (0, None):  # A small policy is loaded in any case.
        free(size)
        policy = jaxmodels.load_policy(folder)
    free(GB)
    for ask in (policy.compile, policy.profile):
        with pytest.raises(ObservationError, match=r"a batch of 4 with frames of 8000x8000 need about \d\.\d GB"):
            ask(4, {"front": (8000, 8000)})
    assert not policy.is_compiled(4, {"front": (8000, 8000)})


@pytest.mark.parametrize("size", [(10**9, 10**9), (0, 32), (32, -1), (True, 32)])
def test_frames_have_a_range(folder: Path, size: Any) -> None:
    policy = jaxmodels.load_policy(folder)
    with pytest.raises(ObservationError, match=r"frames of front are .*wanted sides of 16384 pixels at most"):
        policy.compile(1, {"front": size})
    with pytest.raises(ObservationError, match="batch is "):
        policy.compile(10**9)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine with 8 GB free and this process in a control group."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "robots" / "server").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable:    7812500 kB\n")
    (proc / "self" / "cgroup").write_text("0::/robots/server\n")
    (proc / "self" / "status").write_text("VmSize:\t 1000000 kB\nVmData:\t 500000 kB\n")
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_GROUPS", groups)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
    return tmp_path


def test_free_memory_follows_the_tightest_limit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.get_free_host_memory() == 8 * GB
    group = machine / "cgroup" / "robots"
    (group / "memory.max").write_text(f"{6 * GB}\n")
    (group / "memory.current").write_text(f"{5 * GB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GB}\n")
    assert memory.get_free_host_memory() == 3 * GB
    (group / "server" / "memory.max").write_text("max\n")
    assert memory.get_free_host_memory() == 3 * GB
    monkeypatch.setattr(memory.resource, "getrlimit", lambda limit: (2 * GB, 2 * GB))
    assert memory.get_free_host_memory() == 2 * GB - 1_024_000_000
    (group / "memory.current").write_text(f"{9 * GB}\n")
    assert memory.get_free_host_memory() == 0
    # A machine without these files has no limit.
    shutil.rmtree(machine / "proc")
    assert memory.get_free_host_memory() is None


def test_free_memory_of_the_device_is_used(free: Any) -> None:
    class Device:
        platform, id = "gpu", 0

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": GB, "bytes_in_use": 900_000_000}

    place = Placement((Device(),))
    assert memory.get_free_device_memory(place) == 100_000_000
    free(64 * GB)
    needs = memory.Needs(400_000_000, 200_000_000)
    with pytest.raises(ConfigError, match=r"needs about 200 MB of memory .*; 100 MB are free on gpu:0"):
        memory.check_loading(needs, place, shares_memory=False)
    free(GB // 10)
    with pytest.raises(ConfigError, match=r"before they are sent.*100 MB are free on the machine"):
        memory.check_loading(needs, place, shares_memory=False)


def test_unchanged_weights_need_memory_only_once(free: Any) -> None:
    config = get_policy_type("pi05").config({"type": "pi05", **VALUES})
    parameters = lerobot_folder.model_blueprint(config).count_parameters()
    needs = memory.estimate_needs(parameters, parameters, 4, True)
    assert needs.host == pytest.approx(1.2 * 4 * 3_353_431_824, abs=4)
    free(20 * GB)
    memory.check_loading(needs, find_placement("cpu"), shares_memory=True)
    needs = memory.estimate_needs(parameters, parameters, 2, True)
    with pytest.raises(ConfigError, match=r"needs about 22\.8 GB of memory"):  # The program copies the weights.
        memory.check_loading(needs, find_placement("cpu"), shares_memory=False)
