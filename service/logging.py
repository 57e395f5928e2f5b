"""Log lines with session and request ids, without secrets; the newest lines are kept for GET /debug/logs."""

import copy
import itertools
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

from service.setting_types import Common, Group, Private

_LOG_CONTEXT: ContextVar[Mapping[str, str]] = ContextVar("log_context", default={})  # noqa: B039 - it is replaced, never changed


def log_context() -> Mapping[str, str]:
    """Return the ids of this task's log lines, e.g. ``{"session": "arm"}``; a new task inherits them."""
    return _LOG_CONTEXT.get()


def bind_log_context(**ids: str | None) -> None:
    """Add these ids to the log lines of this task and of tasks that it starts; None removes an id."""
    merged = {**_LOG_CONTEXT.get(), **ids}
    _LOG_CONTEXT.set({name: value for name, value in merged.items() if value is not None})


TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s%(about)s: %(message)s"
MAX_QUEUED = 10_000  # lines that may wait for a slow disk or terminal; more are left out, and counted
_ONE_LINE = {number: repr(chr(number))[1:-1] for number in (*range(32), 127, 0x2028, 0x2029)}
# At their default levels these loggers report each connection; Orbax (absl) writes 200 lines for each checkpoint.
NOISY = ("aioice", "aiortc", "sanic.root", "sanic.access", "sanic.server", "websockets", "asyncio", "jax")
NOISY += ("absl", "httpx2")
FLUSH_TIMEOUT = 1.0  # seconds that the end of the process waits for them

# Characters of a logged message; masking takes 2 ms.
MAX_MESSAGE = 1 << 13
# Each pattern reads a text once, because 16 KiB of "a.a.a" took 1.5 s with backtracking.
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
    # Only the last letter of a URL's scheme, so that a long scheme is read once.
    (re.compile(r"(?i)([a-z0-9+.-]://)[^/@\s]++@"), r"\1***@"),
)
# An absolute path keeps its last part; paths of URLs follow a host and are left alone.
_FOLDERS = re.compile(r"(?<![\w:/.>}-])/(?:[\w.@+-]+/)+([\w.@+-]*)")


def redact_secrets(text: str) -> str:
    """Replace likely secrets in a text by ``***``."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def redact(text: str) -> str:
    """Remove likely secrets, and folders of this machine, from a text."""
    return _FOLDERS.sub(r".../\1", redact_secrets(text))


def _truncate(message: str) -> str:
    """Cut a message between words, because half of a secret would not be recognized."""
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[:MAX_MESSAGE].rpartition(' ')[0]} ... ({len(message)} characters)"


class RecentLogs(logging.Handler):
    """Log handler that keeps the newest records in memory, redacted; of an exception only its type, no traceback."""

    def __init__(self, lines: int):
        super().__init__()
        self._numbers = itertools.count(1)
        self._lines: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Store one record."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a log call with wrong arguments must not fail its caller
            message = str(record.msg)
        if record.exc_info and record.exc_info[0] is not None:
            message += f" ({record.exc_info[0].__name__})"
        line = {"number": next(self._numbers), **_line(record, redact(_truncate(message)))}
        self._lines.append((record.levelno, line))

    def newest(self, level: int = logging.NOTSET, before: int | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield lines of at least ``level``, newest first; with ``before`` only lines of a lower number."""
        for severity, line in reversed(list(self._lines)):
            if severity >= level and (before is None or line["number"] < before):
                yield line


