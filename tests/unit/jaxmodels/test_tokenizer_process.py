import gc
import json
import os
import signal
from pathlib import Path

import pytest

from jaxmodels.checkpoints.tokenizer_files import LocalTokenizer
from jaxmodels.checkpoints.tokenizer_process import IsolatedTokenizer
from jaxmodels.errors import CheckpointError, ObservationError
from tests.testing.models import GOLDEN

FILE = next(Path(GOLDEN).rglob("tokenizer.json")).read_bytes()
TEXTS = [("pick up the cube", None), ("pick up the cube", 3), ("", None), ("\ud800 é中", None), ("a " * 2000, 48)]


def spoilt() -> bytes:
    """A tokenizer that doubles the letter q 24 times."""
    step = {"type": "Replace", "pattern": {"Regex": "q"}, "content": "qq"}
    return json.dumps({**json.loads(FILE), "normalizer": {"type": "Sequence", "normalizers": [step] * 24}}).encode()


def test_a_child_encodes_like_this_process() -> None:
    isolated, local = IsolatedTokenizer(FILE), LocalTokenizer(FILE)
    assert isolated.largest == local.largest
    for text, length in TEXTS:
        assert isolated.encode(text, length) == local.encode(text, length)
    with pytest.raises(ObservationError, match="a prompt has 40000 characters"):
        isolated.encode("a" * 40_000)


def test_a_malformed_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        IsolatedTokenizer(b"{}")


def test_a_text_over_the_limits_ends_the_tokenizer() -> None:
    isolated = IsolatedTokenizer(spoilt())
    assert isolated.encode("pick")
    for text in ("quick " * 50, "pick"):
        with pytest.raises(ObservationError, match=r"0\.5 s or .* bytes to encode a text"):
            isolated.encode(text)


def test_a_killed_child_is_started_again() -> None:
    isolated = IsolatedTokenizer(FILE)
    before = isolated.encode("pick")
    os.kill(isolated._process.pid, signal.SIGKILL)
    isolated._process.wait()
    assert isolated.encode("pick") == before


def test_the_child_ends_with_its_tokenizer() -> None:
    isolated = IsolatedTokenizer(FILE)
    process = isolated._process
    del isolated
    gc.collect()
    assert process.poll() is not None
