"""``/webhooks/_events``: what came, and once more from the start for one of it."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import json

from hooks.errors import HooksError, UnknownEvent
from hooks.receiving.event import Event, Status
from hooks.receiving.receiver import Receiver
from hooks.serving.visitor import refusal

MOST = 500
LAST = (1 << 63) - 1  # number that an event can have


def brief(event: Event) -> dict[str, Any]:
    """An event in a listing."""
    return {
        "id": event.id,
        "number": event.number,
        "path": event.path,
        "status": str(event.status),
        "attempt": event.attempt,
        "received_at": event.received_at,
        "finished_at": event.finished_at,
        "delivery_id": event.delivery_id,
        "webhook_id": event.webhook_id,
        "repo": event.repo,
        "repo_type": event.repo_type,
        "scope": event.scope,
        "action": event.action,
        "size": event.size,
        "error": event.error,
    }


def whole(event: Event) -> dict[str, Any]:
    """An event with its headers (never secrets) and its body."""
    return {**brief(event), "headers": dict(event.headers), "body": event.body.decode(errors="replace")}


def blueprint(
    receiver: Receiver,
    allowed: Callable[[], Sequence[str]],
    prefix: str = "/webhooks",
    is_let_in: Callable[[Request], bool] = lambda request: False,
) -> Blueprint:
    """The routes.

    Args:
        allowed: secrets of whoever may look; when there are none, only visitors from this machine may.
        is_let_in: who may look without one, because the server around it knows them.
    """
    made = Blueprint(f"events-{secrets.token_hex(4)}", url_prefix=f"{prefix}/_events")

    @made.on_request
    async def guard(request: Request) -> HTTPResponse | None:
        return None if is_let_in(request) else refusal(request, allowed())

    @made.get("/", name="list")
    async def list_events(request: Request) -> HTTPResponse:
        try:
            limit = min(max(int(request.args.get("limit", "50")), 1), MOST)
            before = None if request.args.get("before") is None else min(max(int(request.args.get("before")), 0), LAST)
            status = None if request.args.get("status") is None else Status(request.args.get("status"))
        except ValueError as error:
            return json({"error": str(error)}, 422)
        found = await receiver.events(status=status, path=request.args.get("path"), limit=limit, before=before)
        return json([brief(event) for event in found])

    @made.get("/<event_id:str>", name="get")
    async def get_event(request: Request, event_id: str) -> HTTPResponse:
        return json(whole(await receiver.event(event_id)))

    @made.post("/<event_id:str>/replay", name="replay")
    async def replay_event(request: Request, event_id: str) -> HTTPResponse:
        return json(brief(await receiver.replay(event_id)), 202)

    @made.exception(HooksError)
    async def tell(request: Request, error: Exception) -> HTTPResponse:
        is_unknown = isinstance(error, UnknownEvent)
        return json(
            {"error": str(error) if is_unknown else "The events cannot be read now."}, 404 if is_unknown else 503
        )

    return made
