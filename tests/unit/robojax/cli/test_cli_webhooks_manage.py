"""``robojax webhooks``: the management commands, none of which shows a secret."""

import json
import stat
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from robojax.cli import webhooks
from tests.testing.stub_hub import StubHub

URL, HTTP = "https://example.com/hook", "http://robot.local/x"
SECRET, TOKEN = "a-long-enough-secret", "hf_token_of_the_tests"
both = pytest.mark.parametrize("hub", [True, False], ids=["secret echoed", "has secret only"], indirect=True)


@pytest.fixture
def hub(request, monkeypatch, tmp_path) -> Iterator[StubHub]:
    """Hub that returns secrets, unless the test is parametrized."""
    with StubHub(token=TOKEN, echoes_secrets=getattr(request, "param", True)) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("OF_THE_TEST", SECRET)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "secret").write_text(SECRET + "\n")
        yield hub


@pytest.fixture
def call(hub):
    """Run a command in this process and check that it shows no secret."""

    def call(*arguments: str, code: int = 0, **more) -> Result:
        done = CliRunner().invoke(webhooks.app, list(arguments), **more)
        assert done.exit_code == code, done.output
        for secret in (SECRET, TOKEN, "in-the-url"):
            assert secret not in done.output
        assert "Traceback" not in done.output
        return done

    return call


@pytest.fixture
def made(call) -> str:
    """Return the id of an existing webhook."""
    found = call("create", "--url", URL, "--watch", "model:someone/arm", "--watch", "org:others", "--json")
    return json.loads(found.stdout)["id"]


def the_one(hub):
    (webhook,) = hub.webhooks.values()
    return webhook


@both
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--url", URL, "--watch", "model:bert-base-uncased"], {"url": URL, "domains": ["repo", "discussion"]}),
        (
            ["--url", URL, "--watch", "org:others", "--domain", "repo", "--secret-file", "secret"],
            {"watched": [{"type": "org", "name": "others"}], "domains": ["repo"], "secret": SECRET},
        ),
        (["--job-id", "687f", "--watch", "user:someone"], {"url": None, "secret": None}),
        (["--url", URL, "--watch", "kernel:a/b", "--domain", "discussions"], {"domains": ["discussion"]}),
        (["--url", HTTP, "--watch", "model:a", "--allow-http", "robot.local"], {"url": HTTP}),
    ],
)
def test_webhook_is_created(call, hub, arguments, seen):
    output = call("create", *arguments).output
    webhook = the_one(hub)
    assert webhook.id in output
    assert "created" in output
    for name, value in seen.items():
        assert getattr(webhook, name) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--watch", "user:me"], "Missing argument"),
        (["--url", URL], "--watch"),
        (["--url", URL, "--watch", "bad-format"], "'bad-format' cannot be read"),
        (["--url", URL, "--watch", "model:a", "--secret-file", "nope"], "cannot be read"),
        (["--url", URL, "--watch", "model:a", "--generate-secret"], "give a file"),
        (["--url", URL, "--watch", "model:a", "--endpoint", "huggingface.co"], "endpoint"),
        (["--url", HTTP, "--watch", "model:a"], "--allow-http robot.local"),
    ],
)
def test_invalid_arguments_exit_with_2_and_send_nothing(call, hub, arguments, message):
    assert message in call("create", *arguments, code=2).output
    assert hub.requests == []


def test_unknown_type_is_refused_by_the_hub(call, hub):
    assert "400" in call("create", "--url", URL, "--watch", "modle:arm", code=4).output
    assert b'"type": "modle"' in hub.requests[-1].body


@both
def test_list_is_a_table_or_json_or_ids(call, hub, made):
    call("create", "--url", f"{URL}?secret=in-the-url", "--watch", "user:me", "--secret-file", "secret")
    call("create", "--job-id", "687f", "--watch", "user:me")
    hub.webhooks[made].disabled = "suspended-after-failure"
    table = call("ls").output
    for text in (made, URL, "suspended", "enabled", "(job)", "model:someone/arm", "repo discussion", "secret=****"):
        assert text in table
    rows = json.loads(call("list", "--json").stdout)
    assert (rows[0]["id"], rows[0]["status"]) == (made, "suspended")
    assert (rows[0]["watched"], rows[0]["has_secret"]) == (["model:someone/arm", "org:others"], False)
    assert [row["has_secret"] for row in rows] == [False, True, False]
    assert call("ls", "-q").output.split() == list(hub.webhooks)


def test_update_keeps_unnamed_fields(call, hub, made):
    output = call("update", made, "--url", f"{URL}/new").output
    assert made in output
    assert "updated" in output
    assert json.loads(hub.requests[-1].body)["watched"][0] == {"type": "model", "name": "someone/arm"}
    assert the_one(hub).url == f"{URL}/new"
    call("update", made, "--watch", "dataset:a/b", "--domain", "repo", "--secret-file", "secret")
    assert (the_one(hub).watched, the_one(hub).secret) == ([{"type": "dataset", "name": "a/b"}], SECRET)


@pytest.mark.parametrize("what", ["enable", "disable"])
def test_webhook_is_enabled_and_disabled(call, hub, made, what):
    the_one(hub).disabled = what == "enable"
    output = call(what, made).output
    assert made in output
    assert f"{what}d" in output
    assert the_one(hub).disabled == (what == "disable")
    assert json.loads(call(what, made, "--json").stdout)["did"] == f"{what}d"


@pytest.mark.parametrize(("answer", "is_deleted"), [("y\n", True), ("n\n", False), ("", False)])
def test_deletion_needs_confirmation(call, hub, made, answer, is_deleted):
    output = call("delete", made, input=answer, code=0 if is_deleted else 1).output
    assert (made in hub.webhooks) != is_deleted
    assert ("deleted" in output) == is_deleted
    assert made in output


def test_confirmed_deletion_does_not_prompt(call, hub, made):
    assert "give --yes" in call("delete", made, "--json", code=2).output
    assert json.loads(call("delete", made, "--yes", "--json").stdout) == {"id": made, "did": "deleted"}
    assert not hub.webhooks
    output = call("delete", made, "-y", code=4).output
    assert f"there is no webhook '{made}'" in output
    assert "Do: `robojax webhooks list`" in output


def test_generated_secret_is_written_once_for_its_owner_alone(call, hub, tmp_path):
    line = ["create", "--url", URL, "--watch", "model:someone/arm", "--generate-secret", "--secret-file", "new"]
    output = call(*line).output
    secret = (tmp_path / "new").read_text().strip()
    assert secret == the_one(hub).secret
    assert secret not in output
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    call(*line)
    assert [webhook.secret for webhook in hub.webhooks.values()] == [secret, secret]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_refused_replay_exits_with_1(call, hub, made, monkeypatch, status, code):
    monkeypatch.setattr(hub.webhooks, "_replay", lambda webhook, log: status)
    output = json.loads(call("replay", made, "log-1", "--json", code=code).stdout)
    assert output == {"id": made, "did": "replayed", "log_id": "log-1", "status_code": status}


def test_terminal_control_characters_are_escaped(call, hub, made):
    the_one(hub).watched = [{"type": "model", "name": "arm\x1b[2J\n[bold]x"}]
    for output in (call("ls").output, call("enable", made).output):
        assert "\x1b" not in output
        assert "[bold]x" in output
