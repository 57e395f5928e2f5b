"""Log lines with session and request ids, without secrets.

The newest of them are kept for GET /debug/logs, without folders of the machine, too.
"""

import copy
import json
import logging
import queue
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from service.setting_types import Group

_SUBJECT: ContextVar[Mapping[str, str]] = ContextVar("subject", default={})  # noqa: B039 - it is replaced, never changed


def subject() -> Mapping[str, str]:
    """The ids of now, e.g. ``{"session": "arm", "request": "81c7..."}``; tasks have those of whoever began them."""
    return _SUBJECT.get()


def begin_about(**ids: str | None) -> None:
    """From here on, in this task and those that it begins, it is about these; None takes one away."""
    merged = {**_SUBJECT.get(), **ids}
    _SUBJECT.set({name: value for name, value in merged.items() if value is not None})


TEXT = "%(asctime)s %(levelname)-7s %(name)s%(about)s: %(message)s"
WAITING = 10_000  # lines that may wait for a slow disk or terminal; more are left out, and counted
_ONE_LINE = {number: repr(chr(number))[1:-1] for number in (*range(32), 127, 0x2028, 0x2029)}
LAST_WORDS = 1.0  # seconds that the end of the process waits for them

# Characters of a message that strangers may have written parts of; to mask as many takes 2 ms.
LONGEST_LINE = 1 << 13
# Each reads a text once, however it goes on: 16 KiB of "a.a.a" took 1.5 s.
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(?i)\b(x-api-key|authorization|api[_-]?key|token|secret|password|passwd)(['\"]?\s*[:=]\s*['\"]?)"
            r"(?:(?:bearer|basic)\s+)?[^\s'\",;&]+"
        ),
        r"\1\2***",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_***"),
    # A run of such letters is looked through once, for the first that could begin there: if it is none, none is.
    (re.compile(r"(?<![\w-])((?>[\w-]*?(?=\beyJ)))eyJ[\w-]{8,}+\.[\w-]++\.[\w-]*"), r"\1***"),
    (re.compile(r"\brj[kotx]_[A-Za-z0-9_-]{8,}"), "rj*_***"),
    # Of a URL's scheme, the last letter: there may be any number of them.
    (re.compile(r"(?i)([a-z0-9+.-]://)[^/@\s]++@"), r"\1***@"),
)
# An absolute path keeps its last part; paths of URLs follow a host and are left alone.
_FOLDERS = re.compile(r"(?<![\w:/.>}-])/(?:[\w.@+-]+/)+([\w.@+-]*)")


def without_secrets(text: str) -> str:
    """The text without what looks like a secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def masked(text: str) -> str:
    """The text without what looks like a secret, and without folders of this machine."""
    return _FOLDERS.sub(r".../\1", without_secrets(text))


def _shortened(message: str) -> str:
    """As much of a message as is worth masking. A word that is cut could be half of a secret, and is left out."""
    if len(message) <= LONGEST_LINE:
        return message
    return f"{message[:LONGEST_LINE].rpartition(' ')[0]} ... ({len(message)} characters)"


class RecentLogs(logging.Handler):
    """The newest records, already masked; an exception only leaves its type, never its traceback."""

    def __init__(self, lines: int):
        super().__init__()
        self._lines: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a log call with wrong arguments must not fail its caller
            message = str(record.msg)
        if record.exc_info and record.exc_info[0] is not None:
            message += f" ({record.exc_info[0].__name__})"
        self._lines.append((record.levelno, _line(record, masked(_shortened(message)))))

    def newest(self, limit: int, level: int = logging.NOTSET) -> list[Mapping[str, Any]]:
        """At most ``limit`` lines of at least ``level``, oldest first."""
        found = [line for number, line in list(self._lines) if number >= level]
        return found[-limit:] if limit else []


class TextFormatter(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__(TEXT, "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        ids = _ids(record).values()
        record.about = f" [{' '.join(ids)}]" if ids else ""
        return without_secrets(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever was sent: nobody from outside writes a line of their own."""
        return super().formatMessage(record).translate(_ONE_LINE)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        line = dict(_line(record, without_secrets(record.getMessage())))
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["exception"] = without_secrets(record.exc_text)
        return json.dumps(line)


