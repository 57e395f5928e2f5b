"""Writer of recordings in MCAP files, which are readable up to their last whole chunk if they are cut off."""

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from typing import BinaryIO, cast

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import VideoReformatter
from mcap.data_stream import RecordBuilder
from mcap.records import DataEnd, Footer
from mcap.writer import MCAP0_MAGIC, CompressionType, Writer

from service.control.observers import Tick
from service.recording import mcap_format
from service.recording.mcap_format import END_METADATA, HEADER_METADATA, RecordingHeader

# End of a file without an index.
_end = RecordBuilder()
DataEnd(0).write(_end)
Footer(summary_start=0, summary_offset_start=0, summary_crc=0).write(_end)
FILE_END = _end.end() + MCAP0_MAGIC

QUALITY = 3  # FFmpeg's scale from 2 (best) to 31; the mean error at 3 is one level of 255.
_LAMBDA = 118


class JpegEncoder:
    """JPEG encoder of frames of one size."""

    def __init__(self, height: int, width: int, quality: int = QUALITY):
        self.size = (height, width)
        context = cast(VideoCodecContext, av.CodecContext.create("mjpeg", "w"))
        context.width, context.height = width, height
        context.pix_fmt = "yuvj420p"
        context.time_base = Fraction(1, 25)
        # A second thread would delay each frame until the next frame.
        context.thread_count = 1
        context.options = {
            "qmin": str(quality),
            "qmax": str(quality),
            "flags": "+qscale",
            "global_quality": str(_LAMBDA * quality),
            "huffman": "default",
        }
        self._context, self._reformatter = context, VideoReformatter()

    def encode(self, image: np.ndarray) -> bytes:
        """Encode uint8 (h, w, 3), RGB as a JPEG."""
        # A copy would block other threads for about a millisecond per VGA frame.
        frame = av.VideoFrame.from_numpy_buffer(np.ascontiguousarray(image), "rgb24")
        frame = self._reformatter.reformat(frame, format="yuvj420p")
        frame.pts = None
        return b"".join(bytes(packet) for packet in self._context.encode(frame))


LIBRARY = "robojax"
CHUNK_BYTES = 1 << 20


class McapSink:
    """Unbuffered file for the MCAP library: writes all or raises OSError.

    Attributes:
        position: bytes written.
        whole_records: position of the end of the newest whole record.
    """

    def __init__(self, file: BinaryIO):
        self.position = self.whole_records = 0
        self._file = file

    def write(self, data: bytes) -> int:
        """Write all of the data."""
        rest = memoryview(data)
        while rest:
            count = self._file.write(rest)
            if not count:
                raise OSError(errno.ENOSPC, "nothing more can be written")
            self.position += count
            rest = rest[count:]
        # The library writes whole records.
        self.whole_records = self.position
        return len(data)

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.position

    def flush(self) -> None:
        """Do nothing, because the file has no buffer."""

    def truncate(self) -> None:
        """Remove an incomplete record, and end the file so that readers accept it."""
        self._file.truncate(self.whole_records)
        self._file.seek(self.whole_records)
        self.position = self.whole_records
        self.write(FILE_END)


