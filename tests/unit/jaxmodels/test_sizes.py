"""What follows from a config alone: exact parameters, bounded memory, and refusals before anything is built."""

import json
import math
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import jaxmodels
from jaxmodels import memory
from jaxmodels.devices import find_placement
from jaxmodels.errors import ConfigError, ObservationError, WeightsMismatch
from jaxmodels.layers.vision import RESNETS
from jaxmodels.memory import MAX_OPERATIONS, QUICK_LAYERS
from jaxmodels.policies import get_policy_type, lerobot_folder, policy_types
from jaxmodels.policies.act import ActConfig
from jaxmodels.policies.config import BACKBONES
from jaxmodels.policies.diffusion2d import Diffusion2dConfig
from jaxmodels.policies.tokens2d import Tokens2dConfig
from jaxmodels.text import TextConfig
from jaxmodels.transformer2d import Transformer2DConfig, Transformer2DModel
from jaxmodels.transformer2d.diffusers_folder import count_parameters
from jaxmodels.types import Feature
from jaxmodels.weights import blueprint

BUILT_ON_PALIGEMMA = ("pi0", "pi05")
GB = 10**9
ACTION = (Feature("action", "ACTION", (5,)),)


def features(cameras: int = 0, side: int = 32, state: int | None = 6, environment: int | None = None) -> dict[str, Any]:
    seen = [Feature(f"observation.images.c{i}", "VISUAL", (3, side, side)) for i in range(cameras)]
    seen += [] if state is None else [Feature("observation.state", "STATE", (state,))]
    seen += [] if environment is None else [Feature("observation.environment_state", "ENV", (environment,))]
    return {"input_features": tuple(seen), "output_features": ACTION}


def parameters_of(config: Any) -> int:
    return sum(math.prod(shape.shape) for shape in lerobot_folder.model_blueprint(config).shapes.values())


count = st.integers(1, 3)
pair = st.sampled_from((1, 2))
looked_at = st.fixed_dictionaries(
    {
        "cameras": st.integers(0, 2),
        "side": st.sampled_from((32, 48)),
        "state": st.none() | st.integers(1, 9),
        "environment": st.none() | st.integers(1, 9),
    }
)
acts = st.fixed_dictionaries(
    {
        "vision_backbone": st.sampled_from(BACKBONES),
        "dim_model": st.sampled_from((8, 16)),
        "n_heads": st.sampled_from((1, 2)),
        "dim_feedforward": st.sampled_from((6, 24)),
        "feedforward_activation": st.sampled_from(("relu", "gelu", "glu")),
        "n_encoder_layers": count,
        "n_decoder_layers": count,
        "n_vae_encoder_layers": count,
        "latent_dim": st.integers(1, 5),
        "use_vae": st.booleans(),
        "pre_norm": st.booleans(),
        "chunk_size": st.integers(3, 9),
    }
)
texts = st.none() | st.fixed_dictionaries(
    {"length": st.integers(2, 9), "width": st.sampled_from((4, 8)), "n_layers": count, "n_heads": pair, "hidden": count}
)
chunks = st.fixed_dictionaries(
    {
        "vision_backbone": st.sampled_from(("small_cnn", "resnet18")),
        "dim_model": st.sampled_from((16, 32)),
        "n_heads": st.sampled_from((2, 4)),
        "n_layers": count,
        "n_encoder_layers": st.integers(0, 2),
        "chunk_size": st.integers(2, 9),
        "text_encoder": texts,
    }
)
exactly = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.generate],
)


def config_of(kind: type[Any], seen: dict[str, Any], fields: dict[str, Any]) -> Any:
    if text := fields.get("text_encoder"):
        fields = {**fields, "text_encoder": TextConfig(**text)}
    try:
        return kind(**features(**seen), **fields, n_action_steps=1)
    except ConfigError:
        assume(False)


