"""Files of strangers: safetensors headers looked at before the library, Orbax only into a stated tree."""

import contextlib
import json
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmodels
from jaxmodels.checkpoints import lerobot, orbax
from jaxmodels.checkpoints.safetensors_file import HEADER_LIMIT, TENSOR_LIMIT, read_floats, write_safetensors
from jaxmodels.errors import CheckpointError, WeightsMismatch

# Of two arrays that cannot be read, the second is told to Orbax's event loop, which the first has closed; Python
# reports that on stderr whenever it comes, perhaps in the test after.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def with_header(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": np.float16([1, 2]), "c": np.zeros((0, 3))}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    back = read_floats(tmp_path / "x.safetensors")
    assert {name: (array.dtype, array.tolist()) for name, array in back.items()} == {
        name: (array.dtype, array.tolist()) for name, array in tensors.items()
    }


def test_a_header_that_claims_too_much_is_refused_unread(tmp_path: Path) -> None:
    path = with_header(tmp_path / "x.safetensors", b"{}", length=HEADER_LIMIT + 1)
    with pytest.raises(CheckpointError, match=rf"claims {HEADER_LIMIT + 1} bytes"):
        read_floats(path)


def test_too_many_tensors_are_refused(tmp_path: Path) -> None:
    header = json.dumps({f"t{i}": entry([0], 0, 0) for i in range(TENSOR_LIMIT + 1)}).encode()
    with pytest.raises(CheckpointError, match=f"{TENSOR_LIMIT + 1} tensors; wanted at most {TENSOR_LIMIT}"):
        read_floats(with_header(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (json.dumps({"a": entry([2], 0, 400)}).encode(), b"1234"),
        (json.dumps({"a": entry([1 << 62], 0, 4)}).encode(), b"1234"),
        (json.dumps({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}).encode(), b"1234"),
        (json.dumps({"a": entry([1], 0, 4, "F128")}).encode(), b"1234"),
        (json.dumps({"a": 3}).encode(), b"1234"),
        (b"[]", b""),
        (b"{", b""),
        (b"[" * 100_000, b""),
        (b"\xff\xfe", b""),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes, data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_floats(with_header(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("raw", [b"", b"1234567", b"\x80\x04cos\nsystem\n"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError):
        read_floats(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_floats(tmp_path / "missing.safetensors")


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        read_floats(path)


def test_tensors_that_are_not_numbers_with_a_point_are_listed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(1, np.int64), "b": np.zeros(2, bool)})
    with pytest.raises(CheckpointError, match=r"a \(I64\), b \(BOOL\)"):
        read_floats(tmp_path / "x.safetensors")


TREE = {"encoder.layers.0.kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.float32([1, 2, 3])}
SHAPES = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in TREE.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    orbax.save(tmp_path / "weights", TREE)
    return tmp_path / "weights"


def test_orbax_restores_the_same_bits(saved: Path) -> None:
    back = orbax.restore(saved, SHAPES)
    assert {name: np.asarray(array).tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in TREE.items()
    }


def test_orbax_restores_any_tree_with_its_classes(tmp_path: Path) -> None:
    parameters = {"a": jnp.ones(3), "b": [jnp.zeros((2, 2)), jnp.ones(())]}
    tree = (parameters, optax.adamw(1e-3).init(parameters))
    orbax.save(tmp_path / "state", tree)
    back = orbax.restore(tmp_path / "state", tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": jax.ShapeDtypeStruct((4,), np.float32)}, r"bias: found \[3\], wanted \[4\]"),
        ({"other": jax.ShapeDtypeStruct((4,), np.float32)}, r"missing: other \[4\]"),
        ({"bias": jax.ShapeDtypeStruct((3,), np.int32)}, "found float32, wanted int32"),
    ],
)
def test_orbax_refuses_what_is_not_as_stated(saved: Path, changes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        orbax.restore(saved, {**SHAPES, **changes})


def test_orbax_names_what_nobody_asked_for(saved: Path) -> None:
    with pytest.raises(WeightsMismatch, match=r"unused: bias \[3\]"):
        orbax.restore(saved, {"encoder.layers.0.kernel": SHAPES["encoder.layers.0.kernel"]})


def edited_shape(folder: Path) -> None:
    for path in folder.rglob(".zarray"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "shape": [1 << 40], "chunks": [1 << 40]}))


def edited_name(folder: Path) -> None:
    values = json.loads((folder / "_METADATA").read_text())
    tree = values["tree_metadata"]
    inside = tree.pop("('bias',)")
    inside["key_metadata"][0]["key"] = "/etc"
    tree["('/etc',)"] = inside
    (folder / "_METADATA").write_text(json.dumps(values))


def garbled(folder: Path) -> None:
    (folder / "_METADATA").write_text("{")


@pytest.mark.parametrize("edit", [edited_shape, edited_name, garbled])
def test_orbax_with_edited_metadata_is_refused(tmp_path: Path, edit) -> None:
    folder = tmp_path / "weights"
    # One plain file per array, so that a shape can be edited with a text editor.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder, TREE)
    assert np.array_equal(orbax.restore(folder, SHAPES)["bias"], TREE["bias"])
    edit(folder)
    with pytest.raises(CheckpointError, match="weights"):
        orbax.restore(folder, SHAPES)


def test_a_policy_folder_may_hold_orbax_weights(small, checkpoint_of, observation_of, tmp_path: Path) -> None:
    config = small()
    checkpoint = checkpoint_of(config)
    folder = tmp_path / "policy"
    lerobot.write(folder, checkpoint)
    wanted = jaxmodels.load_policy(folder).act(observation_of(config))
    (folder / "model.safetensors").unlink()
    orbax.save(folder / orbax.FOLDER, dict(checkpoint.weights))
    np.testing.assert_array_equal(jaxmodels.load_policy(folder).act(observation_of(config)), wanted)
    shutil.rmtree(folder / orbax.FOLDER)
    orbax.save(folder / orbax.FOLDER, {**checkpoint.weights, "extra": np.zeros(2, np.float32)})
    with pytest.raises(WeightsMismatch, match=r"unused: extra \[2\]"):
        lerobot.read(folder)


def test_no_orbax_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no Orbax checkpoint there"):
        orbax.restore(tmp_path / "nothing", SHAPES)
