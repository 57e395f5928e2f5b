"""Routes that list and replay events, for authorized visitors."""

import asyncio
import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import json

from hooks.errors import HooksError, UnknownEvent
from hooks.receiver.endpoint import check_sender, to_response
from hooks.receiver.inbox import Event, EventStatus
from hooks.receiver.receiver import Receiver

# Accepted form of a Host header, and of an Origin without its scheme; clients may send any text.
HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::\d{1,5})?")
# Headers that proxies and tunnels add. Through a proxy on this machine, all requests seem to come from this machine.
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "cf-connecting-ip", "ngrok-trace-id", "via")


def is_local_request(request: "Request[Any, Any]") -> bool:
    """Whether a request comes from this machine, and neither through a proxy nor from a foreign web page."""
    if any(name in request.headers for name in FORWARDED):
        return False
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    # A foreign web page may resolve its name to this machine, or post to it; its Host or Origin shows this.
    named = HOST.fullmatch(host)
    if named is None or not _is_loopback((named["name"] or named["address"]).lower()):
        return False
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return False
    return _is_loopback(request.ip)


def check_access(request: Request, secrets: Sequence[str]) -> HTTPResponse | None:
    """Return None if a visitor may see events, else the refusing response."""
    if secrets:
        refusal = check_sender(request.headers, tuple(secrets))
        return None if refusal is None else to_response(refusal)
    if is_local_request(request):
        return None
    return json({"error": "Without a secret, only requests from this machine are allowed."}, 403)


def _is_loopback(name: str | None) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False


MAX_LISTED = 500
LAST = (1 << 63) - 1  # largest number of an event
BRIEF = (
    *("id", "number", "path", "status", "attempt", "received_at", "finished_at", "delivery_id", "webhook_id"),
    *("repo", "repo_type", "scope", "action", "size", "error"),
)


def summarize_event(event: Event) -> dict[str, Any]:
    """Summarize an event for a listing."""
    return {name: getattr(event, name) for name in BRIEF} | {"status": str(event.status)}


def serialize_event(event: Event) -> dict[str, Any]:
    """Serialize an event with its headers, which contain no secrets, and its body."""
    return {**summarize_event(event), "headers": dict(event.headers), "body": event.body.decode(errors="replace")}


def build_blueprint(
    receiver: Receiver,
    allowed: Callable[[], Sequence[str]],
    prefix: str = "/webhooks",
    is_allowed: Callable[[Request], bool] = lambda request: False,
) -> Blueprint:
    """Build the routes of events, for requests with an ``allowed`` secret or (without secrets) from this machine."""
    made = Blueprint(f"events-{secrets.token_hex(4)}", url_prefix=f"{prefix}/_events")

    @made.on_request
    async def guard(request: Request) -> HTTPResponse | None:
        return None if is_allowed(request) else check_access(request, allowed())

    @made.get("/", name="list")
    async def list_events(request: Request) -> HTTPResponse:
        """List events, newest first; the header Link is the address of the next page, except on the last page."""
        try:
            limit = min(max(int(request.args.get("limit", "100")), 1), MAX_LISTED)
            before = None if request.args.get("before") is None else min(max(int(request.args.get("before")), 0), LAST)
            status = None if request.args.get("status") is None else EventStatus(request.args.get("status"))
        except ValueError as error:
            return json({"error": str(error)}, 422)
        events = await receiver.events(status=status, path=request.args.get("path"), limit=limit + 1, before=before)
        query = {name: values[0] for name, values in request.args.items() if name != "ticket"}

        def answer() -> HTTPResponse:
            if len(events) <= limit:
                return json([summarize_event(event) for event in events])
            following = urlencode({**query, "before": events[limit - 1].number})
            return json(
                [summarize_event(event) for event in events[:limit]], headers={"link": f'<?{following}>; rel="next"'}
            )

        # A thread encodes the page, because that takes milliseconds.
        return await asyncio.to_thread(answer)

    @made.get("/<event_id:str>", name="get")
    async def get_event(request: Request, event_id: str) -> HTTPResponse:
        return json(serialize_event(await receiver.event(event_id)))

    @made.post("/<event_id:str>/replay", name="replay")
    async def replay_event(request: Request, event_id: str) -> HTTPResponse:
        return json(summarize_event(await receiver.replay(event_id)), 202)

    @made.exception(HooksError)
    async def answer_error(request: Request, error: Exception) -> HTTPResponse:
        is_unknown = isinstance(error, UnknownEvent)
        return json(
            {"error": str(error) if is_unknown else "The events cannot be read now."}, 404 if is_unknown else 503
        )

    return made
