import errno
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader

from service.recording.mcap_files import McapSource
from service.recording.recorder import Recorder, RecorderLimits, open_new_file
from tests.testing.recordings import noise, subject, tick


def closed(recorder: Recorder) -> Recorder:
    recorder.close()
    assert recorder.join(60)
    return recorder


def until(recorder: Recorder, state: str) -> None:
    deadline = time.monotonic() + 60
    while recorder.state != state:
        assert time.monotonic() < deadline, (recorder.state, recorder.reason)
        time.sleep(0.01)


def begun(folder: Path, *limits: RecorderLimits, **options: Any) -> Recorder:
    """A recorder that has begun an episode."""
    recorder = Recorder(folder / "a.mcap", options.pop("about", None) or subject(), *limits, **options)
    recorder.begin_episode("by request")
    return recorder


class Narrow:
    """A file that takes so many bytes, and then fails as a disk does."""

    def __init__(self, path: Path, room: int, error: int):
        self._file, self._room, self._error = open_new_file(path), room, error

    def write(self, data) -> int:
        # A short write first, as the kernel does it.
        count = min(len(data), self._room)
        if not count:
            raise OSError(self._error, os.strerror(self._error))
        self._room -= count
        return self._file.write(data[:count])

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._room += 1000

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_what_was_handed_over_is_in_the_file_without_gaps(record):
    source = McapSource(record(episodes=2, ticks=12))
    assert source.header.session_id == "arm"
    assert (source.outcome.state, source.outcome.episodes, source.outcome.ticks) == ("off", 2, 24)
    assert [(code, text) for _, code, text in source.events()] == [("start", "by request"), ("stop", "by request")] * 2
    steps = list(source.steps())
    assert [(step.episode, step.index) for step in steps] == [(one, two) for one in range(2) for two in range(12)]
    np.testing.assert_array_equal(steps[5].state, np.full(6, 5.0))
    np.testing.assert_array_equal(steps[5].action, np.full(6, 5.5))
    assert abs(int(steps[5].pictures["front"].pixels[0, 0, 0]) - 45) <= 2
    steps = list(McapSource(record("skipped", episodes=1, skipped=(4, 5))).steps())
    assert [step.index for step in steps] == list(range(12))
    assert [float(step.action[0]) for step in steps[3:7]] == [3.5, 3.5, 3.5, 6.5]


def test_foxglove_knows_the_schemas_of_pictures_and_events(record):
    with record().open("rb") as file:
        summary = make_reader(file).get_summary()
    found = {channel.topic: summary.schemas[channel.schema_id].name for channel in summary.channels.values()}
    assert found["/cameras/front"] == "foxglove.CompressedImage"
    assert found["/events"] == "foxglove.Log"
    assert {channel.message_encoding for channel in summary.channels.values()} == {"json"}
    assert {schema.encoding for schema in summary.schemas.values()} == {"jsonschema"}


def test_new_instruction_begins_an_episode(tmp_path):
    said = ["pick up the cube"]
    recorder = begun(tmp_path, about=subject(cameras=()), get_task=lambda: said[0])
    now = time.monotonic()
    recorder.on_tick(tick(0, now))
    recorder.on_tick(tick(1, now + 1 / 20))
    recorder.end_episode("by request")
    said[0] = "put it down"
    recorder.begin_episode("by request")
    recorder.on_tick(tick(2, now + 2 / 20))
    said[0] = "wave"
    # What was planned before is done until there is a chunk that follows the new instruction.
    recorder.on_tick(tick(3, now + 3 / 20))
    recorder.on_chunk(np.zeros((4, 6), np.float32), now, now)
    recorder.on_tick(tick(4, now + 4 / 20))
    recorder.end_episode("by request")
    closed(recorder)
    steps = McapSource(tmp_path / "a.mcap").steps()
    assert [(step.episode, step.index, float(step.state[0]), step.task) for step in steps] == [
        (0, 0, 0, "pick up the cube"),
        (0, 1, 1, "pick up the cube"),
        (1, 0, 2, "put it down"),
        (1, 1, 3, "put it down"),
        (2, 0, 4, "wave"),
    ]


