import html
import os
import re
import shutil
import subprocess

import pytest

from hooks.payload import WebhookPayload, sample
from tests.unit.hooks.server.conftest import ask

SECRET = "a-secret-that-is-never-shown"


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def server(make, request):
    server = make(webhook_secret=request.param)

    @server.add_webhook
    async def trigger(payload: WebhookPayload):
        """Train <b>again</b>."""
        return payload.repo.name

    @server.add_webhook("robots/push")
    def push():
        return "pushed"

    with server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands of the page need curl")
def test_the_curl_commands_of_the_landing_page_work(server):
    first, second = map(html.unescape, re.findall(r"<pre>(.*?)</pre>", ask(f"{server.url}/").text, re.DOTALL))
    environment = {**os.environ, "WEBHOOK_SECRET": SECRET}
    for line, answer in ((first, '"robotics-lab/pick-cubes"'), (second, '"pushed"')):
        assert subprocess.check_output(["sh", "-c", f"{line} -s"], env=environment, text=True) == answer


def test_the_landing_page_has_no_script_external_part_or_secret(server):
    page = ask(f"{server.url}/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "Train &lt;b&gt;again&lt;/b&gt;." in page.text
    assert not re.search(r"<script|<img|<link|<iframe|\son\w+=|src=", page.text)
    assert SECRET not in page.text
    assert ("No secret is set" in page.text) == (not server.settings.secrets)


def test_events_are_listed_shown_and_replayed(server):
    headers = {"x_webhook_secret": SECRET} if server.settings.secrets else {}
    ask(f"{server.url}/webhooks/trigger", sample(repo="a/<b>"), x_webhook_secret=SECRET)
    events = f"{server.url}/webhooks/_events"
    (found,) = ask(events, **headers).json()
    assert (found["status"], found["repo"], found["scope"]) == ("done", "a/<b>", "repo.content")
    whole = ask(f"{events}/{found['id']}", **headers).json()
    assert '"name":"a/<b>"' in whole["body"]
    assert "x-webhook-secret" not in whole["headers"]
    assert ask(f"{events}/{found['id']}/replay", {}, **headers).status_code == 202
    assert ask(f"{events}?status=dead&limit=5", **headers).json() == []
    assert ask(f"{events}?status=odd", **headers).status_code == 422
    assert ask(f"{events}?before={'9' * 30}", **headers).json()[0]["id"] == found["id"]
    assert ask(f"{events}/none", **headers).status_code == 404
    assert "link" not in ask(f"{events}?limit=1", **headers).headers
    ask(f"{server.url}/webhooks/trigger", sample(repo="a/second"), x_webhook_secret=SECRET)
    page = ask(f"{events}/?limit=1", **headers)
    assert [event["repo"] for event in page.json()] == ["a/second"]
    assert page.headers["link"] == f'<?limit=1&before={page.json()[0]["number"]}>; rel="next"'
    assert [event["id"] for event in ask(f"{events}/?limit=1&before=2", **headers).json()] == [found["id"]]


@pytest.mark.parametrize(
    "headers",
    [
        {"x_forwarded_for": "1.2.3.4"},
        *({"host": "evil.example"}, {"origin": "https://evil.example"}),
        *({"host": "[::1"}, {"origin": "http://[::1"}),
        *({"host": "evil.example\\@localhost"}, {"host": "evil.example@localhost"}),
        *({"origin": f"{scheme}{{host}}"} for scheme in ("", "//", "http:\\", "ftp://")),
        *({"origin": "http://{host}/"}, {"origin": "http://evil.example\\@{host}"}, {"origin": ""}),
    ],
)
def test_events_without_a_secret_are_only_for_local_visitors(make, headers):
    with make() as server:
        host = server.url.removeprefix("http://")
        headers = {name: text.replace("{host}", host) for name, text in headers.items()}
        assert ask(f"{server.url}/webhooks/_events").status_code == 200
        assert ask(f"{server.url}/webhooks/_events", **headers).status_code == 403


def test_events_of_a_server_with_a_secret_need_the_secret(make):
    with make(webhook_secret=SECRET) as server:
        for headers, status in (({}, 401), ({"x_webhook_secret": "wrong"}, 403), ({"x_webhook_secret": SECRET}, 200)):
            assert ask(f"{server.url}/webhooks/_events", **headers).status_code == status


def test_the_page_does_not_repeat_a_forged_host(make):
    with make() as server:
        assert "evil" not in ask(f"{server.url}/", host='evil"><script>').text
