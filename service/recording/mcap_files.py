"""Reader of recordings in MCAP files, which may be incomplete or hostile; the limits below bound its memory."""

import binascii
import io
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import lz4.frame as lz4
import numpy as np
import zstandard
from mcap.exceptions import EndOfFile, McapError, RecordLengthLimitExceeded
from mcap.opcode import Opcode
from mcap.records import (
    Channel,
    Chunk,
    Footer,
    McapRecord,
    Message,
    Metadata,
    MetadataIndex,
    Statistics,
)
from mcap.stream_reader import StreamReader
from mcap.writer import MCAP0_MAGIC

from service.recording import mcap_format
from service.recording.mcap_format import END_METADATA, HEADER_METADATA, RecordingHeader
from service.recording.mcap_writer import FILE_END
from service.recording.steps import LazyImage, RecordingError, SourceInfo, Step, decode_frame

MAX_RECORD = 32 << 20  # Bytes of a record or a decompressed chunk; the recorder writes 1 MiB and one picture.
MAX_HEADER = 1 << 20  # Bytes at the beginning of a file that contain its header.
MAX_SUMMARY = 64 << 20  # Bytes of the index at the end; a recording of 20 GiB has 3 MiB.
# Largest size of all decompressed chunks, as a multiple of the file, and the size that is always allowed. Recordings of
# a resting robot without cameras reach 20 times the file.
MAX_EXPANSION, MIN_EXPANDED = 100, 64 << 20
MAX_VALUES = 200_000  # Values of one message; a chunk has some thousands.
MAX_FILLED = 100_000  # Steps of a file that replace missed ticks; a longer gap starts another episode.
MAX_EPISODES = 10_000
# Errors of the libraries for an incomplete file, or a file that is not a recording.
_READ_ERRORS = (
    *(McapError, EOFError, ValueError, struct.error, LookupError, TypeError, OverflowError, RecursionError),
    *(MemoryError, RuntimeError, zstandard.ZstdError),
)
_FOOTER = 1 + 8 + 20  # Bytes of the footer: kind, length, content.
INTERRUPTED = "interrupted"  # Outcome of a recording whose server was killed.


@dataclass(frozen=True)
class RecordingOutcome:
    """How a recording ended: the state of its recorder, or ``interrupted``; figures are None if unknown."""

    state: str
    seconds: float | None = None
    episodes: int | None = None
    ticks: int | None = None
    dropped: int | None = None