@exactly
@given(looked_at, acts)
def test_the_parameters_of_an_act_are_counted_exactly(seen: dict[str, Any], fields: dict[str, Any]) -> None:
    config = config_of(ActConfig, seen, fields)
    assert get_policy_type("act").sizes(config).parameters == parameters_of(config)


@exactly
@given(looked_at, chunks, st.sampled_from((Diffusion2dConfig, Tokens2dConfig)))
def test_the_parameters_of_a_policy_on_the_2d_transformer_are_counted_exactly(
    seen: dict[str, Any], fields: dict[str, Any], kind: type[Any]
) -> None:
    config = config_of(kind, seen, fields)
    assert get_policy_type(kind.type).sizes(config).parameters == parameters_of(config)


@pytest.mark.parametrize("name", sorted(RESNETS))
@pytest.mark.parametrize("dilate", [False, True])
def test_the_parameters_of_every_backbone_are_counted_exactly(name: str, dilate: bool) -> None:
    if dilate and not RESNETS[name][0]:
        pytest.skip("has no bottlenecks that could be dilated")
    config = ActConfig(
        **features(1), vision_backbone=name, replace_final_stride_with_dilation=dilate, dim_model=16, n_encoder_layers=1
    )
    assert get_policy_type("act").sizes(config).parameters == parameters_of(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"in_channels": 8, "norm_num_groups": 4},
        {"in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 12, "attention_type": "gated"},
        {"num_vector_embeds": 9, "sample_size": 4, "num_embeds_ada_norm": 7, "double_self_attention": True},
        {"in_channels": 4, "patch_size": 2, "sample_size": 8, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 9},
        {"in_channels": 4, "patch_size": 2, "sample_size": 8, "norm_type": "ada_norm_single", "caption_channels": 6}
        | {"cross_attention_dim": 16, "activation_fn": "geglu", "norm_elementwise_affine": False},
    ],
)
def test_the_parameters_of_a_2d_transformer_are_counted_exactly(changes: dict[str, Any]) -> None:
    config = Transformer2DConfig(num_attention_heads=2, attention_head_dim=8, num_layers=3, **changes)
    shapes = blueprint(lambda rngs: Transformer2DModel(**config.to_json(), rngs=rngs)).shapes
    assert count_parameters(config) == sum(math.prod(shape.shape) for shape in shapes.values())


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
def test_the_estimate_of_memory_is_near_what_the_compiler_says(config: Any) -> None:
    from jaxmodels.normalization import Affine
    from jaxmodels.program import Inputs, Programs, Scales

    def plain(feature: Feature | None) -> Affine | None:
        if feature is None:
            return None
        zeros = np.zeros(feature.shape[0], np.float32)
        return Affine(zeros, zeros + 1, zeros)

    kind, place = get_policy_type(config.type), find_placement("cpu")
    weights = {name: np.zeros(x.shape, np.float32) for name, x in lerobot_folder.model_blueprint(config).shapes.items()}
    serving = kind.prepare(config, weights, "cpu")
    shapes = {name: jax.ShapeDtypeStruct(np.shape(x), jnp.float32) for name, x in sorted(serving.items())}
    parts: tuple[Any, ...] = (config.state, config.environment_state, config.action)
    images: Any = tuple(map(plain, config.cameras))
    vectors: Any = tuple(map(plain, parts))
    scales = Scales(images, *vectors)
    frames = tuple(camera.shape[1:] for camera in config.cameras)
    state, environment = (None if x is None else x.shape[0] for x in (config.state, config.environment_state))
    prefix = (config.chunk_size, config.action.shape[0]) if kind.takes_prefix else None
    act = partial(kind.act, kind.architecture(config))
    programs = Programs(act, shapes, scales, frames, jnp.float32, place)
    analysis: Any = programs.get_program(Inputs(1, frames, state, environment, prefix)).memory_analysis()
    sizes = kind.sizes(config)
    assert 0.8 <= 4 * sizes.activations / analysis.temp_size_in_bytes <= 3
    assert 0.9 <= sizes.serving / sum(np.size(array) for array in serving.values()) <= 2


