"""Trained backbones from files, folders and the Hub (tests/golden/torchvision_resnet/README.md)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmodels.checkpoints.backbones import read_backbone, replace_backbone
from jaxmodels.errors import CheckpointError, ConfigError, HubError, WeightsMismatch
from jaxmodels.layers.vision import ResNet
from jaxmodels.policies.act.model import Act
from jaxmodels.weights import blueprint
from tests.testing.models import seeded_weights
from tests.testing.stub_hub import StubHub

GOLDEN = Path(__file__).parents[2] / "golden" / "torchvision_resnet"
KEYS = json.loads((GOLDEN / "keys.json").read_text())
TIMM = {"architecture": "resnet18", "pretrained_cfg": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}
COUNTER = ".num_batches_tracked"
Tensors = dict[str, np.ndarray]


def tensors_of(name: str) -> Tensors:
    keys = {key: {"shape": shape} for key, shape in KEYS[name].items() if not key.endswith(COUNTER)}
    counters = {key: np.zeros((), np.int64) for key in KEYS[name] if key.endswith(COUNTER)}
    return seeded_weights({"seed": KEYS["seed"], "fixed": (), "keys": keys}) | counters


@pytest.fixture(scope="module")
def resnet18() -> Tensors:
    """Return a ResNet-18 as in torchvision's state dict, with its classifier and batch norm counters."""
    return tensors_of("resnet18")


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[Mapping[str, np.ndarray]], Path]:
    def write(tensors: Mapping[str, np.ndarray]) -> Path:
        save_file(dict(tensors), tmp_path / "resnet18.safetensors")
        return tmp_path / "resnet18.safetensors"

    return write


@pytest.fixture
def timm_folder(resnet18: Tensors, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a folder like timm's repos."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "timm"
        folder.mkdir()
        save_file(resnet18, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**TIMM, **changes}))
        return folder

    return make


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_features_equal_torchvision(name: str, tmp_path: Path) -> None:
    save_file(tensors_of(name), tmp_path / "weights.safetensors")
    plan = blueprint(lambda rngs: ResNet(name, rngs=rngs))
    weights = jax.device_put(dict(read_backbone(tmp_path, name).weights))
    with np.load(GOLDEN / "features.npz") as golden:
        image, wanted = golden["image"], golden[name]
    options = {"xla_backend_optimization_level": 0}
    look = jax.jit(lambda weights, image: plan.assemble(weights)(image), compiler_options=options)
    found = np.asarray(look(weights, image))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_normalisation_is_read_only_from_a_folder_of_timm(resnet18: Tensors, file_of, timm_folder) -> None:
    found = read_backbone(file_of(resnet18), "resnet18")
    assert (found.architecture, found.mean, found.std) == ("resnet18", None, None)
    assert len(found.weights) == len([key for key in resnet18 if not key.startswith("fc.") and COUNTER not in key])
    found = read_backbone(str(timm_folder()), "resnet18")
    assert found.mean == (0.485, 0.456, 0.406)
    assert found.std == (0.229, 0.224, 0.225)


def test_half_precision_is_read_as_float32(resnet18: Tensors, file_of) -> None:
    floats = {name: array for name, array in resnet18.items() if not name.endswith(COUNTER)}
    found = read_backbone(file_of({name: array.astype(np.float16) for name, array in floats.items()}), "resnet18")
    assert {array.dtype for array in found.weights.values()} == {np.dtype(np.float32)}
    stem = np.asarray(floats["conv1.weight"].astype(np.float16), np.float32).transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(found.weights["stem.kernel"], stem)


def test_other_architecture_or_a_nan_is_refused(resnet18: Tensors, file_of, timm_folder) -> None:
    broken = {**resnet18, "bn1.bias": np.full(64, np.nan, np.float32)}
    with pytest.raises(CheckpointError, match=r"a NaN or an infinity in stem_norm\.bias"):
        read_backbone(file_of(broken), "resnet18")
    with pytest.raises(WeightsMismatch, match="of a resnet34"):
        read_backbone(file_of(resnet18), "resnet34")
    with pytest.raises(CheckpointError, match="says 'resnet18d', but vision_backbone is 'resnet18'"):
        read_backbone(timm_folder(architecture="resnet18d"), "resnet18")


