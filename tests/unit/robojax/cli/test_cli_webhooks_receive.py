"""Deliveries of ``send`` to a script with a server, and its events as ``events`` lists them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hooks.payload import SAMPLES

MODULE = """
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import ReceiverSettings
from hooks.server.server import WebhooksServer

app = WebhooksServer(port=0, database="webhooks.sqlite", settings=ReceiverSettings(attempts=1))

@app.add_webhook
async def hello(payload: WebhookPayload):
    return payload.event.scope

@app.add_webhook(mode="queue")
def fails(payload):
    raise ValueError("on purpose \\x1b[31m")

app.run()
"""
SECRET = "a-secret-of-the-command-line"


@pytest.fixture
def environment(environment, tmp_path):
    (tmp_path / "app.py").write_text(MODULE)
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "wrong").write_text("another-secret")
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST")} | {
        "WEBHOOK_SECRET": "",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.fixture
def receive(environment, tmp_path):
    """A server process and its URL."""

    @contextmanager
    def start() -> Iterator[tuple[subprocess.Popen[str], str]]:
        process = subprocess.Popen(
            [sys.executable, "app.py"],
            env=environment | {"WEBHOOK_SECRET": SECRET},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            told = ""
            for line in process.stdout:
                told = line.split()[-1] if line.startswith("Running on local") else told
                if line.startswith("Go to "):
                    break
            assert told, process.communicate(timeout=60)
            yield process, told
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    return start


def test_a_script_is_sent_to_and_its_events_are_listed(receive, robojax, call):
    with receive() as (process, url):
        options = ("--all-scopes", "--json")
        sent = robojax("webhooks", "send", f"{url}/webhooks/hello", "--secret-file", "secret", *options)
        rows = [json.loads(line) for line in sent.stdout.splitlines()]
        assert (sent.returncode, len(rows)) == (0, len(SAMPLES))
        assert {row["scope"] for row in rows} == set(SAMPLES)
        assert {row["status"] for row in rows} == {200}

        wrong = call("webhooks", "send", f"{url}/webhooks/hello", "--secret-file", "wrong")
        assert (wrong.returncode, wrong.stdout[:3]) == (1, "403")
        assert "0 of 1 accepted" in wrong.stdout

        options = ("--repo", "lab/arm", "--sha", "c0ffee", "--scope", "repo.content")
        queued = call("webhooks", "send", f"{url}/webhooks/fails", "--secret-file", "secret", *options)
        assert (queued.returncode, queued.stdout[:3]) == (0, "202")

        end = time.monotonic() + 60
        while True:  # it is run beside the answer
            listed = call("webhooks", "events", "list", "--json")
            events = json.loads(listed.stdout)
            newest = events[0]
            if newest["status"] == "dead" or time.monotonic() > end:
                break
        assert len(events) == len(SAMPLES) + 1
        assert (newest["repo"], newest["scope"], newest["status"]) == ("lab/arm", "repo.content", "dead")

        shown = call("webhooks", "events", "show", newest["id"])
        event = json.loads(shown.stdout)
        assert event["error"].startswith("ValueError: on purpose")
        assert json.loads(event["body"])["repo"]["headSha"] == "c0ffee"
        assert SECRET not in shown.stdout
        assert "run 1: ValueError" in call("webhooks", "events", "list", "--status", "dead").stdout

        replayed = call("webhooks", "events", "replay", newest["id"])
        assert replayed.returncode == 0
        assert f"event {newest['id']} is" in replayed.stdout

        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("send", "ftp://x"), "not the URL of an endpoint"),
        (("send", "http://127.0.0.1:1/x", "--secret-file", "app.py"), "not one line of visible ASCII"),
        (("send", "http://127.0.0.1:1/x", "--scope", "repo.flight"), "no sample of 'repo.flight'"),
        (("events", "list"), "there is no file 'webhooks.sqlite'"),
        (("events", "list", "--status", "odd"), "there is no status 'odd'"),
        (("events", "show", "1", "--database", "x"), "there is no file 'x'"),
    ],
)
def test_invalid_arguments_end_with_2_and_an_advice(call, arguments, why):
    ends_with_2(call("webhooks", *arguments), why)


def ends_with_2(told, why):
    assert told.returncode == 2
    assert why in told.stderr
    assert "Do: " in told.stderr


def test_whoever_looks_for_the_events_of_a_script_is_told_its_file(robojax, tmp_path):
    kept = tmp_path / "state" / "robojax" / "webhooks" / "app-0123abcd.sqlite3"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert str(kept) in robojax("webhooks", "events", "list").stderr


def test_a_delivery_to_a_server_that_is_not_there_ends_with_1(robojax):
    told = robojax("webhooks", "send", "http://127.0.0.1:1/webhooks/x")
    assert (told.returncode, told.stdout[:3]) == (1, "---")
    assert "0 of 1 accepted" in told.stdout