class McapSource:
    """Steps of one recording in an MCAP file. A missed tick repeats the step before it.

    Attributes:
        damage: where and why reading stopped before the end, or None; valid after reading.
    """

    def __init__(self, path: Path):
        """Read the header of a file; raises RecordingError if it is not a recording of a session."""
        self.path = path
        self.header = read_header(path)
        self.outcome = read_outcome(path)
        subject = self.header
        self.info = SourceInfo(
            rate=subject.rate,
            joints=subject.joints,
            features=subject.features,
            low=np.array([-np.inf if low is None else low for low in subject.low], np.float32),
            high=np.array([np.inf if high is None else high for high in subject.high], np.float32),
            cameras=subject.cameras,
            robot_type=subject.robot_type,
            task=subject.task,
            length=self.outcome.ticks,
            is_whole=self.outcome.state != INTERRUPTED,
        )
        self.damage: str | None = None

    def events(self) -> Iterator[tuple[int, str, str]]:
        """Yield nanoseconds since 1970, code and text of every event."""
        for topic, at, content in self.messages():
            if topic == mcap_format.EVENTS:
                yield at, str(content.get("name", "")), str(content.get("message", ""))

    def messages(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield topic, nanoseconds since 1970 and content of every message, in order of time.

        Raises:
            RecordingError: the file cannot be opened, or exceeds the limits of this module.
        """
        topics: dict[int, str] = {}
        self.damage = None
        with open_regular(self.path) as file:
            try:
                for record in _unpack_records(file, self.path.name):
                    if isinstance(record, Channel):
                        topics[record.id] = record.topic
                    elif isinstance(record, Message) and record.channel_id in topics:
                        content = _parse_content(record.data, self.path.name)
                        if isinstance(content, dict):
                            yield topics[record.channel_id], record.log_time, content
            except EndOfFile:
                # A killed server leaves an incomplete file, but a file with an outcome is damaged.
                if self.outcome.state != INTERRUPTED:
                    self.damage = self._describe_damage(file, "it ends there")
            except OSError as error:
                self.damage = self._describe_damage(file, error.strerror or type(error).__name__)
            except _READ_ERRORS as error:
                self.damage = self._describe_damage(file, f"{type(error).__name__}: {error}"[:200])

    def _describe_damage(self, file: BinaryIO, what: str) -> str:
        return f"{self.path.name} is damaged before byte {file.tell()} ({what}) and is read up to there"

    def steps(self) -> Iterator[Step]:
        """Yield all steps; an episode begins at its first command with a frame of every camera before it.

        A change of the instruction begins another episode.

        Raises:
            RecordingError: the file cannot be opened, or exceeds the limits of this module.
        """
        period = 1e9 / self.header.rate
        cameras = set(self.header.cameras)
        pictures: dict[str, LazyImage] = {}
        pose = command = None
        episode, index, started, is_running, filled = -1, 0, 0, False, 0
        before: Step | None = None
        task = self.header.task
        for topic, at, content in self.messages():
            camera = mcap_format.camera_of(topic)
            if camera is not None:
                if camera in cameras:
                    pictures[camera] = self._read_image(content)
            elif topic == mcap_format.EVENTS and content.get("name") in ("start", "stop"):
                is_running = content["name"] == "start"
                command, before = None, None
            elif topic == mcap_format.EVENTS and content.get("name") == mcap_format.TASK:
                task, before = str(content.get("message", "")), None
            elif topic == mcap_format.JOINTS:
                pose = self._read_position(content)
            elif topic == mcap_format.COMMANDS:
                command = self._read_position(content)
            elif topic == mcap_format.TICKS and is_running:
                if pose is None or command is None or not cameras <= set(pictures):
                    continue
                slot = 0 if before is None else max(round((at - started) / period), index + 1)
                if before is not None and filled + slot - index - 1 > MAX_FILLED:
                    before = None
                if before is None:
                    episode, index, started = episode + 1, 0, at
                    if episode >= MAX_EPISODES:
                        raise RecordingError(f"{self.path.name} has more episodes than the {MAX_EPISODES} allowed")
                else:
                    for skipped in range(index + 1, slot):
                        yield Step(episode, skipped, before.state, before.action, before.pictures, task)
                    filled += slot - index - 1
                    index = slot
                before = Step(episode, index, pose, command, dict(pictures), task)
                yield before

    def _read_image(self, content: Mapping[str, Any]) -> LazyImage:
        try:
            return LazyImage(partial(decode_frame, binascii.a2b_base64(str(content.get("data", "")))))
        except ValueError as error:
            raise RecordingError(f"{self.path.name}: a frame is not base64 ({error})") from error

    def _read_position(self, content: Mapping[str, Any]) -> np.ndarray:
        """Return the positions (a,) float32 of the joints."""
        try:
            values = np.array([content["position"][name] for name in self.header.joints], np.float32)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise RecordingError(
                f"{self.path.name}: positions lack or garble a joint ({type(error).__name__}); "
                f"wanted a number for each of {', '.join(self.header.joints[:20])}"
            ) from error
        if values.shape != (len(self.header.joints),) or not np.isfinite(values).all():
            raise RecordingError(f"{self.path.name}: a joint is at {values!s:.80}; wanted finite numbers")
        return values


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for the writer of a pipe.

    Raises:
        RecordingError: the file does not exist, cannot be read, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RecordingError(f"{path} is not a regular file; {_EXPECTED}")
    return os.fdopen(descriptor, "rb")


_EXPECTED = "wanted an .mcap that `robojax serve` recorded, or a LeRobotDataset v3 folder"


def read_header(path: Path) -> RecordingHeader:
    """Read a recording's header.

    Raises:
        RecordingError: the file cannot be read, or is not a recording of a session.
    """
    with open_regular(path) as file:
        try:
            head = io.BytesIO(file.read(MAX_HEADER))
            for record in _RecordReader(head).records:
                if isinstance(record, Metadata) and record.name == HEADER_METADATA:
                    return RecordingHeader.from_metadata(record.metadata)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from error
        except EndOfFile:
            pass
        except _READ_ERRORS as error:
            raise RecordingError(
                f"{path.name} cannot be read ({type(error).__name__}: {str(error)[:200]}); {_EXPECTED}"
            ) from error
    raise RecordingError(
        f"{path.name} cannot be read (its first {MAX_HEADER} bytes have no header of a recording); {_EXPECTED}"
    )


def read_outcome(path: Path) -> RecordingOutcome:
    """Read how a recording ended, from the end of its file alone.

    Raises:
        RecordingError: the file cannot be opened, or its index is larger than allowed.
    """
    with open_regular(path) as file:
        try:
            return _parse_outcome(file, path.name)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from error
        except _READ_ERRORS:
            return RecordingOutcome(INTERRUPTED)


def _parse_outcome(file: BinaryIO, name: str) -> RecordingOutcome:
    end = os.fstat(file.fileno()).st_size - _FOOTER - len(MCAP0_MAGIC)
    file.seek(max(end, 0))
    (footer,) = _RecordReader(file, skip_magic=True).records
    if not isinstance(footer, Footer) or footer.summary_start == 0:
        return RecordingOutcome(INTERRUPTED)
    if (length := end - footer.summary_start) > MAX_SUMMARY:
        raise RecordingError(f"{name}: its index has {length} bytes; allowed are {MAX_SUMMARY}")
    file.seek(footer.summary_start)
    tick_channels: set[int] = set()
    statistics, index = None, None
    for record in _RecordReader(file, skip_magic=True).records:
        if isinstance(record, Channel) and record.topic == mcap_format.TICKS:
            tick_channels.add(record.id)
        elif isinstance(record, Statistics):
            statistics = record
        elif isinstance(record, MetadataIndex) and record.name == END_METADATA:
            index = record
    if statistics is None:
        return RecordingOutcome(INTERRUPTED)
    ticks = sum(statistics.channel_message_counts.get(channel, 0) for channel in tick_channels)
    if index is None:
        return RecordingOutcome(INTERRUPTED, ticks=ticks)
    file.seek(index.offset)
    metadata = next(_RecordReader(file, skip_magic=True).records)
    if not isinstance(metadata, Metadata):
        return RecordingOutcome(INTERRUPTED, ticks=ticks)
    fields = {key: json.loads(value) for key, value in metadata.metadata.items()}
    seconds, episodes, dropped = float(fields["seconds"]), int(fields["episodes"]), int(fields["dropped"])
    if not (math.isfinite(seconds) and isinstance(fields["state"], str)):
        return RecordingOutcome(INTERRUPTED, ticks=ticks)
    return RecordingOutcome(fields["state"][:40], seconds, episodes, ticks, dropped)


# The mcap package allocates and decompresses any size that a file declares. The functions below limit that size.


class _BoundedFile:
    """File whose reads return exactly the requested number of bytes, or raise."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_RECORD:
            raise ValueError(f"a part of a record has {size} bytes; allowed are {MAX_RECORD}")
        if len(data := self._file.read(size)) < size:
            raise EndOfFile
        return data


class _RecordReader(StreamReader):
    """Reader of the records that recordings need, without opening chunks."""

    def __init__(self, file: BinaryIO, *, skip_magic: bool = False):
        bounded: Any = _BoundedFile(file)
        super().__init__(bounded, skip_magic=skip_magic, emit_chunks=True, record_size_limit=MAX_RECORD)

    def _read_record(self, opcode: int, length: int) -> McapRecord | None:
        if opcode == 0:
            # Holes of sparse files read as zeros, and may have terabytes.
            raise ValueError("a record of kind 0")
        if opcode in _KINDS:
            return super()._read_record(opcode, length)
        self._stream.read(length)
        return None


_KINDS = frozenset(
    {
        *(Opcode.CHANNEL, Opcode.CHUNK, Opcode.FOOTER, Opcode.MESSAGE),
        *(Opcode.METADATA, Opcode.METADATA_INDEX, Opcode.STATISTICS),
    }
)


def _unpack_records(file: BinaryIO, name: str) -> Iterator[McapRecord]:
    """Yield the records of a whole file, and the records in each chunk.

    Raises:
        RecordingError: a record or chunk is larger than allowed.
        EndOfFile: the file ends before its footer.
    """
    allowed = MIN_EXPANDED + MAX_EXPANSION * os.fstat(file.fileno()).st_size
    try:
        for record in _RecordReader(file).records:
            if not isinstance(record, Chunk):
                yield record
                continue
            allowed -= record.uncompressed_size
            if record.uncompressed_size > MAX_RECORD or allowed < 0:
                raise RecordingError(
                    f"{name}: the chunk that ends at byte {file.tell()} claims {record.uncompressed_size} bytes when "
                    f"decompressed; allowed are {MAX_RECORD}, and {MAX_EXPANSION} times the file in all; give a "
                    "recording as `robojax serve` wrote it"
                )
            yield from _read_chunk(record)
    except RecordLengthLimitExceeded as error:
        raise RecordingError(f"{name}: before byte {file.tell()}: {error}") from error


def _read_chunk(chunk: Chunk) -> Iterator[McapRecord]:
    content = io.BytesIO(_decompress(chunk) + FILE_END)
    try:
        yield from _RecordReader(content, skip_magic=True).records
    except EndOfFile as error:
        raise ValueError("a chunk ends within a record") from error


def _decompress(chunk: Chunk) -> bytes:
    """Decompress a chunk to exactly the size that it declares.

    Raises:
        ValueError: the chunk has another size, checksum or compression.
    """
    size = chunk.uncompressed_size
    if chunk.compression == "zstd":
        limited = zstandard.ZstdDecompressor(max_window_size=MAX_RECORD)
        data = limited.stream_reader(chunk.data).read(size + 1)
    elif chunk.compression == "lz4":
        data = lz4.LZ4FrameDecompressor().decompress(chunk.data, max_length=size + 1)
    elif chunk.compression:
        raise ValueError(f"a chunk is compressed with {chunk.compression[:20]!r}; wanted zstd, lz4 or nothing")
    else:
        data = chunk.data
    if len(data) != size:
        raise ValueError(f"a chunk claims {size} bytes and has {'more' if len(data) > size else len(data)}")
    if chunk.uncompressed_crc and zlib.crc32(data) != chunk.uncompressed_crc:
        raise ValueError("the content of a chunk does not match its checksum")
    return data


def _parse_content(data: bytes, name: str) -> Any:
    """Parse the JSON of a message."""
    if (values := data.count(b",") + data.count(b"[") + data.count(b"{")) > MAX_VALUES:
        raise RecordingError(f"{name}: a message of {values} values; allowed are {MAX_VALUES}")
    return json.loads(data)
