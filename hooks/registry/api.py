"""HTTP API of the registry: the Hub's API for webhooks, and the log of deliveries.

Sources: huggingface_hub 2.4 (hf_api.py, its errors in utils/_http.py), https://huggingface.co/docs/hub/webhooks
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import wraps
from typing import Any

from sanic import Blueprint, HTTPResponse, Request
from sanic import json as in_json

from hooks.errors import HooksError, HubTrouble, InvalidWebhook, StoreError, UnknownWebhook, UnsafeTarget
from hooks.registry.delivery import is_valid_secret
from hooks.registry.registry import Registry
from hooks.registry.store import Webhook

PREFIX = "/api/settings/webhooks"
MAX_BODY = 256 << 10
MAX_VALUES = 1 << 13  # values in a body; parsing them takes 3 ms
MAX_LISTED = 200

# huggingface_hub distinguishes a wrong token from a missing repo by these messages of the Hub.
NO_TOKEN = "Invalid username or password."
WRONG_TOKEN = "Invalid credentials in Authorization header"
OWNER = {
    "type": "user",
    "id": "robojax",
    "name": "robojax",
    "fullname": "robojax",
    "email": None,
    "orgs": [],
    "isPro": False,
    "auth": {"type": "access_token", "accessToken": {"displayName": "robojax", "role": "write"}},
}

Handler = Callable[..., Coroutine[Any, Any, Any]]


def build_error(status: int, code: str, message: str) -> HTTPResponse:
    """Build an error response in the Hub's format, which ``HfHubHTTPError`` shows."""
    in_header = message.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")[:2000]
    headers = {"X-Error-Code": code, "X-Error-Message": in_header}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return in_json({"error": message}, status, headers)


def build_blueprint(registry: Registry) -> Blueprint:
    """Build the Hub's API with absolute paths; an app that serves it also runs the registry."""
    blueprint, stack = Blueprint("webhooks-registry"), AsyncExitStack()
    _add_routes(blueprint, registry, registry.settings.tokens)

    async def start(*_: object) -> None:
        await stack.enter_async_context(registry.running())

    async def stop(*_: object) -> None:
        await stack.aclose()

    blueprint.before_server_start(start)
    blueprint.after_server_stop(stop)
    return blueprint


def _add_routes(blueprint: Blueprint, registry: Registry, tokens: tuple[str, ...]) -> None:
    """Add the API's routes to a blueprint; each request must have an accepted token."""

    async def whoami(request: Request) -> Any:
        return OWNER

    async def list_webhooks(request: Request) -> Any:
        return [webhook.to_json() for webhook in await registry.list_webhooks()]

    async def create_webhook(request: Request) -> Any:
        return {"webhook": (await registry.create_webhook(_read_body(request))).to_json()}

    async def update_webhook(request: Request, webhook_id: str) -> Any:
        return {"webhook": (await registry.update_webhook(webhook_id, _read_body(request))).to_json()}

    def answer_webhook(operation: Callable[[str], Coroutine[Any, Any, Webhook]]) -> Handler:
        async def answer(request: Request, webhook_id: str) -> Any:
            return {"webhook": (await operation(webhook_id)).to_json()}

        return answer

    async def delete_webhook(request: Request, webhook_id: str) -> Any:
        await registry.delete_webhook(webhook_id)
        return {}

    async def replay_delivery(request: Request, webhook_id: str, delivery_id: str) -> Any:
        return {"status": (await registry.replay(webhook_id, delivery_id)).status}

    async def list_deliveries(request: Request, webhook_id: str) -> Any:
        limit = request.args.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
            raise InvalidWebhook(f"limit: {limit[:20]!r}, wanted 1 to {MAX_LISTED}")
        return {"deliveries": await registry.list_deliveries(webhook_id, int(limit), request.args.get("before"))}

    one = f"{PREFIX}/<webhook_id:str>"
    for number, (method, path, handler) in enumerate(
        (
            ("GET", "/api/whoami-v2", whoami),
            ("GET", PREFIX, list_webhooks),
            ("POST", PREFIX, create_webhook),
            ("GET", one, answer_webhook(registry.get_webhook)),
            ("POST", one, update_webhook),
            ("DELETE", one, delete_webhook),
            ("POST", f"{one}/enable", answer_webhook(registry.enable_webhook)),
            ("POST", f"{one}/disable", answer_webhook(registry.disable_webhook)),
            ("POST", f"{one}/replay/<delivery_id:str>", replay_delivery),
            ("GET", f"{one}/deliveries", list_deliveries),
        )
    ):
        blueprint.add_route(_guard(handler, tokens), path, methods=[method], name=f"registry_{number}")

    # The ``hf`` command requests this first, without a token.
    @blueprint.get("/api/agent-harnesses", name="harnesses")
    async def list_harnesses(request: Request) -> HTTPResponse:
        return in_json({"standardEnvVars": [], "harnesses": {}})


def _guard(handler: Handler, tokens: tuple[str, ...]) -> Handler:
    """Require a token before the handler runs, and respond with the handler's result or error."""

    @wraps(handler)
    async def answer(request: Request, **arguments: str) -> HTTPResponse:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip() if kind.lower() == "bearer" else ""
        if not token:
            text = f"{NO_TOKEN} A token of this registry is needed: Authorization: Bearer ... (HF_TOKEN)"
            return build_error(401, "Unauthorized", text)
        if not is_valid_secret(token, tokens):
            return build_error(401, "Unauthorized", WRONG_TOKEN)
        try:
            body = await handler(request, **arguments)
            # A thread encodes the body, because that takes milliseconds for a list of deliveries.
            return await asyncio.to_thread(in_json, body)
        except (InvalidWebhook, UnsafeTarget) as error:
            return build_error(400, "BadRequest", str(error))
        except UnknownWebhook as error:
            return build_error(404, "NotFound", str(error))
        except HubTrouble as error:
            return build_error(502, "ReplayFailed", str(error))
        except StoreError:
            return build_error(503, "Unavailable", "the registry cannot write its database; its log says why")
        except HooksError as error:
            return build_error(503, "Unavailable", str(error))

    return answer


def _read_body(request: Request) -> Any:
    if len(request.body) > MAX_BODY:
        raise InvalidWebhook(f"body: {len(request.body)} bytes, wanted at most {MAX_BODY}")
    # Every value except the first follows a comma or bracket.
    if sum(map(request.body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InvalidWebhook(f"body: more than {MAX_VALUES} values")
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError):
        raise InvalidWebhook("body: it is not JSON") from None
