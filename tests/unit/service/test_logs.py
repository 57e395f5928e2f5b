import asyncio
import io
import json
import logging
import threading
from pathlib import Path

import pytest

from service.logging import (
    BackgroundHandler,
    JsonFormatter,
    RecentLogs,
    RotatingLogFile,
    TextFormatter,
    bind_log_context,
    capture_logs,
    redact,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no secret at 12:30:01", "no secret at 12:30:01"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: ***"),
        ("sent bearer abcdefgh1234", "sent bearer ***"),
        ("X-API-Key=abc123, next", "X-API-Key=***, next"),
        ('{"token": "abc"}', '{"token": "***"}'),
        ("password=hunter2&x=1", "password=***&x=1"),
        ("used hf_abcdEFGH1234", "used hf_***"),
        ("jwt eyJhbGciOiJI.eyJzdWIi.sig", "jwt ***"),
        ("token-eyJhbGciOiJI.eyJzdWIi.sig", "token-***"),
        ("eyJ-eyJhbGciOiJI.eyJzdWIi.sig and", "*** and"),
        ("a.b+c-http://me:pw@host", "a.b+c-http://***@host"),
        ("http://me:pw@host:8000/robotics", "http://***@host:8000/robotics"),
        ("http://127.0.0.1:8001/sessions/arm/start", "http://127.0.0.1:8001/sessions/arm/start"),
        ("policy '/home/me/models/act' missing", "policy '.../act' missing"),
        ("in /root/.cache/robojax/xla", "in .../xla"),
        ("POST /sessions failed", "POST /sessions failed"),
    ],
)
def test_secrets_and_folders_are_masked(text, expected):
    assert redact(text) == expected


@pytest.fixture
def logs():
    logs = RecentLogs(3)
    with capture_logs(logs):
        yield logs


def test_the_newest_lines_are_kept_and_numbered(logs):
    log = logging.getLogger("kept")
    for number in range(5):
        log.warning("line %d", number)
    lines = list(logs.newest())
    assert [line["message"] for line in lines] == ["line 4", "line 3", "line 2"]
    assert list(logs.newest(before=lines[1]["number"])) == lines[2:]
    log.error("broken")
    assert [line["level"] for line in logs.newest(logging.ERROR)] == ["ERROR"]


def test_long_and_malformed_messages_are_kept_without_half_a_secret(logs):
    logging.getLogger("kept").warning("%s http://me:%s@host", "a" * 8000, "p" * 8000)
    [line] = logs.newest()
    assert line["message"] == "a" * 8000 + " ... (16016 characters)"
    logs.emit(make_record("%d apples", "many"))
    assert next(iter(logs.newest()))["message"] == "%d apples"


def test_an_exception_is_kept_only_as_its_type(logs):
    try:
        raise RuntimeError("hunter2")
    except RuntimeError:
        logging.getLogger("kept").exception("it broke")
    assert next(logs.newest())["message"] == "it broke (RuntimeError)"


def test_no_line_is_kept_after_the_context():
    logs = RecentLogs(3)
    with capture_logs(logs):
        pass
    logging.getLogger("kept").error("later")
    assert list(logs.newest()) == []


def make_record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.WARNING, "f", 1, message, arguments, None)


async def test_text_and_json_lines_have_the_same_ids():
    bind_log_context(session="arm", request="81c7")
    assert " a.b [arm 81c7]: it moves" in TextFormatter().format(make_record("it moves"))
    line = json.loads(JsonFormatter().format(make_record('a "quoted"\nword %s', "x")))
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "a.b", 'a "quoted"\nword x')
    assert (line["session"], line["request"]) == ("arm", "81c7")
    assert "\n" not in TextFormatter().format(make_record("GET %s", "/x\n10:00:00 INFO all is well\x1b[2J"))


async def test_a_line_carries_the_ids_of_its_session_and_request(logs):
    async def request(number: int) -> None:
        bind_log_context(request=f"r{number}")
        await asyncio.create_task(session())
        logging.getLogger("kept").warning("answered %d", number)

    async def session() -> None:
        bind_log_context(session="arm", request=None)
        logging.getLogger("kept").warning("moves")

    await asyncio.gather(request(1), request(2))
    lines = [(line.get("session"), line.get("request"), line["message"]) for line in logs.newest()]
    assert lines[0] == (None, "r2", "answered 2")
    assert ("arm", None, "moves") in lines


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_secrets_are_masked_by_every_formatter(formatter):
    line = formatter.format(make_record("key %s in %s", "rjk_0123456789abcdef", "/var/lib/robojax"))
    assert "0123" not in line
    assert "/var/lib/robojax" in line, "a reader of the log file may know the folders of the machine"


class PausedTerminal(logging.Handler):
    """Handler that blocks until ``open`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.began = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.began.set()
        self.open.wait(60)
        self.lines.append(self.format(record))


@pytest.fixture
def long_flush_timeout(monkeypatch):
    """Allow a busy machine enough time to write all lines."""
    monkeypatch.setattr("service.logging.FLUSH_TIMEOUT", 60.0)


def test_a_paused_terminal_does_not_block_and_lost_lines_are_counted(monkeypatch, long_flush_timeout):
    monkeypatch.setattr("service.logging.MAX_QUEUED", 3)
    terminal = PausedTerminal()
    background = BackgroundHandler(terminal)
    background.emit(make_record("line 0"))
    assert terminal.began.wait(30)
    for number in range(1, 6):
        background.emit(make_record(f"line {number}"))
    assert background.dropped == 2
    terminal.open.set()
    background.close()
    assert terminal.lines == [f"line {number}" for number in range(4)]


def test_a_paused_terminal_does_not_delay_the_end_of_the_process(monkeypatch):
    monkeypatch.setattr("service.logging.FLUSH_TIMEOUT", 0.05)
    terminal = PausedTerminal()
    background = BackgroundHandler(terminal)
    background.emit(make_record("a line"))
    background.close()
    assert terminal.lines == []
    terminal.open.set()


def test_an_exception_is_written_with_its_line(long_flush_timeout):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    background = BackgroundHandler(handler)
    error = RuntimeError("token=hunter2")
    background.emit(logging.LogRecord("a.b", logging.ERROR, "f", 1, "failed", None, (RuntimeError, error, None)))
    background.close()
    line = json.loads(stream.getvalue())
    assert "RuntimeError" in line["exception"]
    assert "hunter2" not in line["exception"]


def test_a_full_log_file_is_rotated_and_the_oldest_is_deleted(tmp_path: Path, long_flush_timeout):
    file = RotatingLogFile(tmp_path / "logs" / "robojax.log", 200, 3)
    background = BackgroundHandler(file)
    for number in range(30):
        background.emit(make_record(f"line {number:02}" + "." * 60))
    background.close()
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["robojax.log", "robojax.log.1", "robojax.log.2"]
    assert "line 29" in (tmp_path / "logs" / "robojax.log").read_text()


def test_a_full_disk_is_reported_once_and_logging_does_not_fail(tmp_path: Path, capsys):
    (tmp_path / "full").symlink_to("/dev/full")
    file = RotatingLogFile(tmp_path / "full", 10_000, 1)
    for _ in range(3):
        file.handle(make_record("a line"))
    file.close()
    assert capsys.readouterr().err.count("cannot be written") == 1
