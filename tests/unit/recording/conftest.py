"""Fixture: recordings of a simulated robot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.recording.mcap_format import RecordingHeader
from service.recording.recorder import Recorder
from tests.testing.recordings import play, subject

Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path) -> Record:
    """Return a function that makes a recording and closes it."""

    def make(name: str = "arm-1", about: RecordingHeader | None = None, **how: Any) -> Path:
        path = tmp_path / f"{name}.mcap"
        recorder = Recorder(path, about or subject())
        play(recorder, **how)
        recorder.close()
        assert recorder.join(60)
        assert recorder.state == "off", recorder.reason
        return path

    return make
