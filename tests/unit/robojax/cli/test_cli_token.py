import json
import re
import stat

import httpx2
import pytest

from robojax.cli import sessions
from tests.testing.http_answers import answering

KEY = re.compile(r"rjk_[A-Za-z0-9_-]{43}")


def status_of(url, key=None):
    headers = {"x-api-key": key} if key else {}
    return httpx2.get(url, headers=headers, timeout=30, trust_env=False).status_code


@pytest.mark.parametrize(("command", "host"), [("serve", "0.0.0.0"), ("transport", "::")])
def test_public_address_needs_keys(robojax, command, host):
    result = robojax(command, "--host", host, "--port", "0")
    assert (result.returncode, result.stdout) == (2, "")
    for text in ("robojax token new --role operator", f"robojax {command} --host {host} --keys-file", "--insecure"):
        assert text in result.stderr


def test_insecure_allows_clients_without_keys_and_warns(serve):
    with serve("--host", "0.0.0.0", "--insecure") as (process, url):
        assert status_of(f"{url}/sessions") == 200
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert "INSECURE: listening on 0.0.0.0 without any key" in errors
    assert process.returncode == 0


def test_keys_are_created_used_listed_and_revoked(call, serve, tmp_path):
    made = call("token", "new", "--role", "operator", "--name", "ann", "--days", "7", "--state", "kept")
    key = made.stdout.strip()
    assert KEY.fullmatch(key)
    assert not KEY.search(made.stderr)
    assert stat.S_IMODE((tmp_path / "kept" / "keys.json").stat().st_mode) == 0o600
    viewer = json.loads(call("token", "new", "--role", "viewer", "--state", "kept", "--json").stdout)["key"]
    signed = call("token", "jwt", "--role", "admin", "--name", "root", "--state", "kept").stdout.strip()
    assert stat.S_IMODE((tmp_path / "kept" / "jwt-secret").stat().st_mode) == 0o600
    with serve("--host", "0.0.0.0", "--state", "kept") as (_, url):
        assert [status_of(f"{url}/{path}") for path in ("health", "sessions")] == [200, 401]
        result = call("sessions", "--server", url)
        assert result.returncode == 4
        assert "set ROBOJAX_KEY" in result.stderr
        assert "no sessions" in call("sessions", "--server", url, ROBOJAX_KEY=key).stdout
        assert "no sessions" in call("sessions", "--server", url, "--key", signed).stdout
        assert "no recordings" in call("recordings", "list", "--server", url, "--key", key).stdout
        (tmp_path / "kept" / "recordings").mkdir()
        for number in range(sessions.PAGE + 1):
            (tmp_path / "kept" / "recordings" / f"damaged-{number}.mcap").touch()
        listed = call("recordings", "list", "--json", "--server", url, "--key", signed).stdout
        assert len({one["name"] for one in json.loads(listed)}) == sessions.PAGE + 1, "all pages are read"
        for move in ("start", "restart", "reset", "delete"):
            assert "Session arm not found" in call(move, "arm", "--server", url, "--key", key).stderr
        refused = call("rollback", "arm", "--server", url, "--key", viewer)
        assert refused.returncode == 4
        assert "robojax token new --role operator" in refused.stderr
        assert call("stop", "--all", "--server", url, "--key", viewer).returncode == 0
        listed = call("token", "list", "--state", "kept", "--json").stdout
        assert json.loads(listed)[0].items() >= {"name": "ann", "role": "operator", "is_over": False}.items()
        assert key not in listed
        assert "ann" in call("token", "list", "--state", "kept").stdout
        assert call("token", "revoke", "ann", "--state", "kept").returncode == 0
        assert [status_of(f"{url}/sessions", one) for one in (key, viewer)] == [401, 200]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("new", "--role", "king", "--state", "s"), "wanted viewer, operator, admin"),
        (("new", "--role", "viewer", "--name", "a b", "--state", "s"), "letters, digits"),
        (("new", "--role", "viewer", "--port", "0"), "stores nothing"),
        (("new", "--role", "viewer", "--all", "--owner", "a", "--state", "s"), "exclude each other"),
        (("revoke", "unknown", "--state", "s"), "no key is called 'unknown'"),
        (("jwt", "--role", "viewer", "--name", "a", "--hours", "25", "--state", "s"), "at most 86400 s"),
        (("jwt", "--role", "viewer", "--name", "a", "--hours", "nan", "--state", "s"), "NaN"),
    ],
)
def test_refused_token_names_the_reason(call, arguments, why):
    result = call("token", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert why in result.stderr


def test_key_is_not_sent_to_a_redirect(call):
    with answering(302, location="/elsewhere") as (port, paths):
        result = call("sessions", "--server", f"http://127.0.0.1:{port}", "--key", "rjk_secret")
    assert result.returncode == 4
    assert paths == ["/sessions"]
