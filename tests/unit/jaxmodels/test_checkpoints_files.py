"""Untrusted files: safetensors headers are checked before the library reads them, Orbax needs a stated tree."""

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

import jaxmodels
from jaxmodels.checkpoints import folder as folder_module
from jaxmodels.checkpoints import orbax
from jaxmodels.checkpoints.files import (
    HEADER_LIMIT,
    TENSOR_LIMIT,
    find_floats,
    read_floats,
    read_json,
    write_safetensors,
)
from jaxmodels.checkpoints.folder import PolicyFolder
from jaxmodels.errors import CheckpointError, HubError, WeightsMismatch
from jaxmodels.policies import get_policy_type, integrity, lerobot_folder

# Orbax reports the second of two unreadable arrays to an event loop that the first error has closed.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def with_header(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def save_tree(folder: Path, tree: Any) -> None:
    with orbax.Writer() as writer:
        writer.save(folder, tree)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_survive_a_round_trip(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": np.float16([1, 2]), "c": np.zeros((0, 3))}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    back = read_floats(tmp_path / "x.safetensors")
    assert {name: (array.dtype, array.tolist()) for name, array in back.items()} == {
        name: (array.dtype, array.tolist()) for name, array in tensors.items()
    }


def test_header_size_and_number_of_tensors_are_limited(tmp_path: Path) -> None:
    path = with_header(tmp_path / "x.safetensors", b"{}", length=HEADER_LIMIT + 1)
    with pytest.raises(CheckpointError, match=rf"claims {HEADER_LIMIT + 1} bytes"):
        read_floats(path)
    header = json.dumps({f"t{i}": entry([0], 0, 0) for i in range(TENSOR_LIMIT + 1)}).encode()
    with pytest.raises(CheckpointError, match=f"{TENSOR_LIMIT + 1} tensors; wanted at most {TENSOR_LIMIT}"):
        read_floats(with_header(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry([2], 0, 400)},
        {"a": entry([1 << 62], 0, 4)},
        {"a": entry([1], 0, 4), "b": entry([1], 0, 4)},
        {"a": entry([1], 0, 4, "F128")},
        {"a": 3},
        *(b"[]", b"{", b"[" * 100_000, b"\xff\xfe"),
    ],
)
def test_invalid_header_is_refused(tmp_path: Path, header: dict | bytes) -> None:
    raw, data = (header, b"") if isinstance(header, bytes) else (json.dumps(header).encode(), b"1234")
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_floats(with_header(tmp_path / "x.safetensors", raw, data))


@pytest.mark.parametrize("raw", [b"", b"1234567", b"\x80\x04cos\nsystem\n", None])
def test_file_of_another_format_is_refused(tmp_path: Path, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read" if raw is None else r"x\.safetensors"):
        read_floats(tmp_path / "x.safetensors")


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_checkpoint_errors(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        read_floats(path)


def test_tensors_that_are_not_floats_are_listed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(1, np.int64), "b": np.zeros(2, bool)})
    with pytest.raises(CheckpointError, match=r"a \(I64\), b \(BOOL\)"):
        read_floats(tmp_path / "x.safetensors")


TREE = {"encoder.layers.0.kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.float32([1, 2, 3])}
SHAPES = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in TREE.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_tree(tmp_path / "weights", TREE)
    return tmp_path / "weights"


def test_orbax_restores_any_tree_with_its_classes(tmp_path: Path) -> None:
    parameters = {"a": jnp.ones(3), "b": [jnp.zeros((2, 2)), jnp.ones(())]}
    tree = (parameters, optax.adamw(1e-3).init(parameters))
    save_tree(tmp_path / "state", tree)
    back = orbax.restore(tmp_path / "state", tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": jax.ShapeDtypeStruct((4,), np.float32)}, r"bias: found \[3\], wanted \[4\]"),
        ({"other": jax.ShapeDtypeStruct((4,), np.float32)}, r"missing: other \[4\]"),
        ({"bias": jax.ShapeDtypeStruct((3,), np.int32)}, "found float32, wanted int32"),
        ({"bias": None}, r"unused: bias \[3\]"),
    ],
)
def test_orbax_refuses_trees_other_than_stated(saved: Path, changes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        orbax.restore(saved, {name: shape for name, shape in {**SHAPES, **changes}.items() if shape is not None})


def edited_shape(folder: Path) -> None:
    for path in folder.rglob(".zarray"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "shape": [1 << 40], "chunks": [1 << 40]}))


