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


def start_recorder(folder: Path, *limits: RecorderLimits, **options: Any) -> Recorder:
    """Return a recorder that has begun an episode."""
    recorder = Recorder(folder / "a.mcap", options.pop("about", None) or subject(), *limits, **options)
    recorder.begin_episode("by request")
    return recorder


class LimitedFile:
    """File that accepts this number of bytes and then fails as a full disk does."""

    def __init__(self, path: Path, room: int, error: int):
        self._file, self._room, self._error = open_new_file(path), room, error

    def write(self, data) -> int:
        # The kernel makes a short write before it reports the error.
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


def test_all_recorded_ticks_are_in_the_file_without_gaps(record):
    source = McapSource(record(episodes=2, ticks=12))
    assert source.header.session_id == "arm"
    assert (source.outcome.state, source.outcome.episodes, source.outcome.ticks) == ("off", 2, 24)
    assert [(code, text) for _, code, text in source.events()] == [("start", "by request"), ("stop", "by request")] * 2
    steps = list(source.steps())
    assert [(step.episode, step.index) for step in steps] == [
        (episode, index) for episode in range(2) for index in range(12)
    ]
    np.testing.assert_array_equal(steps[5].state, np.full(6, 5.0))
    np.testing.assert_array_equal(steps[5].action, np.full(6, 5.5))
    assert abs(int(steps[5].pictures["front"].pixels[0, 0, 0]) - 45) <= 2
    steps = list(McapSource(record("skipped", episodes=1, skipped=(4, 5))).steps())
    assert [step.index for step in steps] == list(range(12))
    assert [float(step.action[0]) for step in steps[3:7]] == [3.5, 3.5, 3.5, 6.5]


def test_images_and_events_use_schemas_of_foxglove(record):
    with record().open("rb") as file:
        summary = make_reader(file).get_summary()
    found = {channel.topic: summary.schemas[channel.schema_id].name for channel in summary.channels.values()}
    assert found["/cameras/front"] == "foxglove.CompressedImage"
    assert found["/events"] == "foxglove.Log"
    assert {channel.message_encoding for channel in summary.channels.values()} == {"json"}
    assert {schema.encoding for schema in summary.schemas.values()} == {"jsonschema"}


def test_a_new_instruction_begins_an_episode(tmp_path):
    task = ["pick up the cube"]
    recorder = start_recorder(tmp_path, about=subject(cameras=()), get_task=lambda: task[0])
    now = time.monotonic()
    recorder.on_tick(tick(0, now))
    recorder.on_tick(tick(1, now + 1 / 20))
    recorder.end_episode("by request")
    task[0] = "put it down"
    recorder.begin_episode("by request")
    recorder.on_tick(tick(2, now + 2 / 20))
    task[0] = "wave"
    # The robot follows the old plan until a chunk for the new instruction arrives.
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


def test_holds_and_changes_of_the_policy_are_events(tmp_path):
    commits = iter(["abc", "abc", "def"])
    recorder = start_recorder(tmp_path, get_commit=lambda: next(commits))
    now = time.monotonic()
    for number, hold in enumerate((None, "camera_stale", "camera_stale", None)):
        recorder.on_tick(tick(number, now + number / 20, hold=hold))
    for _ in range(3):
        recorder.on_chunk(np.zeros((4, 6), np.float32), now, now)
    closed(recorder)
    found = [(code, text) for _, code, text in McapSource(tmp_path / "a.mcap").events()]
    holds = [("hold", "camera_stale"), ("hold", "the robot may move again")]
    assert found[1:-1] == [*holds, ("policy", "another policy: def")]


@pytest.mark.timed
def test_the_recorder_delays_the_control_loop_by_microseconds(tmp_path):
    recorder = start_recorder(tmp_path)
    image, now = noise((480, 640)), time.monotonic()
    ticks = [tick(number, now + number / 50) for number in range(200)]
    frames, spent = [], []
    for current in ticks:
        began = time.perf_counter()
        recorder.on_frame("front", image, current.at)
        between = time.perf_counter()
        recorder.on_tick(current)
        frames.append(between - began)
        spent.append(time.perf_counter() - between)
    closed(recorder)
    assert statistics.median(frames) < 20e-6
    assert statistics.median(spent) < 20e-6


def test_a_slow_disk_drops_frames_but_never_blocks(tmp_path):
    gate = threading.Event()

    def stuck(path):
        gate.wait(60)
        return open_new_file(path)

    recorder = start_recorder(tmp_path, RecorderLimits(queue_bytes=300_000), open_file=stuck)
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
def test_a_failed_write_leaves_a_readable_file(tmp_path, error, state):
    recorder = start_recorder(tmp_path, open_file=lambda path: LimitedFile(path, 40_000, error))
    now, image = time.monotonic(), noise()
    for number in range(400):
        recorder.on_frame("front", np.roll(image, number, 0), now + number / 50)
        recorder.on_frame("top", image, now + number / 50)
        recorder.on_tick(tick(number, now + number / 50))
    until(recorder, state)
    recorder.on_tick(tick(401, now + 9))  # The tick is ignored.
    assert recorder.join(60)
    assert os.strerror(error) in recorder.reason
    assert str(tmp_path) not in recorder.reason
    assert recorder.get_stats()["state"] == state
    with (tmp_path / "a.mcap").open("rb") as file:
        make_reader(file).get_summary()  # The file has a valid end.
    assert McapSource(tmp_path / "a.mcap").outcome.state == "interrupted"


def test_a_part_of_the_disk_stays_free(tmp_path):
    recorder = Recorder(tmp_path / "a.mcap", subject(), disk_usage=lambda folder: (100 << 30, 0, (1 << 30) - 1))
    until(recorder, "disk_full")
    assert "1024 MiB are to stay free" in recorder.reason
    assert not (tmp_path / "a.mcap").exists()


def test_a_recording_ends_readable_at_its_size_limit(tmp_path):
    recorder = start_recorder(tmp_path, RecorderLimits(bytes=1_500_000), about=subject(cameras=("front",)))
    now, image = time.monotonic(), noise((240, 320))
    for number in range(60):
        recorder.on_frame("front", np.roll(image, number, 0), now + number / 50)
        recorder.on_tick(tick(number, now + number / 50))
    until(recorder, "limit")
    assert recorder.join(60)
    outcome = McapSource(tmp_path / "a.mcap").outcome
    assert outcome.state == "limit"
    assert 0 < outcome.ticks < 60