@pytest.fixture
def folder(small_of: Any, checkpoint_for: Any, tmp_path: Path) -> Path:
    lerobot_folder.write_checkpoint(tmp_path / "policy", checkpoint_for(small_of(cameras=("front",))))
    return tmp_path / "policy"


@pytest.fixture
def nothing_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million layers would be built for a quarter of an hour: whoever begins to fails here."""
    assert folder.is_dir()  # written before

    def build(*_: Any) -> None:
        raise AssertionError("the module was built")

    monkeypatch.setattr(lerobot_folder, "model_blueprint", build)
    monkeypatch.setattr(lerobot_folder, "_read_tensors", build)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    return lambda size: monkeypatch.setattr(memory, "get_free_host_memory", lambda: size)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def images(side: int, count: int = 1) -> dict[str, Any]:
    camera = {"type": "VISUAL", "shape": [3, side, side]}
    return {"observation.state": {"type": "STATE", "shape": [6]}} | {
        f"observation.images.{name}": camera for name in ("front", *map(str, range(1, count)))
    }


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(
    "changes",
    [
        {"n_encoder_layers": 1_000_000},
        {"input_features": images(100_000)},
        {"chunk_size": 10**9},
        {"dim_model": 2**40},
        {"n_heads": 10**9, "dim_model": 10**9},
    ],
)
def test_a_config_that_asks_for_anything_is_refused_before_it_is_built(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, **changes)
    for read in (jaxmodels.read_requirements, lerobot_folder.read_checkpoint, jaxmodels.load_policy):
        with pytest.raises(ConfigError, match="wanted"):
            read(folder)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(
    "changes",
    [
        {"n_encoder_layers": 64, "n_decoder_layers": 64, "n_vae_encoder_layers": 64},  # five seconds of building
        {"dim_model": 65_536, "dim_feedforward": 262_144},
        {"use_vae": True, "chunk_size": 10_000, "dim_model": 65_536},  # a table of positions of 5 GB
    ],
)
def test_weights_of_another_config_are_seen_by_their_number(folder: Path, changes: dict[str, Any]) -> None:
    found = get_policy_type("act").sizes(lerobot_folder.read_policy_description(folder).config).parameters
    edit(folder, **changes)
    wanted = get_policy_type("act").sizes(lerobot_folder.read_policy_description(folder).config).parameters
    with pytest.raises(WeightsMismatch, match=rf"{found} parameters in \d+ tensors; the config asks for {wanted} in"):
        lerobot_folder.read_checkpoint(folder)


def test_weights_that_nearly_fit_are_compared_by_name(folder: Path) -> None:
    edit(folder, n_encoder_layers=3)
    with pytest.raises(WeightsMismatch, match=r"missing: model\.encoder\.layers\.2\.linear1\.weight"):
        lerobot_folder.read_checkpoint(folder)


def test_what_is_built_before_names_are_compared_is_bounded() -> None:
    sizes = get_policy_type("act").sizes(ActConfig(**features(1), n_encoder_layers=QUICK_LAYERS))
    with pytest.raises(WeightsMismatch):
        sizes.check_file(sizes.parameters - 1, 10, "weights")
    sizes.check_file(sizes.parameters, 10, "weights")


@pytest.mark.usefixtures("nothing_is_built")
def test_what_no_device_computes_is_refused_when_it_is_asked_what_it_needs(folder: Path) -> None:
    edit(folder, input_features=images(4096, 2), dim_model=65_536, dim_feedforward=262_144, n_encoder_layers=64)
    for read in (jaxmodels.read_requirements, lerobot_folder.read_checkpoint):
        with pytest.raises(ConfigError, match=r"takes about \de\+\d\d operations .*wanted 1e\+15 at most"):
            read(folder)


@pytest.mark.parametrize("kind", policy_types())
def test_the_largest_policies_there_are_stay_below_every_bound(kind: str) -> None:
    values: dict[str, Any] = {"n_action_steps": 100}
    if kind == "diffusion":
        values |= {"horizon": 128, "resize_shape": [480, 640], "num_inference_steps": 100}
    elif kind in BUILT_ON_PALIGEMMA:
        values |= {"chunk_size": 100, "image_resolution": [448, 448], "max_state_dim": 64, "max_action_dim": 64}
    elif kind == "smolvla":
        values |= {"chunk_size": 100, "max_state_dim": 64, "max_action_dim": 64, "num_vlm_layers": 32}
    else:
        values |= {"chunk_size": 100, "dim_model": 1024}
    if kind not in {*BUILT_ON_PALIGEMMA, "smolvla"}:
        values |= {"vision_backbone": "resnet152", "pretrained_backbone_weights": None}
    seen = [
        {f"observation.images.{i}": {"type": "VISUAL", "shape": [3, 1080, 1920]} for i in range(4)}
        | {"observation.state": {"type": "STATE", "shape": [64]}},
        {"action": {"type": "ACTION", "shape": [64]}},
    ]
    config = get_policy_type(kind).config(
        {
            "type": kind,
            **values,
            "input_features": seen[0],
            "output_features": seen[1],
        }
    )
    sizes = get_policy_type(kind).sizes(config)
    sizes.check()
    assert sizes.operations < MAX_OPERATIONS / 5


@pytest.mark.usefixtures("nothing_is_built")
def test_a_policy_that_does_not_fit_into_memory_is_refused_with_figures(folder: Path, free: Any) -> None:
    edit(folder, input_features=images(4096))
    free(GB // 2)
    with pytest.raises(ConfigError, match=r"needs about 1\.\d GB of memory \(weights .*\); 500 MB are free") as told:
        jaxmodels.load_policy(folder)
    assert "activations" in str(told.value)
    assert "16777216 pixels" in str(told.value)


def test_a_small_policy_is_loaded_whatever_is_said_of_memory(folder: Path, free: Any) -> None:
    for size in (0, None):
        free(size)
        assert jaxmodels.load_policy(folder).needs.device > 0


def test_frames_are_looked_at_before_a_program_is_made_for_them(folder: Path, free: Any) -> None:
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
    """A machine with 8 GB free, and this process in a group of it."""
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


def test_free_memory_is_that_of_the_tightest_limit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_machine_that_says_nothing_has_no_limit(machine: Path) -> None:
    shutil.rmtree(machine / "proc")
    assert memory.get_free_host_memory() is None


def test_a_device_is_asked_what_it_has(folder: Path, free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        platform, id = "gpu", 0

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": GB, "bytes_in_use": 900_000_000}

    from jaxmodels.devices import Placement

    place = Placement((Device(),))
    assert memory.get_free_device_memory(place) == 100_000_000
    free(64 * GB)
    sizes = get_policy_type("act").sizes(ActConfig(**features(1, 480)), platform="gpu")
    with pytest.raises(ConfigError, match=r"needs about \d+ MB of memory .*; 100 MB are free on gpu:0"):
        memory.check_loading(sizes, place)
    free(GB // 10)
    with pytest.raises(ConfigError, match=r"before they are sent.*100 MB are free on the machine"):
        memory.check_loading(sizes, place)


def test_what_is_not_folded_is_loaded_where_it_fits_once(free: Any) -> None:
    seen = features(2, 480)
    inputs = {entry.name: {"type": entry.type, "shape": entry.shape} for entry in seen["input_features"]}
    outputs = {"action": {"type": "ACTION", "shape": [6]}}
    kind = get_policy_type("pi05")
    sizes = kind.sizes(kind.config({"type": "pi05", "input_features": inputs, "output_features": outputs}))
    assert memory.estimate_needs(sizes).host == pytest.approx(1.2 * 4 * 3_353_431_824, abs=4)
    free(20 * GB)
    memory.check_loading(sizes, find_placement("cpu"))
    with pytest.raises(ConfigError, match=r"needs about 22\.9 GB of memory"):  # the program has weights of its own
        memory.check_loading(sizes, find_placement("cpu"), 2)