def edited_name(folder: Path) -> None:
    values = json.loads((folder / "_METADATA").read_text())
    inside = values["tree_metadata"].pop("('bias',)")
    inside["key_metadata"][0]["key"] = "/etc"
    values["tree_metadata"]["('/etc',)"] = inside
    (folder / "_METADATA").write_text(json.dumps(values))


def garbled(folder: Path) -> None:
    (folder / "_METADATA").write_text("{")


def cut_off(folder: Path) -> None:
    largest = max((path for path in folder.rglob("*") if path.name.isdigit()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


@pytest.mark.parametrize("edit", [edited_shape, edited_name, garbled, cut_off])
def test_orbax_with_edited_or_damaged_files_is_refused(tmp_path: Path, edit) -> None:
    folder = tmp_path / "weights"
    # Use one plain file per array, so that a test can edit its shape.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder, TREE)
    assert np.array_equal(orbax.restore(folder, SHAPES)["bias"], TREE["bias"])
    edit(folder)
    with pytest.raises(CheckpointError, match="weights"):
        orbax.restore(folder, SHAPES)
    with pytest.raises(CheckpointError, match="weights"):  # Restore it like a folder of openpi.
        list(orbax.restore_parts(folder, orbax.float_shapes(folder)))


def test_policy_folder_may_contain_orbax_weights(small, checkpoint_of, observation_of, tmp_path: Path) -> None:
    config = small()
    checkpoint = checkpoint_of(config)
    folder = tmp_path / "policy"
    lerobot_folder.write_checkpoint(folder, checkpoint)
    wanted = jaxmodels.load_policy(folder).act(observation_of(config))
    (folder / "model.safetensors").unlink()
    save_tree(folder / folder_module.ORBAX, dict(checkpoint.weights))
    np.testing.assert_array_equal(jaxmodels.load_policy(folder).act(observation_of(config)), wanted)
    shutil.rmtree(folder / folder_module.ORBAX)
    save_tree(folder / folder_module.ORBAX, {**checkpoint.weights, "extra": np.zeros(2, np.float32)})
    with pytest.raises(WeightsMismatch, match=r"unused: extra \[2\]"):
        lerobot_folder.read_checkpoint(folder)


@pytest.fixture
def policy(golden_folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_folder("act_state_only"), tmp_path / "root" / "policy"))


def test_file_that_is_exchanged_after_opening_is_not_read(policy: Path) -> None:
    other = Path(shutil.copytree(policy, policy.with_name("other")))
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"n_heads": 10**9}))
    with PolicyFolder(policy) as opened:
        os.replace(other / "config.json", policy / "config.json")
        assert read_json(opened / "config.json") == values
        with pytest.raises(CheckpointError, match=r"config\.json: was changed while it was read"):
            lerobot_folder.read_checkpoint(opened)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_that_changes_during_reading_is_refused(policy: Path, name: str) -> None:
    with PolicyFolder(policy) as opened:
        time.sleep(0.02)  # Longer than a tick of the file system's clock.
        with (policy / name).open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(first)
        with pytest.raises(CheckpointError, match=f"{name}: was changed"):
            lerobot_folder.read_checkpoint(opened)


def test_file_that_is_truncated_during_reading_is_refused(policy: Path) -> None:
    weights = policy / "model.safetensors"
    with PolicyFolder(policy) as opened:
        found = find_floats(opened / "model.safetensors")
        os.truncate(weights, 4096)
        last = max(found.values(), key=lambda tensor: tensor.start)
        with pytest.raises(CheckpointError, match="cannot be read to its end"):
            last.read()
    with pytest.raises(CheckpointError, match="wanted a safetensors file"):
        lerobot_folder.read_checkpoint(policy)


