"""OpenCV cameras, each read by a thread that keeps the newest picture."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from robojax.robot.bus import INSTALL
from robojax.robot.errors import CameraLost, RobotError

TURNS = {0: None, 90: "ROTATE_90_CLOCKWISE", 180: "ROTATE_180", -90: "ROTATE_90_COUNTERCLOCKWISE"}
BACKENDS = {"ANY": 0, "V4L2": 200}
FRAME_TIMEOUT = 2.0  # seconds without a picture after which a camera counts as lost


@dataclass(frozen=True)
class CameraConfig:
    """Config of one camera, with LeRobot's fields.

    Attributes:
        type: "opencv" for a device or a video file, "simulated" for the scene of the simulated arm (with a real arm: a
            test picture).
        index_or_path: number or path of the device, or path of a video file, which is played in a loop; for a simulated
            camera the name of the scene's camera, by default this camera's name.
        width, height: size of the pictures before rotation, which is requested from the device.
        rotation: clockwise degrees: 0, 90, 180 or -90.
        fourcc: the device's pixel format, e.g. "MJPG"; None for its default.
        warmup_s: additional seconds for the first picture.
    """

    type: str = "opencv"
    index_or_path: int | str | None = None
    width: int | None = None
    height: int | None = None
    fps: float | None = None
    color_mode: str = "rgb"
    rotation: int = 0
    fourcc: str | None = None
    backend: str = "ANY"
    warmup_s: float = 1.0

    def __post_init__(self) -> None:
        wrong = []
        if self.type not in ("opencv", "simulated"):
            wrong.append(f"type is {self.type!r}; wanted opencv or simulated")
        if self.type == "opencv" and (
            isinstance(self.index_or_path, bool) or not isinstance(self.index_or_path, int | str)
        ):
            wrong.append("index_or_path is missing: a number, a device like /dev/video0, or a video file")
        for name in ("width", "height", "fps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 10_000:
                wrong.append(f"{name} is {value!r}, wanted a positive number")
        if self.color_mode == "bgr":
            wrong.append("color_mode bgr: servers need RGB; omit it")
        elif self.color_mode != "rgb":
            wrong.append(f"color_mode is {self.color_mode!r}; wanted rgb")
        if self.rotation not in TURNS:
            wrong.append(f"rotation is {self.rotation!r}; wanted 0, 90, 180 or -90")
        if self.backend not in BACKENDS:
            wrong.append(f"backend is {self.backend!r}; wanted ANY or V4L2")
        if self.fourcc is not None and len(self.fourcc) != 4:
            wrong.append(f"fourcc is {self.fourcc!r}, wanted four letters, e.g. MJPG")
        if wrong:
            raise ValueError("; ".join(wrong))


class PictureSource(NamedTuple):
    """Source of a camera's pictures, for one thread.

    ``read`` waits for the next picture, uint8 (h, w, 3) RGB; it returns None after a failed reading.
    """

    read: Callable[[], np.ndarray | None]
    close: Callable[[], None]


OpenSource = Callable[[str, CameraConfig], PictureSource]


class Camera:
    """An open camera, read by a thread until ``close``.

    Attributes:
        pictures: number of pictures so far.
    """

    def __init__(self, name: str, config: CameraConfig, open_simulated: OpenSource | None = None):
        """Open the camera and wait for its first picture.

        ``open_simulated`` opens the source of a "simulated" camera; None for a test picture.

        Raises:
            RobotError: OpenCV is not installed, the camera cannot be opened, or no picture arrived.
        """
        self.name, self.config, self.pictures = name, config, 0
        self._newest: tuple[np.ndarray, float] | None = None
        self._why: str | None = None
        self._end, self._first = threading.Event(), threading.Event()
        opener = (open_simulated or _open_test_picture) if config.type == "simulated" else _open_device
        source = opener(name, config)
        self._thread = threading.Thread(target=self._run, args=(source,), name=f"camera-{name}", daemon=True)
        self._thread.start()
        if not self._first.wait(FRAME_TIMEOUT + config.warmup_s) or self._why is not None:
            self.close()
            raise CameraLost(
                f"camera {name!r} ({config.index_or_path or config.type}) gives no picture: "
                f"{self._why or 'nothing arrived'}",
                "another program may use it; try a smaller size, fourcc MJPG, or another port",
            )

    def newest(self, now: float) -> np.ndarray:
        """Return the newest picture: uint8 (h, w, 3), RGB; raise ``CameraLost`` if it is too old."""
        assert self._newest is not None, "the constructor waited for the first picture"
        picture, observed_at = self._newest
        if self._why is not None or now - observed_at > FRAME_TIMEOUT:
            raise CameraLost(
                f"camera {self.name!r} gives no more pictures: {self._why or f'none for {now - observed_at:.1f} s'}",
                "check its cable",
            )
        return picture

    def close(self) -> None:
        """End the thread, which closes the device unless its driver blocks."""
        self._end.set()
        self._thread.join(FRAME_TIMEOUT)

    def _run(self, source: PictureSource) -> None:
        failed = 0
        try:
            while not self._end.is_set():
                picture = source.read()
                if picture is None:
                    failed += 1
                    if failed > 10:
                        self._why = "reading it fails"
                        return
                    self._end.wait(0.02)
                    continue
                failed = 0
                self._newest = (picture, time.monotonic())
                self.pictures += 1
                self._first.set()
        except Exception as error:
            # Drivers may raise any exception, which `newest` must report.
            self._why = f"{type(error).__name__}: {error}"
        finally:
            self._first.set()
            source.close()


def _open_device(name: str, config: CameraConfig) -> PictureSource:
    try:
        import cv2
    except ImportError as error:
        raise RobotError(f"{error.name} is not installed, which reads cameras", INSTALL) from error
    device: Any = config.index_or_path
    device = int(device) if isinstance(device, str) and device.isdigit() else device
    is_file = isinstance(device, str) and Path(device).is_file()
    capture = cv2.VideoCapture(device, cv2.CAP_ANY if is_file else BACKENDS[config.backend])
    if not capture.isOpened():
        capture.release()
        raise CameraLost(
            f"camera {name!r} ({device}) cannot be opened",
            "list the cameras with lerobot-find-cameras opencv, or v4l2-ctl --list-devices",
        )
    if not is_file:
        if config.fourcc is not None:
            capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*config.fourcc))
        for which, value in (
            (cv2.CAP_PROP_FRAME_WIDTH, config.width),
            (cv2.CAP_PROP_FRAME_HEIGHT, config.height),
            (cv2.CAP_PROP_FPS, config.fps),
            (cv2.CAP_PROP_BUFFERSIZE, 1),
        ):
            capture.set(which, float(value or 0))
    turn = None if TURNS[config.rotation] is None else getattr(cv2, str(TURNS[config.rotation]))
    size = (int(config.width or 0), int(config.height or 0))
    due = time.monotonic()

    def read() -> np.ndarray | None:
        nonlocal due
        if is_file:
            # Play a file at its rate.
            due = max(due + 1 / float(config.fps or 30), time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))
        is_good, picture = capture.read()
        if not is_good and is_file:
            capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
            is_good, picture = capture.read()
        if not is_good or picture is None:
            return None
        if (picture.shape[1], picture.shape[0]) != size:
            if not is_file:
                raise ValueError(f"it gives {picture.shape[1]}x{picture.shape[0]}, wanted {size[0]}x{size[1]}")
            picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
        picture = cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
        return picture if turn is None else cv2.rotate(picture, turn)

    return PictureSource(read, capture.release)


def _open_test_picture(name: str, config: CameraConfig) -> PictureSource:
    height, width = int(config.height or 0), int(config.width or 0)
    ground = np.zeros((height, width, 3), np.uint8)
    ground[..., 1] = np.linspace(0, 200, width, dtype=np.uint8)
    ground[..., 2] = np.linspace(0, 200, height, dtype=np.uint8)[:, None]
    count = 0

    def read() -> np.ndarray:
        nonlocal count
        time.sleep(1 / float(config.fps or 30))
        count += 1
        picture = ground.copy()
        left = count * 4 % max(1, width - 8)
        picture[: height // 4, left : left + 8] = 255
        return picture

    return PictureSource(read, lambda: None)
