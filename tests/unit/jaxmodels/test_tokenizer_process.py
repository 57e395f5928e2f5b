import gc
import json
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jaxmodels.checkpoints.tokenizer_files import LocalTokenizer
from jaxmodels.checkpoints.tokenizer_process import IsolatedTokenizer
from jaxmodels.errors import CheckpointError, ObservationError
from tests.testing.models import GOLDEN
from tests.testing.waiting import lives

FILE = next(Path(GOLDEN).rglob("tokenizer.json")).read_bytes()
TEXTS = [("pick up the cube", None), ("pick up the cube", 3), ("", None), ("\ud800 é中", None), ("a " * 2000, 48)]


def hostile_tokenizer() -> bytes:
    """Return a tokenizer that doubles the letter q 24 times."""
    step = {"type": "Replace", "pattern": {"Regex": "q"}, "content": "qq"}
    return json.dumps({**json.loads(FILE), "normalizer": {"type": "Sequence", "normalizers": [step] * 24}}).encode()


def test_child_process_encodes_like_this_process() -> None:
    isolated, local = IsolatedTokenizer(FILE), LocalTokenizer(FILE)
    assert isolated.largest == local.largest
    for text, length in TEXTS:
        assert isolated.encode(text, length) == local.encode(text, length)
    with pytest.raises(ObservationError, match="a prompt has 40000 characters"):
        isolated.encode("a" * 40_000)


def test_malformed_file_is_refused_and_leaves_no_process() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        IsolatedTokenizer(b"{}")
    children = [child for child in psutil.Process().children() if lives(child.pid)]  # Zombies are of other tests.
    assert not [child for child in children if "tokenizer_process" in " ".join(child.cmdline())]


def test_text_over_the_limits_ends_the_tokenizer() -> None:
    isolated = IsolatedTokenizer(hostile_tokenizer())
    assert isolated.encode("pick")
    for text in ("quick " * 50, "pick"):
        with pytest.raises(ObservationError, match=r"0\.5 s or .* bytes to encode a text"):
            isolated.encode(text)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_child_is_replaced(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxmodels.checkpoints.tokenizer_process.ANSWER_SECONDS", 0.3)
    isolated = IsolatedTokenizer(FILE)
    before = isolated.encode("pick")
    isolated._process.send_signal(number)
    with suppress(ObservationError):  # A killed child may be noticed before the text is sent.
        isolated.encode("pick up")
    monkeypatch.undo()
    assert isolated.encode("pick") == before


def test_child_process_ends_with_its_tokenizer() -> None:
    isolated = IsolatedTokenizer(FILE)
    process = isolated._process
    del isolated
    gc.collect()
    assert process.poll() is not None