def test_bytes_appended_after_opening_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "act"}')
    with PolicyFolder(tmp_path) as opened:
        with (tmp_path / "config.json").open("ab") as file:
            file.write(b" " * 10_000_000)
        assert read_json(opened / "config.json") == {"type": "act"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/proc/self/environ")
    with PolicyFolder(tmp_path) as opened, pytest.raises(CheckpointError, match="malformed JSON"):
        read_json(opened / "config.json")


def test_links_of_the_hub_cache_are_followed_within_their_repo(policy: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--lab--act"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "abc").mkdir(parents=True)
    for number, path in enumerate(policy.iterdir()):
        path.rename(repo / "blobs" / str(number))
        (repo / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/{number}")
    with PolicyFolder(repo / "snapshots" / "abc", roots=[repo]) as opened:
        assert lerobot_folder.read_checkpoint(opened).weights


def test_number_of_opened_files_is_limited(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(80):
        write_safetensors(policy / f"other{number}.safetensors", {"a": np.zeros(1, np.float32)})
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(folder_module, "ENTRIES", len(list(policy.iterdir())))
    with PolicyFolder(policy) as opened:
        assert len(opened.descriptors) < 80
        assert lerobot_folder.read_checkpoint(opened).weights
        with pytest.raises(CheckpointError, match=r"more than 64 \.safetensors files"):
            read_floats(opened / "other79.safetensors")
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(folder_module, "ENTRIES", len(list(policy.iterdir())) - 1)
    with pytest.raises(CheckpointError, match="entries; wanted a policy's folder"):
        PolicyFolder(policy)


def test_size_of_weights_is_limited_by_the_operator(policy: Path) -> None:
    size = (policy / "model.safetensors").stat().st_size
    assert jaxmodels.load_policy(policy, largest=size).needs.device > 0
    for read in (PolicyFolder, jaxmodels.load_policy):
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {size} bytes; wanted at most {size - 1}"):
            read(policy, largest=size - 1)


def test_folder_and_its_orbax_arrays_must_be_in_the_roots(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (policy / "orbax").symlink_to(tmp_path / "elsewhere")
    with PolicyFolder(policy, roots=[policy.parent]) as opened, pytest.raises(CheckpointError, match="leads out"):
        opened.tree()
    for read in (PolicyFolder, jaxmodels.load_policy, jaxmodels.read_requirements):
        with pytest.raises(CheckpointError, match="leads out"):
            read(policy, roots=[tmp_path / "elsewhere"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(CheckpointError, match="leads out"):  # The error does not show the content.
        PolicyFolder(tmp_path / "bare", roots=[tmp_path / "elsewhere"])


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would unblock its writer."""
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    writing = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_WRONLY)), daemon=True)
    writing.start()
    writing.join(0.05)  # The writer waits for a reader.
    with pytest.raises(CheckpointError, match="wanted a regular file"):
        folder_module.open_file(pipe)
    writing.join(0.1)
    assert writing.is_alive()
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    writing.join(20)
    assert not writing.is_alive()


def test_file_exchanged_for_a_pipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, look = tmp_path / "config.json", os.stat
    file.write_text("{}")

    def look_and_exchange(*of: Any, **how: Any) -> os.stat_result:
        found = look(*of, **how)
        if Path(of[0]) == file:
            file.unlink()
            os.mkfifo(file)
        return found

    monkeypatch.setattr(os, "stat", look_and_exchange)
    with pytest.raises(CheckpointError, match="wanted a regular file"):
        folder_module.open_file(file)


def test_weights_of_another_config_are_refused_unread(policy: Path) -> None:
    count = 1 << 40  # 4 TB of float32.
    header = json.dumps({"huge": entry([count], 0, 4 * count)}).encode()
    with_header(policy / "model.safetensors", header)
    os.truncate(policy / "model.safetensors", 8 + len(header) + 4 * count)
    with pytest.raises(CheckpointError, match=r"wanted at most 1099511627776"):
        PolicyFolder(policy)
    kind = get_policy_type("act")
    config = lerobot_folder.build_description(integrity.describe_folder(policy)).config
    with pytest.raises(WeightsMismatch, match="unused: huge"):
        lerobot_folder._read_tensors(policy, kind, config, lambda config, parameters: None)


def test_size_of_older_statistics_is_limited(policy: Path) -> None:
    tensors = dict(load_file(policy / "model.safetensors"))
    tensors["normalize_inputs.buffer_observation_state.mean"] = np.zeros(5 << 20, np.float32)
    write_safetensors(policy / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="bytes of statistics; wanted at most"):
        lerobot_folder.read_checkpoint(policy)


@given(st.data())
def test_header_check_agrees_with_the_library(data: st.DataObject) -> None:
    number = st.integers(0, 12)
    tensor = st.builds(
        lambda dtype, shape, begin, length: entry(shape, begin, begin + length, dtype),
        st.sampled_from(["F32", "F16", "BOOL", "F8_E4M3", "I64", "F4", "X9"]),
        st.lists(number, max_size=2),
        number,
        number,
    )
    good = data.draw(st.lists(st.sampled_from([("F32", [1]), ("F16", [2]), ("F32", [0]), ("F64", [1])]), max_size=3))
    header, end = {}, 0
    for index, (dtype, shape) in enumerate(good):
        length = shape[0] * {"F64": 8, "F32": 4, "F16": 2}[dtype]
        header[f"t{index}"] = entry(shape, end, end + length, dtype)
        end += length
    header |= data.draw(st.dictionaries(st.sampled_from(["t0", "u"]), tensor, max_size=1))
    end += data.draw(st.sampled_from([0, 0, 0, 1, 4]))
    raw = json.dumps(header).encode() + b" " * data.draw(st.integers(0, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = with_header(Path(folder) / "x.safetensors", raw, bytes(end))
        try:
            with safe_open(path, framework="np"):
                expected = contextlib.nullcontext()
        except SafetensorError:
            expected = pytest.raises(CheckpointError)
        with expected:
            find_floats(path, lambda name: False)


@pytest.mark.parametrize("spoil", ["link", "link to a folder", "pipe", "too deep"])
def test_orbax_checkpoint_has_only_regular_files_and_folders(tmp_path: Path, spoil: str) -> None:
    tree = {"a": jnp.arange(4.0)}
    save_tree(tmp_path / "orbax", tree)
    assert orbax.restore(tmp_path / "orbax", tree)["a"].tolist() == [0, 1, 2, 3]
    (tmp_path / "outside").mkdir()
    place = tmp_path / "orbax" / "zz"
    if spoil == "pipe":
        os.mkfifo(place)
    elif spoil == "too deep":
        place.joinpath(*["d"] * 40).mkdir(parents=True)
    else:
        place.symlink_to(tmp_path / "outside" if spoil == "link to a folder" else __file__)
    for read in (lambda: orbax.restore(tmp_path / "orbax", tree), lambda: orbax.float_shapes(tmp_path / "orbax")):
        with pytest.raises(CheckpointError, match=r"wanted regular files and folders only|more than 32 deep"):
            read()


def test_number_of_files_of_an_orbax_checkpoint_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tree(tmp_path / "orbax", {"a": jnp.arange(4.0)})
    monkeypatch.setattr(folder_module, "TREE_ENTRIES", len(folder_module.check_tree(tmp_path / "orbax")))
    folder_module.check_tree(tmp_path / "orbax")
    (tmp_path / "orbax" / "zz").touch()
    with pytest.raises(CheckpointError, match="entries; wanted an Orbax checkpoint"):
        folder_module.check_tree(tmp_path / "orbax")


def test_orbax_checkpoint_changed_during_reading_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, read = {"a": jnp.arange(4.0)}, ocp.StandardCheckpointer.restore
    save_tree(tmp_path / "orbax", tree)

    def read_and_exchange(*of: Any, **how: Any) -> Any:
        found = read(*of, **how)
        path = next(path for path in sorted((tmp_path / "orbax").rglob("*")) if path.is_file())
        path.with_name("other").write_bytes(path.read_bytes())
        path.with_name("other").replace(path)
        return found

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", read_and_exchange)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        orbax.restore(tmp_path / "orbax", tree)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2358152\n"
OTHER_FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "empty": ({}, "HERE: the folder is empty"),
    "adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "user/base"}', "adapter_model.safetensors": ""},
        "HERE: only an adapter of 'user/base' (PEFT, e.g. LoRA), without the weights that it changes; merge it into",
    ),
    "adapter without a base": ({"adapter_config.json": "[]"}, "HERE: only an adapter (PEFT, e.g. LoRA)"),
    "pipeline": ({"model_index.json": "{}", "unet/config.json": "{}"}, "HERE: a pipeline of diffusers"),
    "dataset": ({"meta/info.json": "{}", "data/a.parquet": ""}, "HERE: a LeRobotDataset (meta/info.json)"),
    "dataset cache": ({"refs/main": "abc"}, "HERE: the Hub's cache of a dataset"),
    "training state": (
        {"training_step.json": "{}", "optimizer_state.safetensors": ""},
        "HERE: the state of a training; the policy of this training is in UP/pretrained_model",
    ),
    "transformers": (
        {"config.json": '{"model_type": "gemma", "architectures": ["Gemma"]}', "model.safetensors": ""},
        "config.json has no \"type\"; wanted one of act, .*transformers \\('gemma'\\), which is not a policy",
    ),
    "diffusers": (
        {"config.json": '{"_class_name": "Transformer2DModel"}', "diffusion_pytorch_model.safetensors": ""},
        "config.json has no \"type\".*diffusers \\('Transformer2DModel'\\).*; jaxmodels.load_model loads it",
    ),
    "no type": (
        {"config.json": '{"type": null, "chunk_size": 8}', "model.safetensors": ""},
        'config.json has no "type"; wanted one of act, .* add its type, e.g. "type": "act"',
    ),
    "pickles": ({"pytorch_model.bin": "", "notes.txt": ""}, "only pytorch_model.bin and no model.safetensors"),
    "anything": ({"notes.txt": "secret"}, "no config.json|no model.safetensors"),
}


@pytest.mark.parametrize("kind", OTHER_FOLDERS)
@pytest.mark.parametrize("read", [jaxmodels.load_policy, jaxmodels.read_requirements])
def test_other_kinds_of_folders_are_described(read, kind: str, tmp_path: Path) -> None:
    files, words = OTHER_FOLDERS[kind]
    folder = tmp_path / ("datasets--user--cubes" if kind == "dataset cache" else "folder")
    folder.mkdir()
    write(folder, files)
    with pytest.raises(CheckpointError) as caught:
        read(str(folder))
    if words.startswith("HERE"):
        words = words.replace("HERE", str(folder)).replace("UP", str(tmp_path))
        assert str(caught.value).startswith(words)
    else:
        assert re.search(words, str(caught.value))
    assert "secret" not in str(caught.value)


def test_adapter_with_a_config_names_its_base(policy: Path) -> None:
    (policy / "model.safetensors").unlink()
    write(policy, {"adapter_config.json": '{"base_model_name_or_path": "user/base"}'})
    for read in (jaxmodels.load_policy, jaxmodels.read_requirements):
        with pytest.raises(CheckpointError, match="only an adapter of 'user/base'"):
            read(policy)


@pytest.mark.parametrize(
    ("name", "copies", "expected"),
    [
        ("last", ["last/pretrained_model"], "pretrained_model"),
        ("checkpoints", ["000200/pretrained_model", "000100/pretrained_model"], "000200/pretrained_model"),
        ("checkpoints", ["last/pretrained_model", "000300/pretrained_model"], "last/pretrained_model"),
        ("run", ["checkpoints/000300/pretrained_model", "checkpoints/last/pretrained_model"], None),
        ("run", ["policy", "checkpoints/last/pretrained_model"], "policy"),
        ("models--user--name", ["snapshots/aaa", "snapshots/bbb"], "snapshots/bbb"),
    ],
)
def test_folder_that_contains_a_policy_names_its_path(
    policy: Path, tmp_path: Path, name: str, copies: list[str], expected: str | None
) -> None:
    folder = tmp_path / name
    for copy in copies:
        shutil.copytree(policy, folder / copy.removeprefix(f"{name}/"))
    write(folder, {"refs/main": "bbb\n"})
    expected = expected or "checkpoints/last/pretrained_model"
    for read in (jaxmodels.load_policy, jaxmodels.read_requirements):
        with pytest.raises(CheckpointError, match=f"^{folder}: .*; the policy is in {folder}/{expected}"):
            read(folder)


def test_policies_outside_of_the_roots_are_not_named(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "linked").symlink_to(policy)
    with pytest.raises(CheckpointError, match=r"the policy is in .*run/linked"):
        jaxmodels.load_policy(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"^run: no config\.json; wanted a folder"):
        jaxmodels.load_policy(tmp_path / "run", roots=[tmp_path / "run"])


def test_search_for_policies_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    list_below = PolicyFolder._list_below
    monkeypatch.setattr(PolicyFolder, "_list_below", lambda self, path: listed.append(path) or list_below(self, path))
    for number in range(30):
        for inner in range(30):
            (tmp_path / str(number) / str(inner) / "deeper" / "deepest").mkdir(parents=True)
    with PolicyFolder(tmp_path) as opened:
        assert opened.find_policies() == []
    assert len(listed) <= 200
    assert max(path.count("/") for path in listed) <= 2


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "policy_preprocessor.json", "robojax.json", "tokenizer.json"]
)
def test_git_lfs_pointers_are_named(policy: Path, name: str) -> None:
    (policy / name).write_text(LFS)
    with pytest.raises(CheckpointError, match=f"^{name}: a pointer of Git LFS .*git lfs pull"):
        jaxmodels.load_policy(policy)
    if name != "tokenizer.json":  # This policy needs none.
        with pytest.raises(CheckpointError, match=f"{name}: a pointer of Git LFS"):
            jaxmodels.read_requirements(policy)


def test_file_instead_of_a_folder_is_refused(policy: Path) -> None:
    for read in (jaxmodels.load_policy, jaxmodels.read_requirements):
        with pytest.raises(HubError, match=f"it is a file in '{policy}'"):
            read(policy / "model.safetensors")
