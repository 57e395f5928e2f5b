"""Recordings with false sizes, pipes, damage at any byte, killed processes, and concurrent exports."""

import fcntl
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lz4.frame as lz4
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from mcap.data_stream import RecordBuilder
from mcap.records import Channel, Chunk, DataEnd, Footer, Header, Message, Metadata, Schema
from mcap.writer import MCAP0_MAGIC
from typer.testing import CliRunner

from jaxmodels.data import DatasetWriter, open_dataset, table_files
from jaxmodels.errors import DatasetError
from robojax.cli.recordings import app as command
from service.recording import mcap_files, mcap_writer
from service.recording import recorder as recorder_module
from service.recording.dataset import write_dataset
from service.recording.library import RecordingLibrary, open_source
from service.recording.mcap_files import McapSource
from service.recording.mcap_format import HEADER_METADATA
from service.recording.recorder import Recorder, RecorderLimits
from service.recording.steps import RecordingError
from tests.testing.recordings import play, subject
from tests.testing.waiting import wait_until
from tests.unit.recording.conftest import record

__all__ = ["record"]
ROOT = Path(__file__).parents[2]
# Memory in bytes above the need of the imports; the claimed sizes are far larger.
ROOM = 600 << 20
# Memory in bytes for reading the steps of a file: a few chunks of the maximum size.
ENOUGH = 4 * mcap_files.MAX_RECORD


def built(*records: Any, about: dict[str, str] | None = None, ended: bool = True) -> bytes:
    file = RecordBuilder()
    file.write(MCAP0_MAGIC)
    Header("", "robojax").write(file)
    Metadata(HEADER_METADATA, subject(cameras=()).to_metadata() if about is None else about).write(file)
    for one in records:
        file.write(one) if isinstance(one, bytes) else one.write(file)
    if ended:
        DataEnd(0).write(file)
        Footer(0, 0, 0).write(file)
        file.write(MCAP0_MAGIC)
    return file.end()


def chunk(content: bytes, size: int | None = None, *, data: bytes | None = None, compression: str = "zstd") -> Chunk:
    data = zstandard.compress(content) if data is None else data
    return Chunk(compression, data, 0, 0, 0, len(content) if size is None else size)


def zeros(size: int) -> bytes:
    """Return a frame that decompresses to this number of zeros, compressed piece by piece."""
    packing = zstandard.ZstdCompressor(level=3).compressobj(size=size)
    pieces = [packing.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*pieces, packing.flush()])


def windowed(content: bytes) -> bytes:
    """Return a frame whose decompression needs a window of 128 MiB, independent of its content."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    packing = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packing.compress(content) + packing.flush()


def message(topic: str, data: bytes) -> bytes:
    inside = RecordBuilder()
    Schema(1, b"{}", "jsonschema", "x").write(inside)
    Channel(1, topic, "json", {}, 1).write(inside)
    Message(1, 0, data, 0, 0).write(inside)
    return inside.end()


def long_record(kind: int, length: int) -> bytes:
    return bytes([kind]) + length.to_bytes(8, "little")


LOOK = """
    import resource, sys
    from pathlib import Path
    import robojax.cli.recordings as command
    from service.recording.library import open_source
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + %d, used + %d))
    from typer.testing import CliRunner
    found = CliRunner().invoke(command.app, ["info", sys.argv[1]])
    print(found.exit_code, repr(found.exception), found.output)
