"""Fixture: the folder of a policy that is never loaded."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"type": "act"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path
