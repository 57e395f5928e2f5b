"""Deliveries from ``send`` to a script with a server, and its events in ``events``."""

import json
import signal
import time

import pytest

from hooks.payload import SAMPLES
from tests.unit.hooks.server.conftest import script as script  # The fixture of the same name.

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
    kept = {name: value for name, value in environment.items() if not name.startswith("PYTEST")}
    return kept | {"WEBHOOK_SECRET": "", "XDG_STATE_HOME": str(tmp_path / "state")}


def test_script_receives_deliveries_and_lists_its_events(script, robojax, call):
    with script(MODULE, WEBHOOK_SECRET=SECRET) as (process, url):
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

        deadline = time.monotonic() + 60
        while True:  # The handler runs after the response.
            events = json.loads(call("webhooks", "events", "list", "--json").stdout)
            newest = events[0]
            if newest["status"] == "dead" or time.monotonic() > deadline:
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
        (("send", "http://127.0.0.1:1/x", "--secret-file", "app.py"), "must be a line of visible ASCII"),
        (("send", "http://127.0.0.1:1/x", "--scope", "repo.flight"), "no sample of scope 'repo.flight'"),
        (("events", "list"), "there is no file 'webhooks.sqlite'"),
        (("events", "list", "--status", "odd"), "there is no status 'odd'"),
        (("events", "show", "1", "--database", "x"), "there is no file 'x'"),
    ],
)
def test_invalid_arguments_exit_with_2_and_advice(call, arguments, why):
    result = call("webhooks", *arguments)
    assert result.returncode == 2
    assert why in result.stderr
    assert "Do: " in result.stderr
