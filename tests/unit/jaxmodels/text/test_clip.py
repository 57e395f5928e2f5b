"""Parity of CLIP's text tower and tokens with transformers, for the texts in tests/golden/clip_text."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.text import TextConfig, TextEncoder, tokenizer
from jaxmodels.training.initial_policy import read_clip_text
from jaxmodels.weights import blueprint

GOLDEN = Path(__file__).parents[3] / "golden" / "clip_text"
pytestmark = pytest.mark.fully_compiled
CASES = np.load(GOLDEN / "cases.npz")
TEXTS = json.loads((GOLDEN / "cases.json").read_text())["texts"]
FILE = (GOLDEN / "tokenizer.json").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "quick", tmp_path, dirs_exist_ok=True)
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["quick", "exact"])
def test_text_tower_equals_transformers(name: str) -> None:
    read = read_clip_text(GOLDEN / name)
    encode = blueprint(lambda rngs: TextEncoder(read.config, rngs=rngs)).assemble(jax.device_put(dict(read.weights)))
    expected, ids, mask = CASES[f"{name}.last_hidden_state"], CASES["ids"].astype(np.int32), CASES["mask"].astype(bool)
    found = np.asarray(jax.jit(lambda *texts: encode(*texts))(ids, mask))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_tokens_equal_transformers_and_keep_the_end_token() -> None:
    pytest.importorskip("tokenizers", reason="the extra language is not installed")
    ids, mask = tokenizer(read_clip_text(GOLDEN / "quick").config, FILE)(TEXTS)
    np.testing.assert_array_equal(ids, CASES["ids"])
    np.testing.assert_array_equal(mask, CASES["mask"].astype(bool))
    ids, mask = tokenizer(dataclasses.replace(TextConfig.clip(), length=6), FILE)(["the " * 9, "\ud800"])
    assert ids[0].tolist() == [526, 513, 513, 513, 513, 527]
    assert mask[0].all()
    assert not mask[1].all()


def test_text_tower_of_a_whole_clip_is_read_alone(folder: Path) -> None:
    alone = read_clip_text(folder)
    assert alone.config == TextConfig("clip", 20, 16, 2, 2, 32, 528, "quick_gelu", is_frozen=True)
    assert alone.tokenizer == FILE
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "clip", "text_config": values, "vision_config": {}}))
    other = {"vision_model.embeddings.class_embedding": np.ones(3, np.float32), "logit_scale": np.ones((), np.float32)}
    table = {"text_model.embeddings.position_ids": np.arange(20)[None]}
    save_file({**load_file(folder / "model.safetensors"), **other, **table}, folder / "model.safetensors")
    read = read_clip_text(folder)
    assert read.config == alone.config
    for name, array in alone.weights.items():
        np.testing.assert_array_equal(read.weights[name], array)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; wanted clip"),
        ({"layer_norm_eps": 1e-3}, "layer_norm_eps is 0.001"),
        ({"hidden_act": "relu"}, "activation is 'relu'; known: gelu, quick_gelu"),
        ({"num_hidden_layers": 3}, "weights do not fit the config .16 missing"),
    ],
)
def test_invalid_clip_is_refused(folder: Path, changes: dict[str, object], complaint: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises((CheckpointError, ConfigError, WeightsMismatch), match=complaint):
        read_clip_text(folder)


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (None, "tokenizer.json: missing; a text encoder of kind 'clip' needs it"),
        (b"{}", "tokenizer.json: cannot be read"),
        (b"\xff", "tokenizer.json: cannot be read"),
        (FILE, "has a token 527, and a text encoder of kind 'clip' a vocabulary of 500"),
    ],
)
def test_unreadable_or_mismatching_tokenizer_is_refused(file: bytes | None, complaint: str) -> None:
    pytest.importorskip("tokenizers", reason="the extra language is not installed")
    with pytest.raises(CheckpointError, match=complaint):
        tokenizer(dataclasses.replace(TextConfig.clip(), vocabulary=500), file)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[language\]'"):
        tokenizer(TextConfig.clip(), FILE)
