"""Recordings read again: what a file is about, and its steps; a file that was cut off is read as far as it goes."""

import binascii
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from mcap.exceptions import McapError
from mcap.reader import make_reader
from mcap.records import Channel, Message, Metadata
from mcap.stream_reader import StreamReader

from service.recording import channels
from service.recording.steps import Encoded, Facts, Picture, RecordingError, Step
from service.recording.subject import END, HEAD, Subject

LARGEST_RECORD = 256 << 20
# What a file that was cut off, or that is none, makes the library raise.
_BROKEN = (McapError, EOFError, ValueError, struct.error, KeyError, TypeError, MemoryError, zstandard.ZstdError)


@dataclass(frozen=True)
class Outcome:
    """How a recording ended.

    Attributes:
        state: what its recorder said, or ``interrupted`` when it did not live to say it.
        seconds, episodes, ticks: None where nobody has counted.
    """

    state: str
    seconds: float | None = None
    episodes: int | None = None
    ticks: int | None = None
    dropped: int | None = None


class McapSource:
    """The steps of one recording.

    A tick that was skipped is filled with the step before: what was commanded then was in force still.
    """

    def __init__(self, path: Path):
        """Read what it is about.

        Raises:
            RecordingError: it cannot be read, or is no recording of a session.
        """
        self.path = path
        self.subject = read_subject(path)
        self.outcome = read_outcome(path)
        subject = self.subject
        self.facts = Facts(
            rate=subject.rate,
            joints=subject.joints,
            features=subject.features,
            low=np.array([-np.inf if low is None else low for low in subject.low], np.float32),
            high=np.array([np.inf if high is None else high for high in subject.high], np.float32),
            cameras=subject.cameras,
            robot_type=subject.robot_type,
            task=subject.task,
            policy=subject.policy_path,
            length=self.outcome.ticks,
            is_whole=self.outcome.state != "interrupted",
        )

    def events(self) -> Iterator[tuple[int, str, str]]:
        """Nanoseconds since 1970, code and text of everything that happened."""
        for topic, at, found in self.messages():
            if topic == channels.EVENTS:
                yield at, str(found["name"]), str(found["message"])

    def messages(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Topic, nanoseconds since 1970 and content of every message, in the order in which things happened."""
        topics: dict[int, str] = {}
        with self.path.open("rb") as file:
            try:
                for record in StreamReader(file, record_size_limit=LARGEST_RECORD).records:
                    if isinstance(record, Channel):
                        topics[record.id] = record.topic
                    elif isinstance(record, Message) and record.channel_id in topics:
                        found = json.loads(record.data)
                        if isinstance(found, dict):
                            yield topics[record.channel_id], record.log_time, found
            except _BROKEN:
                return

    def steps(self) -> Iterator[Step]:
        """All steps; an episode begins at its first command with a frame of every camera before it.

        Another one begins where the robot was told to do something else, so that each has one task.
        """
        names, period = self.subject.joints, 1e9 / self.subject.rate
        pictures: dict[str, Picture] = {}
        pose = command = None
        episode, index, started, is_running = -1, 0, 0, False
        before: Step | None = None
        task = self.subject.task
        for topic, at, found in self.messages():
            camera = channels.camera_of(topic)
            if camera is not None:
                pictures[camera] = Encoded(binascii.a2b_base64(str(found.get("data", ""))))
            elif topic == channels.EVENTS and found.get("name") in ("start", "stop"):
                is_running = found["name"] == "start"
                command, before = None, None
            elif topic == channels.EVENTS and found.get("name") == channels.TASK:
                task, before = str(found.get("message", "")), None
            elif topic == channels.JOINTS:
                pose = _values(found, names)
            elif topic == channels.COMMANDS:
                command = _values(found, names)
            elif topic == channels.TICKS and is_running:
                if pose is None or command is None or not set(self.subject.cameras) <= set(pictures):
                    continue
                if before is None:
                    episode, index, started = episode + 1, 0, at
                else:
                    slot = max(round((at - started) / period), index + 1)
                    for skipped in range(index + 1, slot):
                        yield Step(episode, skipped, before.state, before.action, before.pictures, task)
                    index = slot
                before = Step(episode, index, pose, command, dict(pictures), task)
                yield before


def read_subject(path: Path) -> Subject:
    """What a recording is about.

    Raises:
        RecordingError: it cannot be read, or is no recording of a session.
    """
    wanted = "wanted an .mcap that `robojax serve` recorded, or a LeRobotDataset v3 folder"
    try:
        with path.open("rb") as file:
            for record in StreamReader(file, record_size_limit=LARGEST_RECORD).records:
                if isinstance(record, Metadata) and record.name == HEAD:
                    return Subject.from_metadata(record.metadata)
                if isinstance(record, Message):
                    break
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except _BROKEN as error:
        raise RecordingError(f"{path.name} cannot be read ({type(error).__name__}: {error}); {wanted}") from error
    raise RecordingError(f"{path.name} does not say what it is about; {wanted}")


def read_outcome(path: Path) -> Outcome:
    """How a recording ended, from its end alone."""
    try:
        with path.open("rb") as file:
            return _outcome(file)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except _BROKEN:
        return Outcome("interrupted")


def _outcome(file: BinaryIO) -> Outcome:
    reader = make_reader(file)
    summary = reader.get_summary()
    if summary is None or summary.statistics is None:
        return Outcome("interrupted")
    ticks = sum(
        summary.statistics.channel_message_counts.get(channel.id, 0)
        for channel in summary.channels.values()
        if channel.topic == channels.TICKS
    )
    for metadata in reader.iter_metadata():
        if metadata.name == END:
            end = {name: json.loads(value) for name, value in metadata.metadata.items()}
            return Outcome(str(end["state"]), float(end["seconds"]), int(end["episodes"]), ticks, int(end["dropped"]))
    return Outcome("interrupted", ticks=ticks)


def _values(found: dict[str, Any], names: tuple[str, ...]) -> np.ndarray:
    return np.array([found["position"][name] for name in names], np.float32)
