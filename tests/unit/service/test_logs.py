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
        ("nothing to hide at 12:30:01", "nothing to hide at 12:30:01"),
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
def test_what_looks_like_a_secret_or_a_folder_is_masked(text, expected):
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
    logs.emit(record_of("%d apples", "many"))
    assert next(iter(logs.newest()))["message"] == "%d apples"


def test_an_exception_leaves_its_kind_only(logs):
    try:
        raise RuntimeError("hunter2")
    except RuntimeError:
        logging.getLogger("kept").exception("it broke")
    assert next(logs.newest())["message"] == "it broke (RuntimeError)"


def test_a_log_call_with_wrong_arguments_does_not_raise(logs):
    logs.emit(record_of("%d apples", "many"))
    assert next(logs.newest())["message"] == "%d apples"


def test_no_line_is_kept_after_the_context():
    logs = RecentLogs(3)
    with capture_logs(logs):
        pass
    logging.getLogger("kept").error("later")
    assert list(logs.newest()) == []


def record_of(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.WARNING, "f", 1, message, arguments, None)


async def test_lines_for_people_and_for_programs_have_the_same_ids():
    bind_log_context(session="arm", request="81c7")
    assert " a.b [arm 81c7]: it moves" in TextFormatter().format(record_of("it moves"))
    line = json.loads(JsonFormatter().format(record_of('a "quoted"\nword %s', "x")))
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "a.b", 'a "quoted"\nword x')
    assert (line["session"], line["request"]) == ("arm", "81c7")
    assert "\n" not in TextFormatter().format(record_of("GET %s", "/x\n10:00:00 INFO all is well\x1b[2J"))


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
def test_secrets_are_masked_wherever_lines_go(formatter):
    line = formatter.format(record_of("key %s in %s", "rjk_0123456789abcdef", "/var/lib/robojax"))
    assert "0123" not in line
    assert "/var/lib/robojax" in line, "who reads the log file may know the machine"


class Gate(logging.Handler):
    """A terminal that is paused until its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.began = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.began.set()
        self.open.wait(60)
        self.lines.append(self.format(record))


@pytest.fixture
def is_written_in_the_end(monkeypatch):
    """However long a busy machine takes to write it."""
    monkeypatch.setattr("service.logging.FLUSH_TIMEOUT", 60.0)


def test_paused_terminal_delays_nothing_and_lost_lines_are_counted(monkeypatch, is_written_in_the_end):
    monkeypatch.setattr("service.logging.MAX_QUEUED", 3)
    gate = Gate()
    background = BackgroundHandler(gate)
    background.emit(record_of("line 0"))
    assert gate.began.wait(30)
    for number in range(1, 6):
        background.emit(record_of(f"line {number}"))
    assert background.dropped == 2
    gate.open.set()
    background.close()
    assert gate.lines == [f"line {number}" for number in range(4)]


def test_the_end_of_the_process_does_not_wait_for_a_paused_terminal(monkeypatch):
    monkeypatch.setattr("service.logging.FLUSH_TIMEOUT", 0.05)
    gate = Gate()
    background = BackgroundHandler(gate)
    background.emit(record_of("a line"))
    background.close()
    assert gate.lines == []
    gate.open.set()


def test_an_exception_goes_with_its_line(is_written_in_the_end):
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


def test_a_full_log_file_is_set_aside_and_the_oldest_goes(tmp_path: Path, is_written_in_the_end):
    file = RotatingLogFile(tmp_path / "logs" / "robojax.log", 200, 3)
    background = BackgroundHandler(file)
    for number in range(30):
        background.emit(record_of(f"line {number:02}" + "." * 60))
    background.close()
    kept = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert kept == ["robojax.log", "robojax.log.1", "robojax.log.2"]
    assert "line 29" in (tmp_path / "logs" / "robojax.log").read_text()


def test_a_log_file_on_a_full_disk_is_said_once_and_nothing_fails(tmp_path: Path, capsys):
    (tmp_path / "full").symlink_to("/dev/full")
    file = RotatingLogFile(tmp_path / "full", 10_000, 1)
    for _ in range(3):
        file.handle(record_of("a line"))
    file.close()
    assert capsys.readouterr().err.count("cannot be written") == 1