def test_holds_and_other_policies_are_events(tmp_path):
    commits = iter(["abc", "abc", "def"])
    recorder = begun(tmp_path, get_commit=lambda: next(commits))
    now = time.monotonic()
    for number, hold in enumerate((None, "camera_stale", "camera_stale", None)):
        recorder.on_tick(tick(number, now + number / 20, hold=hold))
    for _ in range(3):
        recorder.on_chunk(np.zeros((4, 6), np.float32), now, now)
    closed(recorder)
    found = [(code, text) for _, code, text in McapSource(tmp_path / "a.mcap").events()]
    holds = [("hold", "camera_stale"), ("hold", "the robot may move again")]
    assert found[1:-1] == [*holds, ("policy", "another policy: def")]


def test_handing_over_takes_microseconds(tmp_path):
    recorder = begun(tmp_path)
    image, now = noise((480, 640)), time.monotonic()
    ticks = [tick(number, now + number / 50) for number in range(200)]
    frames, spent = [], []
    for one in ticks:
        began = time.perf_counter()
        recorder.on_frame("front", image, one.at)
        between = time.perf_counter()
        recorder.on_tick(one)
        frames.append(between - began)
        spent.append(time.perf_counter() - between)
    closed(recorder)
    assert statistics.median(frames) < 20e-6
    assert statistics.median(spent) < 20e-6


def test_a_disk_that_is_too_slow_costs_frames_and_never_a_wait(tmp_path):
    gate = threading.Event()

    def stuck(path):
        gate.wait(60)
        return open_new_file(path)

    recorder = begun(tmp_path, RecorderLimits(queue_bytes=300_000), open_file=stuck)
    now, image = time.monotonic(), noise()
    for number in range(40):
        recorder.on_frame("front", image, now + number / 20)
        recorder.on_tick(tick(number, now + number / 20))
    assert recorder.dropped == 40 - 300_000 // image.nbytes
    gate.set()
    closed(recorder)
    outcome = McapSource(tmp_path / "a.mcap").outcome
    assert (outcome.state, outcome.ticks, outcome.dropped) == ("off", 40, recorder.dropped)


@pytest.mark.parametrize(
    ("error", "state"),
    [(errno.ENOSPC, "disk_full"), (errno.EFBIG, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "failed")],
)
def test_failed_write_leaves_a_readable_file(tmp_path, error, state):
    recorder = begun(tmp_path, open_file=lambda path: Narrow(path, 40_000, error))
    now, image = time.monotonic(), noise()
    for number in range(400):
        recorder.on_frame("front", np.roll(image, number, 0), now + number / 50)
        recorder.on_frame("top", image, now + number / 50)
        recorder.on_tick(tick(number, now + number / 50))
    until(recorder, state)
    recorder.on_tick(tick(401, now + 9))  # goes nowhere, and hurts nobody
    assert recorder.join(60)
    assert os.strerror(error) in recorder.reason
    assert str(tmp_path) not in recorder.reason
    assert recorder.get_stats()["state"] == state
    with (tmp_path / "a.mcap").open("rb") as file:
        make_reader(file).get_summary()  # it ends as a file does
    assert McapSource(tmp_path / "a.mcap").outcome.state == "interrupted"


def test_a_part_of_the_disk_stays_free(tmp_path):
    recorder = Recorder(tmp_path / "a.mcap", subject(), disk_usage=lambda folder: (100 << 30, 0, (1 << 30) - 1))
    until(recorder, "disk_full")
    assert "1024 MiB are to stay free" in recorder.reason
    assert not (tmp_path / "a.mcap").exists()


def test_a_recording_has_a_limit_and_ends_whole(tmp_path):
    recorder = begun(tmp_path, RecorderLimits(bytes=1_500_000), about=subject(cameras=("front",)))
    now, image = time.monotonic(), noise((240, 320))
    for number in range(60):
        recorder.on_frame("front", np.roll(image, number, 0), now + number / 50)
        recorder.on_tick(tick(number, now + number / 50))
    until(recorder, "limit")
    assert recorder.join(60)
    outcome = McapSource(tmp_path / "a.mcap").outcome
    assert outcome.state == "limit"
    assert 0 < outcome.ticks < 60
