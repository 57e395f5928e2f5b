"""A recording as an MCAP file (https://mcap.dev/spec): readable up to its last chunk however its writer ends."""

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO

import numpy as np
from mcap.data_stream import RecordBuilder
from mcap.records import DataEnd, Footer
from mcap.writer import MCAP0_MAGIC, CompressionType, Writer

from service.motion.tap import Tick
from service.recording import channels
from service.recording.jpeg import JpegEncoder
from service.recording.subject import END, HEAD, Subject

LIBRARY = "robojax"
CHUNK_BYTES = 1 << 20


class Sink:
    """An unbuffered file as the MCAP library wants one: all or an error, and a place to go back to.

    Attributes:
        position: bytes written.
        good: how many of them end with a whole record.
    """

    def __init__(self, file: BinaryIO):
        self.position = self.good = 0
        self._file = file

    def write(self, data: bytes) -> int:
        """Write all of it.

        Raises:
            OSError: the disk does not take it.
        """
        rest = memoryview(data)
        while rest:
            count = self._file.write(rest)
            if not count:
                raise OSError(errno.ENOSPC, "nothing more can be written")
            self.position += count
            rest = rest[count:]
        # The library hands over whole records.
        self.good = self.position
        return len(data)

    def tell(self) -> int:
        """Where the next byte goes."""
        return self.position

    def flush(self) -> None:
        """Nothing is kept back here."""

    def cut(self) -> None:
        """Take off what is not whole and end the file as a reader wants it, as far as the disk lets us.

        Raises:
            OSError: the disk does not.
        """
        self._file.truncate(self.good)
        self._file.seek(self.good)
        self.position = self.good
        records = RecordBuilder()
        DataEnd(0).write(records)
        Footer(summary_start=0, summary_offset_start=0, summary_crc=0).write(records)
        self.write(records.end() + MCAP0_MAGIC)


class McapWriter:
    """Writes what a tap is told; times are those of the control loop's clock, in seconds.

    Attributes:
        holds: how often the robot came to be held.
        seconds: from the first tick to the newest.
        episodes: how many starts there were.
    """

    def __init__(self, file: BinaryIO, subject: Subject):
        """Begin the file.

        Raises:
            OSError: the disk does not take it.
        """
        self.sink = Sink(file)
        self.seconds, self.episodes = 0.0, 0
        self._subject = subject
        self._offset = subject.wall_ns - subject.monotonic_ns
        self._encoders: dict[str, JpegEncoder] = {}
        self._first_tick: float | None = None
        self._last_tick: float | None = None
        self._hold: str | None = None
        self._writer = Writer(self.sink, chunk_size=CHUNK_BYTES, compression=CompressionType.ZSTD)  # type: ignore[arg-type]
        self._writer.start(profile="", library=LIBRARY)
        # First, so that it can be read whatever happens to the rest.
        self._writer.add_metadata(HEAD, subject.to_metadata())
        self._channels = self._register()

    def _register(self) -> Mapping[str, int]:
        schemas = {
            topic: self._writer.register_schema(schema["title"], "jsonschema", json.dumps(schema).encode())
            for topic, schema in channels.SCHEMAS.items()
        }
        topics = [topic for topic in schemas if topic != channels.CAMERAS]
        found = {topic: self._writer.register_channel(topic, "json", schemas[topic]) for topic in topics}
        for camera in self._subject.cameras:
            topic = channels.camera_topic(camera)
            found[topic] = self._writer.register_channel(topic, "json", schemas[channels.CAMERAS])
        return found

    def frame(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        """A picture of a camera: uint8 (h, w, 3), RGB."""
        size = (image.shape[0], image.shape[1])
        encoder = self._encoders.get(camera)
        if encoder is None or encoder.size != size:
            encoder = self._encoders[camera] = JpegEncoder(*size)
        at = self._nanoseconds(seen_at)
        self._add(channels.camera_topic(camera), at, channels.picture(at, camera, encoder.encode(image)))

    def chunk(self, actions: np.ndarray, seen_at: float, at: float) -> None:
        """A chunk (t, a) of the policy."""
        now = self._nanoseconds(at)
        self._add(channels.CHUNKS, now, channels.chunk(now, self._nanoseconds(seen_at), actions.tolist()))

    def tick(self, tick: Tick) -> None:
        """One tick: where the joints are, what was sent, when, and why not."""
        at, names = self._nanoseconds(tick.at), self._subject.joints
        if tick.hold != self._hold:
            self._hold = tick.hold
            text = "the robot may move again" if tick.hold is None else tick.hold
            self.event(tick.at, channels.INFO if tick.hold is None else channels.WARNING, "hold", text)
        if tick.pose is not None:
            self._add(channels.JOINTS, at, channels.position(at, names, tick.pose.tolist()))
        if tick.command is not None:
            message = channels.position(at, names, tick.command.tolist(), is_sent=tick.is_sent)
            self._add(channels.COMMANDS, at, message)
        since = 0.0 if self._last_tick is None else tick.at - self._last_tick
        # Last of its tick: whoever reads it has read the joints and the command that belong to it.
        self._add(channels.TICKS, at, channels.tick(at, since, tick.hold))
        self._first_tick = tick.at if self._first_tick is None else self._first_tick
        self._last_tick = tick.at
        self.seconds = tick.at - self._first_tick

    def event(self, at: float, level: int, code: str, text: str) -> None:
        """Something happened; ``start`` and ``stop`` bound an episode."""
        self.episodes += code == "start"
        now = self._nanoseconds(at)
        self._add(channels.EVENTS, now, channels.event(now, level, code, text))

    def flush(self) -> None:
        """From here on a reader finds everything until now, whatever happens."""
        self._writer.flush()

    def finish(self, state: str, dropped: int) -> None:
        """End the file with an index and how the recording ended."""
        self._writer.flush()
        end = {"state": state, "dropped": dropped, "seconds": round(self.seconds, 3), "episodes": self.episodes}
        self._writer.add_metadata(END, {name: json.dumps(value) for name, value in end.items()})
        self._writer.finish()

    def cut(self) -> None:
        """End a file that cannot be written to any more as well as can be."""
        with suppress(OSError):
            self.sink.cut()

    def _add(self, topic: str, at: int, data: bytes) -> None:
        self._writer.add_message(self._channels[topic], log_time=at, data=data, publish_time=at)

    def _nanoseconds(self, at: float) -> int:
        return self._offset + round(at * 1e9)
