"""Logging of the process, and the newest lines for GET /debug/logs with secrets and host paths masked."""

import json
import logging
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_MASKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(?i)\b(x-api-key|authorization|api[_-]?key|token|secret|password|passwd)(['\"]?\s*[:=]\s*['\"]?)"
            r"(?:(?:bearer|basic)\s+)?[^\s'\",;&]+"
        ),
        r"\1\2***",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_***"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), "***"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/@\s]+@"), r"\1***@"),
    # An absolute path keeps its last part; paths of URLs follow a host and are left alone.
    (re.compile(r"(?<![\w:/.>}-])/(?:[\w.@+-]+/)+([\w.@+-]*)"), r".../\1"),
)


def masked(text: str) -> str:
    """The text without what looks like a secret, and without folders of this machine."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text


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
        self._lines.append((record.levelno, _line(record, masked(message))))

    def newest(self, limit: int, level: int = logging.NOTSET) -> list[Mapping[str, Any]]:
        """At most ``limit`` lines of at least ``level``, oldest first."""
        found = [line for number, line in list(self._lines) if number >= level]
        return found[-limit:] if limit else []


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        line = dict(_line(record, record.getMessage()))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, form: str) -> None:
    """Log to standard error from ``level`` on; ``form`` is ``text`` or ``json``. For a process's main function only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT, "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
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
        "message": message,
    }
