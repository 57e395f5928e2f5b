import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from jaxmodels import PolicyFolder
from jaxmodels.errors import CheckpointError
from service.engines.messages import LocalFolder
from service.inference.sandbox import CheckpointSandbox

DEMO = Path(__file__).parents[3] / "robojax" / "sim" / "policy"


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": {"float32": "F32", "float16": "F16"}[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "arm").mkdir()
    (tmp_path / "arm/config.json").write_text('{"type": "act"}')
    write(tmp_path / "arm/model.safetensors", {"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float16)})
    return tmp_path / "arm"


def error_of(folder, inspection=None):
    with pytest.raises(CheckpointError) as caught:
        (inspection or CheckpointSandbox())(folder)
    text = str(caught.value)
    assert str(folder.parent) not in text
    return text


def test_only_policy_files_are_read_and_they_are_read_completely(folder, caplog):
    (folder / "modeling.py").write_text("raise SystemExit(3)")
    (folder / "weights.bin").write_bytes(b"\x80\x04.")
    with caplog.at_level("INFO"):
        CheckpointSandbox()(folder)
    assert "2 tensors, 34 bytes" in caplog.text


def test_a_relative_path_is_accepted(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    CheckpointSandbox()(Path("arm"))


def test_the_policy_of_the_demo_passes(caplog):
    with caplog.at_level("INFO"):
        CheckpointSandbox()(DEMO)
    assert "tensors" in caplog.text


def damage_shard(folder):
    (folder / "model.safetensors").unlink()
    for number, value in ((1, 1.0), (2, np.nan)):
        write(folder / f"model-0000{number}-of-00002.safetensors", {f"t{number}": np.array([value], np.float32)})
    names = {f"t{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def damage_end(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-3])


def damage_link(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/proc/self/mem")


def tensors(**arrays):
    return lambda folder: write(folder / "model.safetensors", arrays)


def content(raw, name="model.safetensors"):
    return lambda folder: (folder / name).write_bytes(raw)


HUGE = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}).encode()
DAMAGES = {
    "a NaN": (
        tensors(valid=np.ones(2, np.float32), invalid=np.array([1, np.nan], np.float32)),
        "an infinity in invalid",
    ),
    "an infinity": (tensors(invalid=np.array([np.inf], np.float16)), "a NaN or an infinity in invalid"),
    "a shard": (damage_shard, "model-00002-of-00002.safetensors: a NaN or an infinity in t2"),
    "cut off": (damage_end, "not a readable safetensors file"),
    "length": (content(struct.pack("<Q", 1 << 62) + b"{}"), "claims 4611686018427387904 bytes"),
    "count": (
        tensors(**{f"t{number}": np.zeros(0, np.float32) for number in range(10_001)}),
        "10001 tensors; wanted at most 10000",
    ),
    "shape": (content(struct.pack("<Q", len(HUGE)) + HUGE + b"1234"), "not a readable safetensors file"),
    "config": (content(b'{"type": NaN}', "config.json"), "config.json"),
    "depth": (content(b'{"a":' * 100_000, "config.json"), "config.json: malformed JSON"),
    "link": (damage_link, "model.safetensors"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_reported_by_its_name(folder, kind):
    damage, message = DAMAGES[kind]
    damage(folder)
    assert message in error_of(folder)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("x = bytearray(1 << 40)", "out of memory"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "out of memory"),
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("import os; os.write(2, b'terminate called after std::bad_alloc'); os.abort()", "out of memory"),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "out of memory"),
        ("raise ValueError('secret')", "was ended with code 1"),
        ("while True: sys.stdout.write('x' * 4096); sys.stdout.flush()", "was ended"),
        ("import time; time.sleep(60)", "took over"),
    ],
)
def test_the_parent_survives_and_reports_any_end_of_the_child(folder, program, message):
    text = error_of(
        folder, CheckpointSandbox(1 << 28, timeout=60.0 if "sleep" not in program else 0.2, program=program)
    )
    assert message in text
    assert "secret" not in text


def test_the_child_gets_no_secret_of_the_environment(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = "import json, os; print(json.dumps({'error': ' '.join(sorted(os.environ))}))"
    names = set(error_of(folder, CheckpointSandbox(program=program)).removeprefix("arm: ").split())
    threads = {"OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
    assert names <= {"LC_CTYPE", "PATH", "PYTHONDONTWRITEBYTECODE", *threads}


def replacing(old, new, times):
    step = {"type": "Replace", "pattern": old, "content": new}
    return {"normalizer": {"type": "Sequence", "normalizers": [step] * times}}


REPEATED = {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000, "pair": [], "special_tokens": {}}
TOKENIZERS = {
    "valid": (replacing({"String": " "}, "\u2581", 1), None),
    "a letter is doubled": (replacing({"String": "a"}, "aa", 10), "1024 normalized characters of 'a'"),
    "a rare word is doubled": (replacing({"String": "zebra"}, "zebrazebra", 10), "normalized characters of 'zebra"),
    "tokens are repeated": ({"post_processor": {"type": "TemplateProcessing", **REPEATED}}, "2000 tokens of 'a'"),
    "slow expression": (replacing({"Regex": "(a+)+$"}, "b", 1), "cannot encode"),
    "many replacements": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": f"x{number}"}, "content": ""} for number in range(65)
                ],
            }
        },
        "replaces 65 texts",
    ),
    "memory": (replacing({"String": "a"}, "a" * 4096, 3), "out of memory: vlm/tokenizer.json: encoding"),
    "malformed": ({"model": 3}, "cannot be read"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_multiplies_its_input_is_refused(folder, kind):
    pytest.importorskip("tokenizers", reason="the extra language is not installed")
    values, message = TOKENIZERS[kind]
    (folder / "vlm").mkdir()
    write_tokenizer(folder / "vlm", values)
    sandbox = CheckpointSandbox(1 << 28)
    if message is None:
        sandbox(folder)
    else:
        text = error_of(folder, sandbox)
        assert "vlm/tokenizer.json: " in text
        assert message in text


def write_tokenizer(folder, values):
    model = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    whole = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": split}
    (folder / "tokenizer.json").write_text(json.dumps(whole | values))


def test_a_tokenizer_of_the_hub_cache_is_verified_too(folder, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="the extra language is not installed")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache/models--someone--vlm/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "cache/models--someone--vlm/refs").mkdir()
    (tmp_path / "cache/models--someone--vlm/refs/main").write_text("0" * 40)
    write_tokenizer(snapshot, TOKENIZERS["a letter is doubled"][0])
    (folder / "config.json").write_text('{"type": "smolvla", "vlm_model_name": "someone/vlm"}')
    assert "someone/vlm/tokenizer.json in the Hub's cache: the tokenizer makes 1024" in error_of(folder)


def test_a_file_named_like_weights_does_not_hide_an_orbax_tree(folder):
    (folder / "model.safetensors").rename(folder / "model_2.safetensors")
    (folder / "orbax").mkdir()
    (folder / "orbax/_METADATA").write_text("[" * 100_000)
    assert "orbax/_METADATA: malformed JSON" in error_of(folder)


def edit_array(**values):
    def edit(folder):
        path = folder / "orbax/a/.zarray"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


TREES = {
    "valid": (lambda folder: None, None),
    "long metadata": (content(b"[" + b"0," * (5 << 20) + b"0]", "orbax/_METADATA"), "orbax/_METADATA: 10485763 bytes"),
    "deep metadata": (content(b"[" * 100_000, "orbax/_METADATA"), "orbax/_METADATA: malformed JSON"),
    "chunk larger than the array": (edit_array(chunks=[1 << 30]), "orbax/a: has chunks of shape"),
    "array that no file holds": (edit_array(shape=[1 << 40], chunks=[1 << 20]), "orbax/a: the arrays up to this one"),
    "chunk longer than declared": (content(zlib.compress(bytes(1 << 24)), "orbax/a/0"), "orbax/a: unreadable"),
    "chunk that is cut off": (content(b"\x78", "orbax/a/0"), "orbax/a: unreadable Orbax checkpoint"),
    "link": (lambda folder: (folder / "orbax/b").symlink_to("/etc/passwd"), "orbax/b: is a link"),
}


@pytest.mark.parametrize("kind", TREES)
def test_an_orbax_tree_is_verified_before_an_engine_reads_it(folder, kind):
    damage, message = TREES[kind]
    (folder / "model.safetensors").unlink()
    (folder / "orbax/a").mkdir(parents=True)
    array = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "order": "C", "filters": None}
    array |= {"fill_value": None, "compressor": {"id": "zlib", "level": 1}}
    (folder / "orbax/a/.zarray").write_text(json.dumps(array))
    (folder / "orbax/a/0").write_bytes(zlib.compress(np.ones(4, np.float32).tobytes()))
    (folder / "orbax/_METADATA").write_text("{}")
    damage(folder)
    if message is None:
        CheckpointSandbox()(folder)
    else:
        assert message in error_of(folder)


