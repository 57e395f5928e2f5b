"""Landing page of a webhooks server, as one HTML file: endpoints, commands to try them, latest events."""

import base64
import hashlib
import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape

from hooks.payload import SAMPLE_SCOPES, Payload, sample
from hooks.receiver.endpoint import Filter
from hooks.receiver.events import Event, Status
from hooks.receiver.filters import read_facts

SETTINGS_PAGE = "https://huggingface.co/settings/webhooks"
WHEN_OPEN = "anybody who knows this address can send events."
GUIDE = "https://huggingface.co/docs/hub/webhooks"

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


@dataclass(frozen=True)
class EndpointInfo:
    """Description of an endpoint for pages.

    Attributes:
        text: what its function says of itself.
        has_secret: whether a delivery needs one.
    """

    path: str
    text: str = ""
    filter: Filter = field(default_factory=Filter)
    has_secret: bool = False

    @property
    def filter_text(self) -> str:
        """The endpoint's filters in words; empty when it takes everything."""
        named = ((one.name.replace("_", " "), getattr(self.filter, one.name)) for one in fields(self.filter))
        return "; ".join(f"{name} {', '.join(values)}" for name, values in named if values)

    def build_sample(self) -> Payload:
        """Build a payload that passes the endpoint's filters, as far as one can be made up."""
        kinds = self.filter.repo_types
        # A pattern is no name, but the part before its star and a word are.
        repos = [name.replace("*", "robot") for name in self.filter.repos if not set(name) & set("?[")]
        repo = repos[0] if repos else "robotics-lab/pick-cubes"
        payloads = [
            sample(scope, repo=repo, repo_type=kinds[0] if kinds else "model")
            for scope in ("repo.content", *SAMPLE_SCOPES)
        ]
        return next((payload for payload in payloads if self.filter.matches(read_facts(payload))), payloads[0])


def build_curl_command(url: str, endpoint: EndpointInfo) -> str:
    """Build a command line that delivers a sample; each run has an id of its own, so that none is a duplicate."""
    body = json.dumps(endpoint.build_sample(), separators=(",", ":"))
    secret = ' -H "X-Webhook-Secret: $WEBHOOK_SECRET"' if endpoint.has_secret else ""
    return (
        f"curl -X POST {shlex.quote(url + endpoint.path)} -H 'Content-Type: application/json'"
        f' -H "Webhook-Id: try-$(date +%s)"{secret} -d {shlex.quote(body)}'
    )


def render_page(
    base: str,
    endpoints: Sequence[EndpointInfo],
    *,
    events: Iterable[Event] | None,
    links: Mapping[str, str],
    when_open: str = WHEN_OPEN,
    is_space: bool = False,
    now: float | None = None,
) -> str:
    """Render the landing page.

    Args:
        base: URL of this server, as the visitor reaches it or as the Hub does.
        events: newest first; None when this visitor is not to see them.
        links: other pages of this server, by their name.
        when_open: what an endpoint without a secret means here.
        now: seconds since 1970.
    """
    is_safe = all(endpoint.has_secret for endpoint in endpoints)
    secret = (
        '<p class="good">A secret is set: deliveries without it are refused.</p>'
        if is_safe
        else f'<p class="bad">No secret is set: {escape(when_open)}</p>'
        "<p>Set <code>WEBHOOK_SECRET</code> in its environment"
        + (" (on a Space: as a secret, in its settings)" if is_space else "")
        + ", and give the Hub the same.</p>"
    )
    parts = [
        "<h1>This app processes webhooks</h1>",
        "<nav>" + " ".join(_render_link(url, name) for name, url in links.items()) + "</nav>",
        secret,
        f"<h2>{len(endpoints)} endpoint{'' if len(endpoints) == 1 else 's'}</h2>",
        *(_render_endpoint(base, endpoint) for endpoint in endpoints),
    ]
    if not endpoints:
        parts.append('<p class="quiet">None yet: decorate a function with <code>@server.add_webhook</code>.</p>')
    parts += ["<h2>Last events</h2>", _render_events(events, time.time() if now is None else now)]
    parts += ["<h2>Next</h2>", f"<p>Enter the address of an endpoint at {_render_link(SETTINGS_PAGE, SETTINGS_PAGE)}"]
    parts.append(f" ({_render_link(GUIDE, 'guide')}).")
    if is_space:
        parts.append(" This Space sleeps after 48 hours without traffic on free hardware; a delivery then fails.")
    elif not base.startswith("https://"):
        parts.append(
            f" {escape(base)} is no public address; the Hub needs one: a proxy, a Space, or a tunnel "
            "(<code>share=True</code> in a script)."
        )
    parts.append("</p>")
    return render_html("Webhooks", parts)


def render_html(title: str, parts: Iterable[str]) -> str:
    """Render a complete HTML page from its parts."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _render_link(url: str, text: str) -> str:
    return f'<a href="{escape(url)}">{escape(text)}</a>'


def _render_endpoint(base: str, endpoint: EndpointInfo) -> str:
    text = [f"<h3><code>POST {escape(base + endpoint.path)}</code></h3>"]
    if endpoint.text:
        text.append(f"<p>{escape(endpoint.text)}</p>")
    if endpoint.filter_text:
        text.append(f'<p class="quiet">Only {escape(endpoint.filter_text)}.</p>')
    text.append(f"<pre>{escape(build_curl_command(base, endpoint))}</pre>")
    return "".join(text)


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