class TextFormatter(logging.Formatter):
    """Log formatter for people: one line of text per record."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT, "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Format one record with its ids and without secrets."""
        ids = _ids(record).values()
        record.about = f" [{' '.join(ids)}]" if ids else ""
        return redact_secrets(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format the message on one line, so that no client can forge a line."""
        return super().formatMessage(record).translate(_ONE_LINE)


class JsonFormatter(logging.Formatter):
    """Log formatter that writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record with its ids and without secrets."""
        line = dict(_line(record, redact_secrets(record.getMessage())))
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["exception"] = redact_secrets(record.exc_text)
        return json.dumps(line)


class RotatingLogFile(RotatingFileHandler):
    """Log file that is rotated when it is full; a disk that refuses writes is reported once."""

    def __init__(self, path: Path, size: int, files: int):
        """Open the file; ``size`` is in bytes, for each of ``files`` files.

        Raises:
            OSError: it cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=size, backupCount=files - 1, encoding="utf-8")
        self._is_failing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, and report when the disk begins to refuse."""
        was_failing, self._is_failing = self._is_failing, False
        super().emit(record)
        if self._is_failing and not was_failing:
            sys.stderr.write("robojax: the log file cannot be written; later lines are missing in it\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Note that the disk refused a record; ``emit`` calls it."""
        self._is_failing = True

    def close(self) -> None:
        """Close the file; buffered lines are lost if the disk refuses them."""
        with suppress(OSError):
            super().close()


class BackgroundHandler(logging.Handler):
    """Log handler that passes records to other handlers in a thread, so that slow output does not delay a robot.

    The standard library's QueueListener would wait for ever at its end, and its QueueHandler loses exceptions of JSON.

    Attributes:
        dropped: records left out because too many waited.
    """

    def __init__(self, *handlers: logging.Handler):
        super().__init__()
        self.dropped = 0
        self._handlers = handlers
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record; its text is formatted now, because its arguments may change later."""
        copied = copy.copy(record)
        try:
            copied.msg, copied.args = _truncate(record.getMessage()), None
        except (TypeError, ValueError):  # a log call with wrong arguments must not fail its caller
            copied.args = None
        if record.exc_info:
            copied.exc_text, copied.exc_info = logging.Formatter().formatException(record.exc_info), None
        copied.log_context = log_context()
        try:
            self._queue.put_nowait(copied)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the queued records, for a second at most, and close the other handlers."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=FLUSH_TIMEOUT)
                self._thread.join(FLUSH_TIMEOUT)
            except queue.Full:
                pass
        if not self._thread.is_alive():
            # The thread of a paused terminal holds its handler's lock without a limit.
            for handler in self._handlers:
                handler.close()
        super().close()

    def _write(self) -> None:
        reported = 0
        while (record := self._queue.get()) is not None:
            for handler in self._handlers:
                handler.handle(record)
            if self.dropped > reported and self._queue.empty():
                lost, reported = self.dropped - reported, self.dropped
                logging.getLogger(__name__).warning("%d lines of the log were left out: writing was too slow", lost)


def configure_logging(level: str, form: str, file: RotatingLogFile | None = None) -> BackgroundHandler:
    """Log to standard error, and to a file if there is one, from ``level`` on; ``form`` is ``text`` or ``json``.

    For a process's main function only; closing the returned handler writes the waiting lines.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(file)
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    background = BackgroundHandler(*handlers)
    logging.basicConfig(level=level.upper(), handlers=[background], force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    return background


@contextmanager
def capture_logs(logs: RecentLogs) -> Iterator[None]:
    """Send all records to ``logs``, too, until the context ends."""
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
    return getattr(record, "log_context", None) or log_context()


class LogSettings(Group):
    """Log."""

    log_level: Common[Literal["debug", "info", "warning", "error"]] = Field(
        default="info", description="Lowest level that is logged"
    )
    log_format: Common[Literal["text", "json"]] = Field(
        default="text", description="Format of the log: lines for people, or one JSON object per line"
    )
    log_file: Private[str | None] = Field(default=None, description="Log file, in addition to standard error")
    log_file_bytes: int = Field(
        default=10 << 20, ge=10_000, description="Size of the log file at which a new file is begun, in bytes"
    )
    log_files: int = Field(default=5, ge=1, le=1000, description="Number of log files to keep")
    log_lines: int = Field(default=500, ge=1, le=100_000, description="Number of lines to keep for GET /debug/logs")


MAX_TEXT = 200


def sanitize_text(words: str, longest: int = MAX_TEXT) -> str:
    """Return text as one short printable line, without unpaired surrogates, which no encoding takes."""
    # Cut first, because checking all 4 MB of the longest message takes 0.3 s.
    words = words.lstrip()[: 4 * longest]
    return "".join(character if character.isprintable() else " " for character in words).strip()[:longest]
