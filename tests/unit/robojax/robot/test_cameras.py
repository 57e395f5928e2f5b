"""Cameras: a video file through OpenCV, and errors of missing cameras."""

import time
from pathlib import Path

import numpy as np
import pytest

from robojax.robot.cameras import Camera, CameraConfig
from robojax.robot.errors import CameraLost
from tests.testing.waiting import wait_until

cv2 = pytest.importorskip("cv2", reason="the extra 'robot' is not installed")


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    """Write five red pictures of 64x48."""
    file = tmp_path_factory.mktemp("video") / "red.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 30, (64, 48))
    for _ in range(5):
        writer.write(np.full((48, 64, 3), (0, 0, 255), np.uint8))  # Red in BGR.
    writer.release()
    return file


def test_video_file_is_looped_in_rgb_and_rotated(video: Path) -> None:
    camera = Camera("front", CameraConfig("opencv", str(video), 32, 24, 500, rotation=90))
    try:
        wait_until(lambda: camera.pictures >= 12)
        picture = camera.newest(time.monotonic())
    finally:
        camera.close()
    assert picture.shape == (32, 24, 3)
    assert np.abs(picture.astype(int) - (255, 0, 0)).max() < 8


def test_old_pictures_are_not_shown_as_new(video: Path) -> None:
    camera = Camera("front", CameraConfig("opencv", str(video), 64, 48, 30))
    camera.close()
    with pytest.raises(CameraLost, match="gives no more pictures"):
        camera.newest(time.monotonic() + 3)


def test_missing_camera_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CameraLost, match="cannot be opened"):
        Camera("front", CameraConfig("opencv", str(tmp_path / "none.avi"), 64, 48, 30))