class RotatingFile(RotatingFileHandler):
    """A log file that is set aside when it is full; one that cannot be written (a full disk) is said once."""

    def __init__(self, path: Path, size: int, files: int):
        """``size`` in bytes of each of ``files`` files.

        Raises:
            OSError: it cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=size, backupCount=files - 1, encoding="utf-8")
        self._is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        was_failing, self._is_failing = self._is_failing, False
        super().emit(record)
        if self._is_failing and not was_failing:
            sys.stderr.write("robojax: the log file cannot be written; what is logged from now on is lost there\n")

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by ``emit`` where the disk refused."""
        self._is_failing = True

    def close(self) -> None:
        """Close the file; what is still in memory is lost when the disk refuses it."""
        with suppress(OSError):
            super().close()


class Background(logging.Handler):
    """Hands records to other handlers in a thread: neither a slow disk nor a paused terminal may hold up a robot.

    Not the standard library's QueueHandler and QueueListener: these are as fast (0.98 of the time), but wait for ever
    at their end, complain on standard error where the queue is full, and lose the exception of a line of JSON; with
    that mended they were eight lines more. Not structlog: finding the ids takes 1.0 us a line (ours 0.07), importing it
    80 ms, and what masks secrets and keeps the two formats would be the same code as its processors.

    Attributes:
        dropped: records left out because too many waited.
    """

    def __init__(self, *handlers: logging.Handler):
        super().__init__()
        self.dropped = 0
        self._handlers = handlers
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record; what it refers to may change later, so its text is made now."""
        kept = copy.copy(record)
        try:
            kept.msg, kept.args = _shortened(record.getMessage()), None
        except (TypeError, ValueError):  # a log call with wrong arguments must not fail its caller
            kept.args = None
        if record.exc_info:
            kept.exc_text, kept.exc_info = logging.Formatter().formatException(record.exc_info), None
        kept.subject = subject()
        try:
            self._waiting.put_nowait(kept)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, but not for long."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=LAST_WORDS)
                self._thread.join(LAST_WORDS)
            except queue.Full:
                pass
        if not self._thread.is_alive():
            # A terminal that is paused holds its handler's lock, and nobody knows for how long.
            for handler in self._handlers:
                handler.close()
        super().close()

    def _write(self) -> None:
        told = 0
        while (record := self._waiting.get()) is not None:
            for handler in self._handlers:
                handler.handle(record)
            if self.dropped > told and self._waiting.empty():
                lost, told = self.dropped - told, self.dropped
                logging.getLogger(__name__).warning("%d lines of the log were left out: writing was too slow", lost)


def configure_logging(level: str, form: str, file: RotatingFile | None = None) -> Background:
    """Log to standard error, and a file when there is one, from ``level`` on; ``form`` is ``text`` or ``json``.

    For a process's main function only; closing what it gives writes what waits.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(file)
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    background = Background(*handlers)
    logging.basicConfig(level=level.upper(), handlers=[background], force=True)
    # What these say at their default levels is about connections, and there is one per poll.
    for noisy in (
        "aioice",
        "aiortc",
        "sanic.root",
        "sanic.access",
        "sanic.server",
        "websockets",
        "asyncio",
        "jax",
        "httpx2",
    ):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    return background


@contextmanager
def keeping(logs: RecentLogs) -> Iterator[None]:
    """Let ``logs`` hear everything that is logged, for a while."""
    root = logging.getLogger()
    root.addHandler(logs)
    try:
        yield
    finally:
        root.removeHandler(logs)


def _line(record: logging.LogRecord, message: str) -> Mapping[str, Any]:
    return {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname,
        "logger": record.name,
        **_ids(record),
        "message": message,
    }


def _ids(record: logging.LogRecord) -> Mapping[str, str]:
    return getattr(record, "subject", None) or subject()


class LogSettings(Group):
    """Log"""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or one JSON object per line."
    )
    log_file: str | None = Field(default=None, description="File that is logged to besides standard error.")
    log_file_bytes: int = Field(
        default=10 << 20, ge=10_000, description="Bytes after which the log file is set aside and a new one begun."
    )
    log_files: int = Field(default=5, ge=1, le=1000, description="Log files kept; the oldest goes.")
    log_lines: int = Field(default=500, ge=1, le=100_000, description="Lines kept for GET /debug/logs.")


LONGEST_TEXT = 200


def sanitize_text(words: str, longest: int = LONGEST_TEXT) -> str:
    """One short line. An unpaired surrogate, which JSON may hold, would break every encoding after this one."""
    # Looked at letter by letter: of 4 MB, which a message may have, that is 0.3 s for the 200 that are kept.
    words = words.lstrip()[: 4 * longest]
    return "".join(character if character.isprintable() else " " for character in words).strip()[:longest]