"""


def test_64_kb_bomb_is_refused_with_its_name_and_both_sizes(tmp_path: Path) -> None:
    """``robojax recordings info`` runs in a process with limited memory and time."""
    path = tmp_path / "bomb.mcap"
    path.write_bytes(built(chunk(b"", 2 << 30, data=zeros(2 << 30))))
    assert path.stat().st_size < 200_000
    run = run_script(textwrap.dedent(LOOK) % (ROOM, ROOM), path)
    assert run.stdout.startswith("2 ")
    assert f"bomb.mcap: the chunk that ends at byte {path.stat().st_size - 50}" in run.stdout
    assert str(2 << 30) in run.stdout
    assert str(mcap_files.MAX_RECORD) in run.stdout


def run_script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, (run.returncode, run.stdout, run.stderr)
    return run


# Content of a file -> expected result: the message of RecordingError (refused) or of the reported damage.
CLAIMS: dict[str, tuple[Callable[[], bytes], str]] = {
    "chunk of more than it claims": (lambda: built(chunk(b"", 1000, data=zeros(1 << 30))), "has more"),
    "chunk of less than it claims": (lambda: built(chunk(b"", 1000, data=zstandard.compress(b"1"))), "and has 1"),
    "many chunks of zeros": (lambda: built(*[chunk(b"", 8 << 20, data=zeros(8 << 20))] * 40), "kind 0"),
    "many chunks": (lambda: built(*[chunk(message("/a", b'"' + b" " * (8 << 20) + b'"'))] * 40), "times the file"),
    "a record of 2^63 bytes": (lambda: built(long_record(6, 1 << 63)), "exceeds limit 33554432"),
    "a record of 2^64-1 bytes": (lambda: built(long_record(5, (1 << 64) - 1)), "exceeds limit 33554432"),
    "a hole": (lambda: built(bytes(100_000)), "kind 0"),
    "a message without a head": (lambda: built(long_record(5, 3) + b"abc"), "has -19 bytes"),
    "deep": (lambda: built(chunk(message("/events", b"[" * 50_000))), "Recursion"),
    "wide": (lambda: built(chunk(message("/events", b"[" + b"[]," * 1_000_000 + b"0]"))), "values; allowed"),
    "another compression": (lambda: built(chunk(b"x", data=b"x", compression="brotli")), "compressed with 'brotli'"),
    "many digits": (lambda: built(chunk(message("/events", b"9" * 100_000))), "digits"),
    "lz4 of more than it claims": (
        lambda: built(chunk(b"", 1000, data=lz4.compress(bytes(1 << 29)), compression="lz4")), "has more",
    ),
    "a window of 128 MiB": (lambda: built(chunk(b"", 1000, data=windowed(bytes(1000)))), "too much memory"),
    "a chunk of zeros": (lambda: built(chunk(b"", 64 << 20, data=zeros(64 << 20))), "claims 67108864 bytes"),
    "a record of 33 MiB": (lambda: built(long_record(5, 33 << 20) + bytes(33 << 20)), "length 34603008 that exceeds"),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_false_sizes_in_a_file_are_refused(tmp_path: Path, claim: str) -> None:
    build, words = CLAIMS[claim]
    path = tmp_path / "a.mcap"
    path.write_bytes(build())
    source = McapSource(path)
    source.outcome = mcap_files.RecordingOutcome("off")  # As if the file had been closed.
    found, message = [], ""
    tracemalloc.start()
    try:
        found = list(source.steps())
    except RecordingError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < ENOUGH
    assert found == []
    message = message or source.damage or ""
    assert "a.mcap" in message
    assert words in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("rate", rate) for rate in (1e-300, 1e300, 0, -1, "20", True, None, 10**400)],
        *[("wall_ns", at) for at in ("0", -1, 1 << 70, None)],
        *[("joints", names) for names in ("Rotation", [1], [["a"]], ["a"] * 6, {}, ["x" * 1000] * 6)],
        ("low", [None] * 5 + ["0"]),
        ("high", [1e308] * 6),
        ("session_id", {"a": 1}),
        ("owner", ["ann"]),
        ("limits", "none"),
    ],
)
def test_each_value_of_the_metadata_is_checked(tmp_path: Path, name: str, value: object) -> None:
    about = {**subject().to_metadata(), name: json.dumps(value)}
    path = tmp_path / "a.mcap"
    path.write_bytes(built(about=about))
    with pytest.raises(RecordingError, match=rf"a\.mcap cannot be read .*({name}|differ in number|digits)"):
        McapSource(path)
    # A hostile file does not prevent the listing of other files.
    (entry,) = RecordingLibrary(tmp_path).list_entries()
    assert entry.state == "unreadable"


def test_header_is_searched_only_at_the_beginning(tmp_path: Path) -> None:
    path, about = tmp_path / "a.mcap", subject(cameras=()).to_metadata()
    whole = built(about=about)
    for size, is_found in ((mcap_files.MAX_HEADER // 2, True), (mcap_files.MAX_HEADER, False)):
        start = len(MCAP0_MAGIC)
        path.write_bytes(whole[:start] + long_record(0x80, size) + bytes(size) + whole[start:])
        if is_found:
            assert McapSource(path).header.cameras == ()
        else:
            with pytest.raises(RecordingError, match=r"a\.mcap cannot be read \(its first \d+ bytes have no header"):
                McapSource(path)


def test_size_of_the_index_is_limited(tmp_path: Path) -> None:
    path, start = tmp_path / "a.mcap", len(built(ended=False))
    with path.open("wb") as file:  # A sparse file.
        file.write(built(ended=False))
        file.seek(mcap_files.MAX_SUMMARY + 1, os.SEEK_CUR)
        end = RecordBuilder()
        Footer(start, 0, 0).write(end)
        file.write(end.end() + MCAP0_MAGIC)
    with pytest.raises(RecordingError, match=f"its index has {mcap_files.MAX_SUMMARY + 1} bytes"):
        McapSource(path)


def test_number_of_episodes_is_limited(record, monkeypatch: pytest.MonkeyPatch) -> None:
    source = McapSource(record(episodes=3, size=(16, 16)))
    assert len({step.episode for step in source.steps()}) == 3
    monkeypatch.setattr(mcap_files, "MAX_EPISODES", 2)
    with pytest.raises(RecordingError, match="more episodes than the 2 allowed"):
        list(source.steps())


def test_gaps_of_years_are_not_filled_with_steps(record, tmp_path: Path) -> None:
    path = record(episodes=1)
    source = McapSource(path)
    whole = list(source.messages())
    late = [(topic, at + (10**18 if number > len(whole) // 2 else 0), found)
            for number, (topic, at, found) in enumerate(whole)]  # fmt: skip
    source.messages = lambda: iter(late)  # type: ignore[method-assign]
    steps = list(itertools.islice(source.steps(), 100))  # The complete list would exceed the memory.
    assert len(steps) == 12
    assert {step.episode for step in steps} == {0, 1}


@pytest.mark.parametrize("name", ["a.mcap", "dataset/meta/episodes.jsonl", "dataset/meta/info.json"])
def test_pipe_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        info = {"codebase_version": "v2.1", "fps": 1, "total_episodes": 1, "total_frames": 1,
                "features": {"action": {"dtype": "float32", "shape": [1]}}}  # fmt: skip
        (path.parent / "info.json").write_text(json.dumps(info))
    os.mkfifo(path)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            open_source(path if path.suffix == ".mcap" else tmp_path / "dataset")
        except RecordingError as error:
            ended.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(20)
    assert ended, "the reader waits for a writer"
    assert RecordingLibrary(tmp_path).list_entries() == []


def test_pipe_is_never_read(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "a.mcap")
    content, pipe = built(), os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(pipe, content)
        with pytest.raises(RecordingError):
            McapSource(path)
        assert os.read(pipe, 1 << 16) == content
    finally:
        os.close(pipe)


def test_control_characters_are_not_printed(tmp_path: Path) -> None:
    text = "\x1b]0;owned\x07\x1b[2J\u202egnp"
    path = tmp_path / "a.mcap"
    path.write_bytes(built(about=subject(session_id=text, task=text, cameras=()).to_metadata()))
    shown = CliRunner().invoke(command, ["info", str(path)]).output
    assert "owned" in shown
    assert not set(text[:1] + "\x07\u202e") & set(shown)


def test_truncated_file_is_read_up_to_its_end_and_reports_it(record, tmp_path: Path) -> None:
    whole = record(episodes=1, size=(16, 16), cameras=()).read_bytes()
    cut, counts, named = tmp_path / "cut.mcap", set(), set()
    # Each byte of the end, where records are short; before that, a step that meets each kind of position.
    sizes = [*range(0, len(whole) - 400, 61), *range(len(whole) - 400, len(whole))]
    for size in sizes:
        cut.write_bytes(whole[:size])
        try:
            source = McapSource(cut)
        except RecordingError as error:
            named.add("cut.mcap" in str(error))
            continue
        counts.add(len(list(source.steps())))
        assert not source.info.is_whole
        assert source.outcome.state == "interrupted"
    assert counts <= {0, 12}
    assert named == {True}


def test_changed_byte_is_detected_or_has_no_effect(record, tmp_path: Path) -> None:
    path = record(episodes=1, size=(16, 16))
    whole, dice = path.read_bytes(), random.Random(0)
    flipped, detected = tmp_path / "flipped.mcap", 0
    for _ in range(300):
        content = bytearray(whole)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        flipped.write_bytes(content)
        try:
            source = McapSource(flipped)
            steps = list(source.steps())
        except RecordingError:
            detected += 1
        else:
            is_reported = source.damage is not None or not source.info.is_whole
            assert len(steps) == 12 or is_reported or len(steps) == 0
            detected += is_reported
    assert detected > 100


KILLED = """
    import pathlib, sys, time
    from service.recording import recorder
    from tests.testing.recordings import play, subject
    recorder._FLUSH_INTERVAL = recorder._POLL_INTERVAL = 0.001
    one = recorder.Recorder(pathlib.Path(sys.argv[1]), subject(cameras=()))
    print("begun", flush=True)
    while True:
        play(one, episodes=1, cameras=())
        time.sleep(0.002)
