"""Cameras that are as quick as they say, however busy the machine is."""

import time
from typing import Any

import pytest

from robojax.robot import checks
from robojax.robot.cameras import Camera, CameraConfig


class EvenTime:
    """Stands where the module ``time`` stands in `check_robot`: seconds go by as the camera's pictures come."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.camera: Camera | None = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        wanted = self.camera.pictures + (self.camera.config.fps or 0) * seconds
        until = time.monotonic() + 30
        while self.camera.pictures < wanted:
            assert time.monotonic() < until, "its pictures do not come"
            time.sleep(0.001)
        self.now += seconds


@pytest.fixture
def even_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_robot` counts a camera's pictures by its own clock."""
    clock = EvenTime()

    class Counted(Camera):
        def __init__(self, name: str, config: CameraConfig, *more: Any):
            super().__init__(name, config, *more)
            clock.camera = self

    monkeypatch.setattr(checks, "time", clock)
    monkeypatch.setattr(checks, "Camera", Counted)