@pytest.mark.parametrize("wrong", [{"mean": [0.5, 0.5]}, {"std": [0.2, 0.2, 0]}, {"mean": ["0", "0", "0"]}])
def test_invalid_normalisation_is_refused(timm_folder, wrong: dict[str, Any]) -> None:
    folder = timm_folder(pretrained_cfg={**TIMM["pretrained_cfg"], **wrong})
    with pytest.raises(CheckpointError, match=r"config\.json: mean and std are .* wanted three numbers each"):
        read_backbone(folder, "resnet18")


def test_weight_names_of_torchvision_are_explained() -> None:
    with pytest.raises(ConfigError) as raised:
        read_backbone("ResNet18_Weights.IMAGENET1K_V1", "resnet18")
    for part in ("timm/resnet18.tv_in1k", "safetensors.torch.save_file", "torchvision.models.resnet18"):
        assert part in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        read_backbone("ResNet50_Weights.DEFAULT", "resnet50")
    assert "timm" not in str(raised.value), "DEFAULT is not a repo of timm"


def test_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "resnet18.pth").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"never opened; where torch is: .*'resnet18\.safetensors'"):
        read_backbone(tmp_path / "resnet18.pth", "resnet18")
    with pytest.raises(CheckpointError, match=r"no safetensors file; .*resnet18\.pth can run code"):
        read_backbone(tmp_path, "resnet18")


def test_missing_file_is_not_taken_for_a_repo(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_backbone("weights/resnet18.safetensors", "resnet18")
    with pytest.raises(HubError, match="neither a folder here nor a repo id"):
        read_backbone(tmp_path / "missing", "resnet18")
    with pytest.raises(ConfigError, match="vision_backbone 'small_cnn' has no weights to start from"):
        read_backbone("timm/resnet18.a1_in1k", "small_cnn")


def test_backbone_is_fetched_from_the_hub(timm_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in timm_folder().iterdir()}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with StubHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.push("timm/resnet18.tv_in1k", {**files, "pytorch_model.bin": b"cos\nsystem\n"})
        raised: list[str] = []
        found = read_backbone("timm/resnet18.tv_in1k", "resnet18", on_progress=raised.append)
        assert not [request for request in hub.requests if "pytorch_model" in request.path]
    assert found.mean == (0.485, 0.456, 0.406)
    assert raised


def test_backbone_replaces_the_backbone_of_a_policy(resnet18: Tensors, file_of, small) -> None:
    found = read_backbone(file_of(resnet18), "resnet18")
    shapes = blueprint(lambda rngs: Act(small(cameras=("front",), vision_backbone="resnet18"), rngs=rngs)).shapes
    drawn = {name: np.zeros(shape.shape, np.float32) for name, shape in shapes.items()}
    filled = replace_backbone(found, drawn)
    assert list(filled) == list(drawn)
    for name, array in filled.items():
        wanted = found.weights[name.removeprefix("backbone.")] if name.startswith("backbone.") else drawn[name]
        assert array is wanted
    of_cameras = {f"encoders.{camera}.{name}": array for camera in range(2) for name, array in drawn.items()}
    both, parts = replace_backbone(found, of_cameras), [name for name in filled if "backbone" in name]
    assert all(both[f"encoders.{camera}.{name}"] is filled[name] for camera in range(2) for name in parts)
    with pytest.raises(WeightsMismatch, match="0 ResNets called backbone"):
        replace_backbone(found, {name: array for name, array in drawn.items() if not name.startswith("backbone.")})
    with pytest.raises(WeightsMismatch, match="missing"):
        replace_backbone(found, {**drawn, "backbone.stages.4.0.skip.kernel": np.zeros((1, 1, 1, 1))})