def test_a_change_of_an_orbax_file_after_verification_is_detected(folder):
    (folder / "model.safetensors").unlink()
    (folder / "orbax").mkdir()
    (folder / "orbax/_METADATA").write_text("{}")
    with PolicyFolder(folder) as opened:
        files = LocalFolder.of(opened)
        files.check(opened)
    (folder / "orbax/_METADATA").write_text("{ }")
    with PolicyFolder(folder) as opened, pytest.raises(CheckpointError, match="orbax/_METADATA: was changed"):
        files.check(opened)


@pytest.mark.parametrize(
    ("value", "config", "message"),
    [(1.0, "{}", None), (np.inf, "{}", "a NaN or an infinity in a"), (1.0, "[" * 9999, "config.json: malformed JSON")],
)
def test_a_diffusers_model_is_verified_before_it_is_loaded(tmp_path, value, config, message):
    (tmp_path / "config.json").write_text(config)
    write(tmp_path / "diffusion_pytorch_model.safetensors", {"a": np.array([value], np.float32)})
    if message is None:
        CheckpointSandbox().verify_model(tmp_path)
    else:
        with pytest.raises(CheckpointError, match=message):
            CheckpointSandbox().verify_model(tmp_path)


def test_a_step_over_its_processor_time_is_named(folder):
    program = """
from jaxmodels.policies.integrity import _begin_step
_begin_step("vlm/tokenizer.json: opening it", 0.1)
while True: pass
"""
    assert error_of(folder, CheckpointSandbox(program=program)).endswith(
        "vlm/tokenizer.json: opening it took over 0.1 s of processor time"
    )
