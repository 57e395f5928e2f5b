import json
import logging

import pytest

from service.logs import JsonFormatter, RecentLogs, keeping, masked


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
        ("http://me:pw@host:8000/robotics", "http://***@host:8000/robotics"),
        ("http://127.0.0.1:8001/sessions/arm/start", "http://127.0.0.1:8001/sessions/arm/start"),
        ("policy '/home/me/models/act' missing", "policy '.../act' missing"),
        ("in /root/.cache/robojax/xla", "in .../xla"),
        ("POST /sessions failed", "POST /sessions failed"),
    ],
)
def test_what_looks_like_a_secret_or_a_folder_is_masked(text, expected):
    assert masked(text) == expected


@pytest.fixture
def logs():
    logs = RecentLogs(3)
    with keeping(logs):
        yield logs


def test_the_newest_lines_are_kept_oldest_first(logs):
    log = logging.getLogger("kept")
    for number in range(5):
        log.warning("line %d", number)
    assert [line["message"] for line in logs.newest(10)] == ["line 2", "line 3", "line 4"]
    assert [line["message"] for line in logs.newest(1)] == ["line 4"]
    assert logs.newest(0) == []


def test_only_the_asked_level_is_told(logs):
    log = logging.getLogger("kept")
    log.warning("a")
    log.error("b")
    assert [line["level"] for line in logs.newest(10, logging.ERROR)] == ["ERROR"]


def test_an_exception_leaves_its_kind_only(logs):
    try:
        raise RuntimeError("hunter2")
    except RuntimeError:
        logging.getLogger("kept").exception("it broke")
    assert logs.newest(1)[0]["message"] == "it broke (RuntimeError)"


def test_a_log_call_with_wrong_arguments_does_not_raise(logs):
    record = logging.LogRecord("kept", logging.ERROR, "f", 1, "%d apples", ("many",), None)
    logs.emit(record)
    assert logs.newest(1)[0]["message"] == "%d apples"


def test_nothing_is_kept_after_the_end():
    logs = RecentLogs(3)
    with keeping(logs):
        pass
    logging.getLogger("kept").error("later")
    assert logs.newest(3) == []


def test_a_line_of_json_is_json():
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, 'a "quoted"\nword %s', ("x",), None)
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "a.b", 'a "quoted"\nword x')