class McapWriter:
    """Writer of one recording; times are seconds of the control loop's clock.

    Attributes:
        seconds: seconds from the first to the newest tick.
        episodes: number of starts.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, file: BinaryIO, header: RecordingHeader):
        self.sink = McapSink(file)
        self.seconds, self.episodes = 0.0, 0
        self._header = header
        self._offset = header.wall_ns - header.monotonic_ns
        self._encoders: dict[str, JpegEncoder] = {}
        self._first_tick: float | None = None
        self._last_tick: float | None = None
        self._hold: str | None = None
        self._writer = Writer(self.sink, chunk_size=CHUNK_BYTES, compression=CompressionType.ZSTD)  # type: ignore[arg-type]
        self._writer.start(profile="", library=LIBRARY)
        # Written first, so that it is readable if the rest of the file is lost.
        self._writer.add_metadata(HEADER_METADATA, header.to_metadata())
        self._channels = self._register()

    def _register(self) -> Mapping[str, int]:
        schemas = {
            topic: self._writer.register_schema(schema["title"], "jsonschema", json.dumps(schema).encode())
            for topic, schema in mcap_format.SCHEMAS.items()
        }
        topics = [topic for topic in schemas if topic != mcap_format.CAMERAS]
        channels = {topic: self._writer.register_channel(topic, "json", schemas[topic]) for topic in topics}
        for camera in self._header.cameras:
            topic = mcap_format.camera_topic(camera)
            channels[topic] = self._writer.register_channel(topic, "json", schemas[mcap_format.CAMERAS])
        return channels

    def frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Write a picture of a camera: uint8 (h, w, 3), RGB."""
        size = (image.shape[0], image.shape[1])
        encoder = self._encoders.get(camera)
        if encoder is None or encoder.size != size:
            encoder = self._encoders[camera] = JpegEncoder(*size)
        at = self._nanoseconds(observed_at)
        self._add(mcap_format.camera_topic(camera), at, mcap_format.build_image(at, camera, encoder.encode(image)))

    def chunk(self, actions: np.ndarray, observed_at: float, at: float) -> None:
        """Write a chunk (t, a) of the policy."""
        now, seen = self._nanoseconds(at), self._nanoseconds(observed_at)
        age = round((now - seen) / 1e6, 3)
        self._log(mcap_format.CHUNKS, now, seen_at=mcap_format.build_time(seen), age_ms=age, actions=actions.tolist())

    def tick(self, tick: Tick) -> None:
        """Write one tick: measured joints, command and hold."""
        at, names = self._nanoseconds(tick.at), self._header.joints
        if tick.hold != self._hold:
            self._hold = tick.hold
            text = "the robot may move again" if tick.hold is None else tick.hold
            self.event(tick.at, mcap_format.INFO if tick.hold is None else mcap_format.WARNING, "hold", text)
        if tick.pose is not None:
            self._log(mcap_format.JOINTS, at, position=dict(zip(names, tick.pose.tolist(), strict=True)))
        if tick.command is not None:
            position = dict(zip(names, tick.command.tolist(), strict=True))
            self._log(mcap_format.COMMANDS, at, position=position, is_sent=tick.is_sent)
        since = 0.0 if self._last_tick is None else tick.at - self._last_tick
        # Written after the tick's joints and command, because readers need them first.
        self._log(mcap_format.TICKS, at, since_last_ms=round(since * 1e3, 3), hold=tick.hold or "")
        self._first_tick = tick.at if self._first_tick is None else self._first_tick
        self._last_tick = tick.at
        self.seconds = tick.at - self._first_tick

    def event(self, at: float, level: int, code: str, text: str) -> None:
        """Write an event; ``start`` and ``stop`` bound an episode."""
        self.episodes += code == "start"
        self._log(mcap_format.EVENTS, self._nanoseconds(at), level=level, message=text, name=code, file="", line=0)

    def flush(self) -> None:
        """Flush, so that no earlier message is lost if this process is killed."""
        self._writer.flush()

    def finish(self, state: str, dropped: int) -> None:
        """End the file with an index and the outcome of the recording."""
        self._writer.flush()
        end = {"state": state, "dropped": dropped, "seconds": round(self.seconds, 3), "episodes": self.episodes}
        self._writer.add_metadata(END_METADATA, {name: json.dumps(value) for name, value in end.items()})
        self._writer.finish()

    def truncate(self) -> None:
        """End a file after a disk error."""
        with suppress(OSError):
            self.sink.truncate()

    def _log(self, topic: str, at: int, **fields: object) -> None:
        self._add(topic, at, mcap_format.build_message(at, **fields))

    def _add(self, topic: str, at: int, data: bytes) -> None:
        self._writer.add_message(self._channels[topic], log_time=at, data=data, publish_time=at)

    def _nanoseconds(self, at: float) -> int:
        return self._offset + round(at * 1e9)
