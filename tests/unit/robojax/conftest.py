"""Cameras whose rate does not depend on the load of the machine."""

import time
from typing import Any

import pytest

from robojax.robot import checks
from robojax.robot.cameras import Camera, CameraConfig
from tests.testing.waiting import wait_until


class EvenTime:
    """Replacement for the module ``time`` in `check_robot`: each picture of the camera advances its clock."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.camera: Camera | None = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        pictures = self.camera.pictures + (self.camera.config.fps or 0) * seconds
        wait_until(lambda: self.camera.pictures >= pictures)
        self.now += seconds


@pytest.fixture
def even_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `check_robot` measure the rate of a camera with `EvenTime`."""
    clock = EvenTime()

    class Counted(Camera):
        def __init__(self, name: str, config: CameraConfig, *more: Any):
            super().__init__(name, config, *more)
            clock.camera = self

    monkeypatch.setattr(checks, "time", clock)
    monkeypatch.setattr(checks, "Camera", Counted)
