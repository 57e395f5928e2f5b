"""Test data for recorders: a robot's header, numbered frames, and ticks."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from service.control.joints import SO100
from service.control.observers import Tick
from service.recording.mcap_format import RecordingHeader, feature_names, replace_infinite
from service.recording.recorder import Recorder

RATE = 20.0


def subject(**more: Any) -> RecordingHeader:
    features, robot = feature_names(SO100)
    made = RecordingHeader(
        session_id="arm",
        policy_path="policies/act",
        policy_type="act",
        commit="abc",
        rate=RATE,
        action_rate=RATE,
        joints=tuple(joint.name for joint in SO100),
        features=features,
        low=replace_infinite([joint.low for joint in SO100]),
        high=replace_infinite([joint.high for joint in SO100]),
        cameras=("front", "top"),
        task="pick up the cube",
        is_dry_run=False,
        version="0",
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        robot_type=robot,
    )
    return replace(made, **more)


def level(number: int) -> int:
    return 20 + 5 * number


def frame(number: int, size: tuple[int, int] = (48, 64)) -> np.ndarray:
    return np.full((*size, 3), level(number), np.uint8)


def noise(size: tuple[int, int] = (120, 160)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)


def tick(number: int, at: float, **more: Any) -> Tick:
    values = {"command": np.full(6, number + 0.5, np.float32), "is_sent": True, "hold": None}
    return Tick(at=at, pose=np.full(6, number, np.float32), **values | more)


def play(
    recorder: Recorder,
    *,
    episodes: int = 2,
    ticks: int = 12,
    skipped: tuple[int, ...] = (),
    size: tuple[int, int] = (48, 64),
    cameras: tuple[str, ...] = ("front", "top"),
) -> None:
    """Record episodes of this many ticks on a separate clock, without the skipped ticks."""
    start = time.monotonic()
    for episode in range(episodes):
        for camera in cameras:
            recorder.on_frame(camera, frame(0, size), start)
        recorder.begin_episode("by request")
        for number in range(ticks):
            at = start + (episode * ticks + number) / RATE
            if number in skipped:
                continue
            if number:
                for camera in cameras:
                    recorder.on_frame(camera, frame(number, size), at - 0.001)
            recorder.on_tick(tick(number, at))
        recorder.end_episode("by request")
