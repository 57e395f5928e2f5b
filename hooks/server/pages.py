"""Pages of a webhooks server: the landing page with instructions, or the user's own page (``ui``)."""

import base64
import hashlib
import inspect
import json
import secrets
import shlex
from collections.abc import Callable, Collection, Mapping
from html import escape

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import html

from hooks.payload import sample
from hooks.receiver.endpoint import Endpoint
from hooks.receiver.receiver import Receiver
from hooks.server.event_routes import HOST

SETTINGS_PAGE = "https://huggingface.co/settings/webhooks"
GUIDE = "https://huggingface.co/docs/hub/webhooks"
WHEN_OPEN = "any client that knows this address can send events."

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: #8881; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
nav a { margin-right: 1rem; } .bad { color: #d33; font-weight: 600; }
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
    """Build a shell command that delivers a sample; each run has a new id, so that it is not a duplicate."""
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
    links: Mapping[str, str],
    when_open: str = WHEN_OPEN,
) -> str:
    """Render the landing page as one HTML document; ``base`` is the URL of this server without a path."""
    secret = (
        "<p>A secret is set: deliveries without it are refused.</p>"
        if has_secret
        else f'<p class="bad">No secret is set: {escape(when_open)}</p>'
        "<p>Set <code>WEBHOOK_SECRET</code> in the environment of the server, and give the Hub the same.</p>"
    )
    tunnel = (
        f" {escape(base)} is not a public address, which the Hub needs: use a proxy, a Space, or a tunnel "
        "(<code>share=True</code> in a script)."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Webhooks</title>'
        f"<style>{STYLE}</style></head><body><h1>This app processes webhooks</h1>"
        f"<nav>{''.join(_render_link(url, name) for name, url in links.items())}</nav>{secret}"
        f"<h2>Endpoints: {len(endpoints)}</h2>"
        f"{''.join(_render_endpoint(base, endpoint, has_secret) for endpoint in endpoints)}"
        f"<h2>Next</h2><p>Enter the address of an endpoint at {_render_link(SETTINGS_PAGE, SETTINGS_PAGE)}"
        f" ({_render_link(GUIDE, 'guide')}).{'' if base.startswith('https://') else tunnel}</p></body></html>"
    )


def _render_link(url: str, text: str) -> str:
    return f'<a href="{escape(url)}">{escape(text)}</a>'


def _render_endpoint(base: str, endpoint: Endpoint, has_secret: bool) -> str:
    function = endpoint.handler.function
    text = ((inspect.getdoc(function) if inspect.isroutine(function) else None) or "").split("\n\n")[0]
    command = build_curl_command(base + endpoint.path, has_secret=has_secret)
    return f"<h3><code>POST {escape(base + endpoint.path)}</code></h3><p>{escape(text)}</p><pre>{escape(command)}</pre>"


def build_ui_blueprint(ui: object) -> Blueprint:
    """Build the routes of a user's own page; raise ``TypeError`` unless it is HTML text or a blueprint."""
    if isinstance(ui, Blueprint):
        return ui
    if not isinstance(ui, str):
        raise TypeError(
            f"ui: found {type(ui).__module__}.{type(ui).__qualname__}, wanted HTML text or a Sanic blueprint; "
            "launch a gradio interface as its own server and link to it"
        )
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
    """Build the landing page's route; ``base`` returns the public URL, if any, and ``links`` are other pages."""
    pages = Blueprint(f"pages-{secrets.token_hex(4)}")

    async def show_landing(request: Request) -> HTTPResponse:
        host = request.headers.get("host", "")
        text = render_page(
            base() or (f"{request.scheme}://{host}" if HOST.fullmatch(host) else "http://127.0.0.1"),
            receiver.endpoints.values(),
            has_secret=bool(receiver.settings.secrets),
            links=links or {},
            when_open=when_open,
        )
        return html(text, headers=HEADERS)

    pages.add_route(show_landing, path, methods=["GET", "HEAD"], name="landing")
    return pages
