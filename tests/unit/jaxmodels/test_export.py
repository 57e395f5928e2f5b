"""Bundles: the same chunks from weights as served, verified files, and executables only of trusted bundles."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.interpreters.mlir import make_ir_context
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxlib.mlir.dialects import stablehlo
from safetensors.numpy import load_file

import jaxmodels
from jaxmodels.checkpoints import bundle as bundles
from jaxmodels.checkpoints.files import find_policy_weights, write_policy_weights
from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.export import export_policy
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.integrity import verify_files
from jaxmodels.training.initial_policy import trained_policy
from tests.testing.models import edit_json

PI05 = "pi05_two_cameras"
KEPT_FROM = "jax_persistent_cache_min_compile_time_secs"
pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the test an empty user cache and an empty compile cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(bundles.VARIABLE, raising=False)
    (tmp_path / "compiled").mkdir()
    options = {"jax_compilation_cache_dir": str(tmp_path / "compiled")}
    # Small programs that compile while a policy loads are never kept, also where this takes long.
    options |= {KEPT_FROM: 1000.0}
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def source(small: Any, checkpoint_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "source"
    lerobot_folder.write_checkpoint(folder, checkpoint_of(small(cameras=("front",)), rate=25.0))
    return folder


@pytest.fixture(scope="module")
def exported_once(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a bundle, and with the user cache that trusts it."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        export_policy(source, folder / "bundle", "cpu")
    return folder


@pytest.fixture
def exported(exported_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported_once, tmp_path, dirs_exist_ok=True) / "bundle"


def list_executables(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "compiled").glob("*-cache")}


@pytest.mark.parametrize("name", ["act", PI05, "diffusion_batch_norm_ddim"])
def test_bundle_acts_like_its_source_without_compiling(name: str, source: Path, golden_folder, tmp_path: Path) -> None:
    folder, batches = (source, (1, 2)) if name == "act" else (golden_folder(name), (2,))
    original, steps = jaxmodels.load_policy(folder), []
    bundle = export_policy(folder, tmp_path / "bundle", "cpu", batch_sizes=batches, on_progress=steps.append)
    assert steps[:3] == ["reading", "ready", "writing weights"]
    assert steps[-1] == "compiling batch 2"
    manifest = bundle.manifest
    assert (manifest.platform, manifest.dtype, manifest.batch_sizes) == ("cpu", "float32", batches)
    assert list_executables(tmp_path) == set()
    loaded = jaxmodels.load_policy(tmp_path / "bundle")
    given = list_executables(tmp_path)
    assert given == set(load_file(bundle.folder / bundles.EXECUTABLES))
    needs = original.requirements
    for batch in batches:
        lead = (batch, needs.observation_steps) if needs.observation_steps > 1 else (batch,)
        seen: dict[str, Any] = {
            f"observation.images.{camera}": np.full((*lead, *size, 3), 99, np.uint8)
            for camera, size in needs.cameras.items()
        }
        seen |= {"observation.state": np.ones((*lead, needs.state or 0), np.float32)}
        seen |= {"task": ["pick"] * batch} if needs.language else {}
        expected = original.act(seen)
        jax.config.update(KEPT_FROM, 0.0)  # A program that is compiled from here on is kept.
        np.testing.assert_array_equal(loaded.act(seen), expected)
        jax.config.update(KEPT_FROM, 1000.0)
    assert list_executables(tmp_path) == given
    assert loaded.requirements == needs
    assert loaded.count_parameters().keys() == original.count_parameters().keys() - {"latent encoder"}


def test_stablehlo_of_an_absent_platform_is_written_without_executables(source: Path, tmp_path: Path) -> None:
    manifest = export_policy(source, tmp_path / "bundle", "cuda", batch_sizes=(3,), dtype="bfloat16").manifest
    assert (manifest.device, manifest.jaxlib, manifest.dtype) == (None, None, "bfloat16")
    assert not (tmp_path / "bundle" / bundles.EXECUTABLES).exists()
    dtypes = {stored.dtype.name for stored in find_policy_weights(tmp_path / "bundle").values()}
    assert dtypes == {"bfloat16"}
    content = (tmp_path / "bundle" / "stablehlo" / "batch_3.mlirbc").read_bytes()
    with make_ir_context() as context:  # JAX registers its dialects there.
        module = str(stablehlo.deserialize_portable_artifact(context, content))
    assert "tensor<3x6x5xf32>" in module
    with pytest.raises(ConfigError, match="the bundle is for cuda, and the device is cpu:0"):
        jaxmodels.load_policy(tmp_path / "bundle")


def test_executables_of_untrusted_or_other_devices_are_not_used(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, bundles.__name__)
    with jaxmodels.PolicyFolder(exported) as folder:
        digest = bundles.compute_digest(folder)
    shutil.rmtree(tmp_path / "cache")  # Another user did not export it.
    jaxmodels.load_policy(exported)
    assert f"its executables are not trusted; add {digest} to the setting trusted_bundles" in caplog.text
    assert list_executables(tmp_path) == set()
    monkeypatch.setenv(bundles.VARIABLE, f"{'0' * 64},{digest}")
    jaxmodels.load_policy(exported)
    assert len(list_executables(tmp_path)) == 1
    edit_json(exported / "bundle.json", jaxlib="0.0.1")
    jaxmodels.load_policy(exported)
    assert "programs are compiled, because its executables are for" in caplog.text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: edit_json(folder / "config.json", chunk_size=7), "config.json: missing, or not as exported"),
        (lambda folder: flip_byte(folder / "model.safetensors"), "model.safetensors: missing, or not as exported"),
        (lambda folder: flip_byte(folder / "executables.safetensors"), "executables.safetensors: missing, or not as"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: missing, or not as exported"),
        (lambda folder: (folder / "robojax.json").unlink(), "robojax.json: missing, or not as exported"),
        (lambda folder: edit_json(folder / "bundle.json", format=2), "format is 2; wanted 1: export the policy again"),
        (lambda folder: edit_json(folder / "bundle.json", robojax="0.0.9"), "exported by robojax '0.0.9'; this is"),
        (lambda folder: edit_json(folder / "bundle.json", files=["x"], more=1), "files, more cannot be read"),
        (lambda folder: edit_json(folder / "bundle.json", dtype=None), "dtype cannot be read"),
        (lambda folder: edit_json(folder / "bundle.json", dtype=[7]), "dtype cannot be read"),
        (lambda folder: edit_json(folder / "bundle.json", device="a\nb"), "device cannot be read"),
        (lambda folder: edit_json(folder / "bundle.json", platform="x" * 999), "platform cannot be read"),
        (lambda folder: drop_weight(folder), "weights of the bundle: weights do not fit the config"),
    ],
)  # fmt: skip
def test_changed_bundle_is_refused(exported: Path, damage: Any, words: str) -> None:
    damage(exported)
    with pytest.raises(CheckpointError, match=words):
        jaxmodels.load_policy(exported)


def test_compile_cache_that_cannot_be_written_costs_only_time(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*names: Any) -> None:
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.INFO, bundles.__name__)
    monkeypatch.setattr(bundles.os, "replace", refuse)
    policy = jaxmodels.load_policy(exported)
    assert "compiled, because the compile cache cannot be written (No space left on device)" in caplog.text
    assert list((tmp_path / "compiled").iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(exported / "config.json"))  # A file, in which there can be no folder.
    bundles.trust("0" * 64)
    assert "cannot be written (Not a directory); name the digest in trusted_bundles" in caplog.text
    assert policy.dtype == "float32"


def test_bundle_is_loaded_by_several_threads_at_once(exported: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        policies = list(threads.map(jaxmodels.load_policy, [exported] * 8))
    assert {policy.platform for policy in policies} == {"cpu"}
    assert list_executables(tmp_path) == {path.name for path in (tmp_path / "compiled").iterdir()}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop_weight(folder: Path) -> None:
    """Remove a weight and correct the manifest, as a bundle that is made by hand may have it."""
    weights = load_file(folder / "model.safetensors")
    weights.pop("action_out.bias")
    write_policy_weights(folder, weights)
    files = json.loads((folder / "bundle.json").read_text())["files"]
    files["model.safetensors"] = bundles.hash_files([folder / "model.safetensors"])[0]
    edit_json(folder / "bundle.json", files=files)


def test_bundle_is_for_serving_only(exported: Path, source: Path, tmp_path: Path) -> None:
    with jaxmodels.PolicyFolder(exported) as folder:
        assert verify_files(folder)["tensors"] == len(load_file(exported / "model.safetensors"))
    assert jaxmodels.read_requirements(exported) == jaxmodels.read_requirements(source)
    policy = jaxmodels.load_policy(exported)
    for use in (
        lambda: policy.save(tmp_path / "saved"),
        lambda: trained_policy(exported),
        lambda: export_policy(exported, tmp_path / "again", "cpu"),
        lambda: jaxmodels.load_policy(exported, dtype="bfloat16"),
        lambda: export_policy(source, exported, "cpu"),
        lambda: export_policy(source, tmp_path / "again", "metal"),
    ):
        with pytest.raises(ConfigError, match=r"bundle|platform"):
            use()
    assert not (tmp_path / "again").exists()


def test_large_weights_are_written_in_shards(tmp_path: Path) -> None:
    weights = {name: np.full((4, 4), number, np.int8) for number, name in enumerate("abc")}
    write_policy_weights(tmp_path, weights, max_bytes=32)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    found = find_policy_weights(tmp_path, dtypes={"I8": np.dtype(np.int8)})
    assert {name: stored.read().tolist() for name, stored in found.items()} == {
        name: array.tolist() for name, array in weights.items()
    }
