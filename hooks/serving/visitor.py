"""Who may look at events: whoever has the secret, or sits at this machine."""

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from sanic import HTTPResponse, Request
from sanic.response import json

from hooks.signatures import is_secret

# A proxy or a tunnel on this machine makes everybody look as if they sat here; these tell that it was one.
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "cf-connecting-ip", "ngrok-trace-id", "via")


def is_here(request: "Request[Any, Any]") -> bool:
    """Whether the request comes from this machine, and not through a proxy or from a web page of somewhere else."""
    if any(name in request.headers for name in FORWARDED):
        return False
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    # A page of a foreign name may resolve to this machine, or post to it: its Host or Origin gives it away.
    try:
        named, page = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
    except ValueError:  # a bracket that does not close
        return False
    if not _is_loopback(named) or (origin and page != host):
        return False
    return _is_loopback(request.ip)


def refusal(request: Request, secrets: Sequence[str]) -> HTTPResponse | None:
    """None for whoever may look; else what they are told."""
    if not secrets:
        return None if is_here(request) else json({"error": "Without a secret, only from this machine itself."}, 403)
    given = request.headers.get("x-webhook-secret")
    if given is None:
        return json({"error": "x-webhook-secret header not set."}, 401)
    return None if is_secret(given, secrets) else json({"error": "Invalid webhook secret."}, 403)


def _is_loopback(name: str | None) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False