"""


@contextmanager
def killed_at_the_end(script: str, *arguments: Path) -> Iterator[None]:
    """Run a process until it prints that it has begun, and kill it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "begun\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_recording_of_a_killed_recorder_can_be_exported(tmp_path: Path) -> None:
    dice = random.Random(1)
    for number in range(2):
        path = tmp_path / f"{number}.mcap"
        with killed_at_the_end(KILLED, path):
            wait_until(lambda file=path: file.exists() and file.stat().st_size > 10_000)
            time.sleep(dice.random() * 0.1)
        source = McapSource(path)
        assert source.outcome.state == "interrupted"
        assert not source.info.is_whole
        writer = write_dataset(tmp_path / f"set-{number}", source.info, source.steps())
        assert source.damage is None
        assert len(open_dataset(tmp_path / f"set-{number}")) == writer.frames > 0


def test_concurrent_exports_leave_one_complete_dataset(record, tmp_path: Path) -> None:
    source, folder = McapSource(record(episodes=1)), tmp_path / "set"
    killed = tmp_path / "set.4194304-0123abcd.partial"  # No process has this id.
    (killed / "meta").mkdir(parents=True)
    foreign = {"set.mine.partial", "set.9999999999-0123abcd.partial"}  # This id is above the maximum of any system.
    for name in foreign:
        (tmp_path / name).mkdir()
    steps = list(source.steps())
    begun, go_on = threading.Event(), threading.Event()
    failures: list[str] = []

    def first() -> None:
        def slowly():
            yield from steps[:6]
            begun.set()
            assert go_on.wait(30)
            yield from steps[6:]

        try:
            write_dataset(folder, source.info, slowly())
        except RecordingError as error:
            failures.append(str(error))

    writing = threading.Thread(target=first, daemon=True)
    writing.start()
    assert begun.wait(30)
    write_dataset(folder, source.info, steps)
    go_on.set()
    writing.join(30)
    assert len(failures) == 1
    assert "created by another writer" in failures[0]
    assert len(open_dataset(folder)) == len(steps)
    assert {path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")} == foreign


def test_table_that_expands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Use small limits, so that a small table exceeds them.
    monkeypatch.setattr(table_files, "VALUES_BASE", 1 << 16)
    names = ["Rotation"]
    with DatasetWriter(tmp_path / "set", fps=20, joint_names=names) as writer:
        zero = pa.array([0.0], pa.float32()).to_numpy()
        for _ in range(20):
            writer.add({"observation.state": zero, "action": zero})
        writer.end_episode("nothing")
    data = tmp_path / "set/data/chunk-000/file-000.parquet"
    table, rows = parquet.read_table(data), 20
    wide = pa.FixedSizeListArray.from_arrays(pa.array([0.0] * (rows * 300_000), pa.float32()), 300_000)
    table = table.set_column(table.column_names.index("action"), "action", wide)
    parquet.write_table(table, data, compression="zstd")
    assert data.stat().st_size < 40_000
    with pytest.raises(DatasetError, match=r"action would take \d+ bytes of memory; allowed are"):
        open_dataset(tmp_path / "set").vectors("action")
    many = pa.table({name: pa.array([0] * 200_000) for name in ("episode_index", "frame_index", "task_index")})
    parquet.write_table(many.append_column("timestamp", pa.array([0.0] * 200_000)), data, compression="zstd")
    with pytest.raises(DatasetError, match=r"200000 rows; a file of this size has at most \d+"):
        open_dataset(tmp_path / "set")


def test_recorder_on_a_hanging_disk_keeps_at_most_its_queue(tmp_path: Path) -> None:
    # A pipe that stays open and is never read: writes block forever.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # A small buffer, which fills on any machine.
    limits = RecorderLimits(queue_bytes=200_000, queue_items=500)
    recorder = Recorder(tmp_path / "a.mcap", subject(), limits, open_file=lambda path: pipe.open("wb", buffering=0))
    try:
        for _ in range(60):
            play(recorder, episodes=1, size=(120, 160))
        assert recorder.dropped > 0
        assert len(recorder._queue) <= 500
        assert recorder._queued_bytes - recorder._written_bytes <= 200_000
        recorder.close()
        assert not recorder.join(0.05)
    finally:
        os.close(reader)  # Later writes fail.
    assert recorder.join(30)
    assert recorder.state == "failed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if made.returncode:
        pytest.skip(f"no disk can be mounted: {made.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def leave(disk: Path, free: int) -> None:
    """Fill a disk until only this number of bytes is free."""
    (disk / "rest").unlink(missing_ok=True)
    with (disk / "rest").open("wb") as rest:
        os.posix_fallocate(rest.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - free)


def test_recording_on_a_full_disk_is_read(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Use small chunks, so that each part of the file meets a full disk.
    monkeypatch.setattr(mcap_writer, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(recorder_module, "_FLUSH_INTERVAL", 0.0)
    counts, states = [], []
    for free in (0, *(pages * 4096 for pages in (1, 2, 3, 5, 6, 7, 8, 9, 10, 14))):
        leave(small_disk, free)
        path = small_disk / f"{free}.mcap"
        recorder = Recorder(path, subject(), RecorderLimits(free=0))
        play(recorder, episodes=4)
        recorder.close()
        assert recorder.join(60)
        states.append(recorder.state)
        if not path.stat().st_size:  # The header did not fit.
            with pytest.raises(RecordingError, match=r"0\.mcap cannot be read"):
                McapSource(path)
            counts.append(0)
        else:
            source = McapSource(path)
            assert source.info.is_whole == (recorder.state == "off")
            assert source.outcome.state == ("off" if source.info.is_whole else "interrupted")
            (entry,) = RecordingLibrary(small_disk).list_entries()
            assert entry.state == source.outcome.state
            if steps := list(source.steps()):
                writer = write_dataset(tmp_path / f"set-{free}", source.info, steps)
                assert len(open_dataset(tmp_path / f"set-{free}")) == writer.frames == len(steps)
            counts.append(len(steps))
        path.unlink()
    assert set(states) == {"disk_full", "off"}
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 48)
    assert len(set(counts)) > 5


EXPORTS = """
    import os, sys
    from pathlib import Path
    from service.recording.dataset import write_dataset
    from service.recording.mcap_files import McapSource
    from tests.hostile.test_hostile_recordings import leave
    disk = Path(sys.argv[2])
    for pages in map(int, sys.argv[3:]):
        leave(disk, pages * 4096)
        source = McapSource(Path(sys.argv[1]))
        try:
            frames = write_dataset(disk / f"set-{pages}", source.info, source.steps()).frames
        except OSError as error:
            frames = f"errno {error.errno}"
        print(pages, frames, sorted(path.name for path in disk.iterdir()), flush=True)
"""


def test_export_on_a_full_disk_leaves_nothing(record, small_disk: Path) -> None:
    path, places = record(episodes=2), [0, 1, 2, 3, 5, 8, 12, 16, 20, 100]
    run = run_script(textwrap.dedent(EXPORTS), path, small_disk, *places)
    # Twelve pages for each of two cameras do not fit.
    full = [f"{pages} errno 28 ['rest']" for pages in places]
    lines = run.stdout.splitlines()
    number = next(number for number, line in enumerate(lines) if line != full[number])
    assert number >= 5, lines
    assert lines[number] == f"{places[number]} 24 ['rest', 'set-{places[number]}']"
    assert len(open_dataset(small_disk / f"set-{places[number]}")) == 24


EXPORT_ONCE = """
    import sys
    from pathlib import Path
    from service.recording.dataset import write_dataset
    from service.recording.mcap_files import McapSource
    source = McapSource(Path(sys.argv[1]))
    steps = list(source.steps())
    print("begun", flush=True)
    write_dataset(Path(sys.argv[2]), source.info, steps)
"""


def test_killed_export_leaves_no_folder(record, tmp_path: Path) -> None:
    path, dice, folder = record(episodes=2), random.Random(2), tmp_path / "set"
    for _ in range(2):
        with killed_at_the_end(EXPORT_ONCE, path, folder):
            time.sleep(dice.random() * 0.1)
        # The folder has its final name only when it is complete.
        if folder.exists():
            assert len(open_dataset(folder)) == 24
            shutil.rmtree(folder)
    source = McapSource(path)
    write_dataset(folder, source.info, source.steps())
    assert len(open_dataset(folder)) == 24
    assert not list(tmp_path.glob("*.partial"))
