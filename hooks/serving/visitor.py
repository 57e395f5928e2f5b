"""Who may look at events: whoever has the secret, or sits at this machine."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from sanic import HTTPResponse, Request
from sanic.response import json

from hooks.signatures import is_secret

# What a Host header, and behind its scheme an Origin, may be made of: either is anybody's text.
HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::\d{1,5})?")
# A proxy or a tunnel on this machine makes everybody look as if they sat here; these tell that it was one.
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "cf-connecting-ip", "ngrok-trace-id", "via")


def is_here(request: "Request[Any, Any]") -> bool:
    """Whether the request comes from this machine, and not through a proxy or from a web page of somewhere else."""
    if any(name in request.headers for name in FORWARDED):
        return False
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    # A page of a foreign name may resolve to this machine, or post to it: its Host or Origin gives it away.
    named = HOST.fullmatch(host)
    if named is None or not _is_loopback((named["name"] or named["address"]).lower()):
        return False
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
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
