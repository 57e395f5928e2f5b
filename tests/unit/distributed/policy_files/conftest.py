"""A policy's folder."""

from pathlib import Path

import pytest

from tests.unit.distributed.policy_files import files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return files.write(tmp_path / "policy")
