"""Pages of a webhooks server: the landing page with instructions, or an interface of the user (``ui``)."""

import base64
import hashlib
import inspect
import json
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from html import escape
from typing import TypeAlias

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import html

from hooks.errors import HooksError
from hooks.payload import sample
from hooks.receiver.endpoint import Endpoint
from hooks.receiver.inbox import Event, Status
from hooks.receiver.receiver import Receiver
from hooks.server.event_routes import HOST, is_local_request

SETTINGS_PAGE = "https://huggingface.co/settings/webhooks"
GUIDE = "https://huggingface.co/docs/hub/webhooks"
WHEN_OPEN = "anybody who knows this address can send events."

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #b3261e; --quiet: #656d76; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff8a80; --quiet: #9198a1; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; }
.scroll { overflow-x: auto; } .quiet { color: var(--quiet); }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
nav a { margin-right: 1rem; }
"""
POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'self' https://huggingface.co"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def build_curl_command(url: str, *, has_secret: bool) -> str:
    """Build a command line that delivers a sample; each run has an id of its own, so that none is a duplicate."""
    body = json.dumps(sample(), separators=(",", ":"))
    secret = ' -H "X-Webhook-Secret: $WEBHOOK_SECRET"' if has_secret else ""
    return (
        f"curl -X POST {shlex.quote(url)} -H 'Content-Type: application/json'"
        f' -H "Webhook-Id: try-$(date +%s)"{secret} -d {shlex.quote(body)}'
    )


def render_page(
    base: str,
    endpoints: Collection[Endpoint],
    *,
    has_secret: bool,
    events: Iterable[Event] | None,
    links: Mapping[str, str],
    when_open: str = WHEN_OPEN,
    now: float | None = None,
) -> str:
    """Render the landing page as one HTML document.

    Args:
        base: URL of this server without a path, public if there is a public one.
        has_secret: whether a delivery needs a secret.
        events: latest events, newest first; None when this visitor must not see them.
        links: URLs of other pages by their names.
        when_open: consequence of an endpoint without a secret in this app.
        now: seconds since 1970.
    """
    secret = (
        '<p class="good">A secret is set: deliveries without it are refused.</p>'
        if has_secret
        else f'<p class="bad">No secret is set: {escape(when_open)}</p>'
        "<p>Set <code>WEBHOOK_SECRET</code> in the environment of the server, and give the Hub the same.</p>"
    )
    no_endpoint = '<p class="quiet">None yet: decorate a function with <code>@server.add_webhook</code>.</p>'
    is_public = base.startswith("https://")
    parts = [
        "<h1>This app processes webhooks</h1>",
        "<nav>" + " ".join(_render_link(url, name) for name, url in links.items()) + "</nav>",
        secret,
        f"<h2>{len(endpoints)} endpoint{'' if len(endpoints) == 1 else 's'}</h2>",
        "".join(_render_endpoint(base, endpoint, has_secret) for endpoint in endpoints) or no_endpoint,
        "<h2>Last events</h2>",
        _render_events(events, time.time() if now is None else now),
        f"<h2>Next</h2><p>Enter the address of an endpoint at {_render_link(SETTINGS_PAGE, SETTINGS_PAGE)}",
        f" ({_render_link(GUIDE, 'guide')}).",
        ""
        if is_public
        else f" {escape(base)} is no public address; the Hub needs one: a proxy, a Space, or a tunnel "
        "(<code>share=True</code> in a script).",
        "</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Webhooks</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _render_link(url: str, text: str) -> str:
    return f'<a href="{escape(url)}">{escape(text)}</a>'


def _render_endpoint(base: str, endpoint: Endpoint, has_secret: bool) -> str:
    function = endpoint.handler.function
    text = ((inspect.getdoc(function) if inspect.isroutine(function) else None) or "").split("\n\n")[0]
    command = build_curl_command(base + endpoint.path, has_secret=has_secret)
    return f"<h3><code>POST {escape(base + endpoint.path)}</code></h3><p>{escape(text)}</p><pre>{escape(command)}</pre>"


def _render_events(events: Iterable[Event] | None, now: float) -> str:
    if events is None:
        return (
            '<p class="quiet">Shown to visitors from the machine itself only. From elsewhere: '
            "<code>curl -H 'X-Webhook-Secret: ...' .../webhooks/_events</code></p>"
        )
    rows = [_render_row(event, now) for event in events]
    if not rows:
        return '<p class="quiet">None yet.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("When", "Endpoint", "Event", "Repo", "Status", "Id"))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _render_row(event: Event, now: float) -> str:
    subject = f"{event.scope or '?'} {event.action or ''}"
    mark = ' class="bad"' if event.status in (Status.DEAD, Status.FAILED) else ""
    return (
        f"<tr><td>{_format_age(now - event.received_at)}</td><td><code>{escape(event.path)}</code></td>"
        f"<td>{escape(subject)}</td><td>{escape(event.repo or '')}</td>"
        f"<td{mark}>{escape(str(event.status))}</td><td><code>{escape(event.id)}</code></td></tr>"
    )


def _format_age(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"


Interface: TypeAlias = str | Blueprint


class InvalidInterface(HooksError, TypeError):
    """The value of ``ui`` cannot be shown."""


def check_ui(ui: object) -> Interface:
    """Return the ``ui`` if it can be shown.

    Raises:
        InvalidInterface: the value is neither HTML nor a blueprint.
    """
    if isinstance(ui, str | Blueprint):
        return ui
    kind = type(ui)
    raise InvalidInterface(
        f"ui: found {kind.__module__}.{kind.__qualname__}, wanted a text of HTML or a Sanic blueprint; "
        "a gradio interface runs in a server of its own: launch it there and link to it"
    )


def build_ui_blueprint(ui: Interface) -> Blueprint:
    """Build the routes of a user's own interface."""
    if isinstance(ui, Blueprint):
        return ui
    blueprint = Blueprint(f"ui-{secrets.token_hex(4)}")

    async def show(request: Request) -> HTTPResponse:
        return html(ui)

    blueprint.add_route(show, "/", methods=["GET", "HEAD"], name="ui")
    return blueprint


def build_blueprint(
    receiver: Receiver,
    path: str = "/webhooks",
    *,
    base: Callable[[], str | None] = lambda: None,
    links: Mapping[str, str] | None = None,
    when_open: str = WHEN_OPEN,
) -> Blueprint:
    """Build the route of the landing page.

    Args:
        base: returns the public URL of the app, if it is known; else the URL of the request is shown.
        links: URLs of other pages of the app by their names.
        when_open: consequence of an endpoint without a secret in this app.
    """
    pages = Blueprint(f"pages-{secrets.token_hex(4)}")

    async def show_landing(request: Request) -> HTTPResponse:
        host = request.headers.get("host", "")
        text = render_page(
            base() or (f"{request.scheme}://{host}" if HOST.fullmatch(host) else "http://127.0.0.1"),
            receiver.endpoints.values(),
            has_secret=bool(receiver.settings.secrets),
            events=await receiver.list_recent() if is_local_request(request) else None,
            links=links or {},
            when_open=when_open,
        )
        return html(text, headers=HEADERS)

    pages.add_route(show_landing, path, methods=["GET", "HEAD"], name="landing")
    return pages
