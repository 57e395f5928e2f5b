"""The Hub's HTTP API for webhooks, served by the registry.

Beside the Hub's own routes there is ``GET /api/settings/webhooks/{id}/deliveries?limit=50&before=ID``: the delivery
log, ``{"deliveries": [{id, webhookDeliveryId, type, subject, status, createdAt, finishedAt, nextAttemptAt,
attempts: [{at, seconds, status, exitStatus, error, excerpt, isReplay}]}]}``, newest first. ``id`` is what a replay
takes, ``webhookDeliveryId`` what the receiver saw as ``Webhook-Id``.

Sources: huggingface_hub 2.4 (hf_api.py, its errors in utils/_http.py), https://huggingface.co/docs/hub/webhooks
"""

import json
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

from sanic import Blueprint, HTTPResponse, Request
from sanic import json as in_json

from hooks.addresses import Resolve, TargetRules
from hooks.database import Database
from hooks.errors import (
    DeliveryRefused,
    HooksError,
    HubTrouble,
    InvalidWebhook,
    StoreError,
    UnknownWebhook,
    UnsafeTarget,
)
from hooks.registry import delivery_queue
from hooks.registry.delivery import Outcome
from hooks.registry.jobs import Job
from hooks.registry.sender import Sender
from hooks.registry.store import Webhook, WebhookStore, WebhookUpdate, read_update
from hooks.signatures import is_valid_secret


@dataclass(frozen=True)
class Management:
    """Operations of the API on registered webhooks and their deliveries.

    Raises:
        UnknownWebhook: by every method that is given an id: there is no such webhook.
    """

    _database: Database
    _store: WebhookStore
    _sender: Sender
    _rules: TargetRules
    _jobs: Mapping[str, Job]
    _resolve: Resolve
    _clock: Callable[[], float] = time.time

    async def list(self) -> list[Webhook]:
        """List all webhooks, oldest first."""
        return await self._database.run(self._store.list_webhooks)

    async def get(self, webhook_id: str) -> Webhook:
        """Return the webhook with this id."""
        return await self._database.run(self._store.get, webhook_id)

    async def create(self, body: object) -> Webhook:
        """Register a webhook.

        Args:
            body: JSON, as ``HfApi.create_webhook`` sends it.

        Raises:
            InvalidWebhook, UnsafeTarget: it cannot be.
            UnknownWebhook: there is no such job.
        """
        fields = await self._check_target(read_update(body, is_new=True))
        return await self._database.run(self._store.create, fields, self._clock())

    async def update(self, webhook_id: str, body: object) -> Webhook:
        """Change the fields that the body names.

        Raises:
            UnknownWebhook: there is no such webhook, or no such job.
            InvalidWebhook, UnsafeTarget: it cannot be.
        """
        before = await self.get(webhook_id)
        changes = await self._check_target(read_update(body, is_new=False), before.job)
        return await self._database.run(self._store.update, webhook_id, changes, self._clock())

    async def _check_target(self, changes: WebhookUpdate, old_job: str | None = None) -> WebhookUpdate:
        if changes.url:
            target = self._rules.parse_url(changes.url)
            # A name that nobody knows yet is not unsafe; it is looked up and checked anew for every attempt.
            with suppress(OSError):
                await self._rules.resolve_target(target, self._resolve)
        if changes.job and changes.job not in self._jobs:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UnknownWebhook(f"there is no job {changes.job[:100]!r}; registered by the operator: {known}", 404)
        job = self._jobs.get(changes.job or (old_job or "" if not changes.url else ""))
        unknown = sorted(set(changes.secrets or ()) - set(job.secrets if job else ()))
        if unknown and job:
            raise InvalidWebhook(
                f"secrets: job {job.id!r} takes no {', '.join(unknown)}; it takes: {', '.join(job.secrets) or 'none'}"
            )
        return changes

    async def enable(self, webhook_id: str) -> Webhook:
        """Enable deliveries of a webhook (again)."""
        enabled = await self._database.run(self._store.enable, webhook_id, self._clock())
        self._sender.wake()
        return enabled

    async def disable(self, webhook_id: str) -> Webhook:
        """Disable deliveries of a webhook."""
        return await self._database.run(self._store.disable, webhook_id, self._clock())

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook and its delivery log."""
        await self._database.run(self._store.delete, webhook_id)

    async def deliveries(self, webhook_id: str, limit: int, before: str | None) -> "list[dict[str, Any]]":
        """List a webhook's delivery log, newest first."""
        await self.get(webhook_id)
        return await self._database.run(delivery_queue.list_deliveries, webhook_id, limit, before)

    async def replay(self, webhook_id: str, delivery_id: str) -> Outcome:
        """Send a logged delivery again now; a job is only started, and the log has how it ended.

        Raises:
            UnknownWebhook: there is no such webhook, or no such delivery of it.
            DeliveryRefused: there was no HTTP answer.
        """
        webhook = await self.get(webhook_id)
        outcome = await self._sender.replay(webhook_id, delivery_id, is_awaited=webhook.job is None)
        if outcome is None:
            raise UnknownWebhook("there is no delivery of this id in the webhook's log; it may have been pruned", 404)
        if outcome.status is None:
            raise DeliveryRefused(502, f"replayed, but not taken: {outcome.text}")
        return outcome


PREFIX = "/api/settings/webhooks"
MAX_BODY = 256 << 10
MAX_VALUES = 1 << 13  # in a body; as many take 3 ms to read
MAX_LISTED = 200

# The Hub's own words: huggingface_hub tells a wrong token from a missing repo by them.
NO_TOKEN = "Invalid username or password."
WRONG_TOKEN = "Invalid credentials in Authorization header"

Handler = Callable[..., Coroutine[Any, Any, HTTPResponse]]


def build_error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> HTTPResponse:
    """Build an error answer in the Hub's form, which ``HfHubHTTPError`` shows."""
    in_header = message.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")[:2000]
    return in_json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": in_header, **(headers or {})})


def add_routes(
    blueprint: Blueprint,
    management: Callable[[], Management],
    *,
    tokens: tuple[str, ...],
    read_tokens: tuple[str, ...],
    owner: str,
) -> None:
    """Add the API's routes to a blueprint.

    Args:
        management: the registry that answers, while the server runs.
    """

    def require_token(*, is_write: bool) -> Callable[[Handler], Handler]:
        """Require a token before the handler runs, and answer its errors."""

        def decorate(handler: Handler) -> Handler:
            @wraps(handler)
            async def guard(request: Request, **arguments: str) -> HTTPResponse:
                token = _get_bearer_token(request)
                may_write, may_read = is_valid_secret(token, tokens), is_valid_secret(token, read_tokens)
                if not token:
                    text = f"{NO_TOKEN} A token of this registry is needed: Authorization: Bearer ... (HF_TOKEN)"
                    return build_error(401, "Unauthorized", text, {"WWW-Authenticate": "Bearer"})
                if not may_write and not may_read:
                    return build_error(401, "Unauthorized", WRONG_TOKEN, {"WWW-Authenticate": "Bearer"})
                if is_write and not may_write:
                    return build_error(403, "Forbidden", "This token may only read webhooks")
                try:
                    return await handler(request, **arguments)
                except (InvalidWebhook, UnsafeTarget) as error:
                    return build_error(400, "BadRequest", str(error))
                except HubTrouble as error:
                    return build_error(404, "NotFound", str(error))
                except DeliveryRefused as error:
                    return build_error(error.status, "ReplayFailed", str(error))
                except StoreError:
                    return build_error(503, "Unavailable", "the registry cannot write its database; its log says why")
                except HooksError as error:
                    return build_error(503, "Unavailable", str(error))

            return guard

        return decorate

    async def whoami(request: Request) -> HTTPResponse:
        role = "write" if is_valid_secret(_get_bearer_token(request), tokens) else "read"
        token = {"displayName": "robojax", "role": role}
        return in_json(
            {
                "type": "user",
                "id": owner,
                "name": owner,
                "fullname": owner,
                "email": None,
                "orgs": [],
                "isPro": False,
                "auth": {"type": "access_token", "accessToken": token},
            }
        )

    async def list_harnesses(request: Request) -> HTTPResponse:
        # The ``hf`` command asks for this before anything else, and without a token.
        return in_json({"standardEnvVars": [], "harnesses": {}})

    async def list_webhooks(request: Request) -> HTTPResponse:
        return in_json([webhook.to_json() for webhook in await management().list()])

    async def create_webhook(request: Request) -> HTTPResponse:
        return in_json({"webhook": (await management().create(_read_body(request))).to_json()})

    async def get_webhook(request: Request, webhook_id: str) -> HTTPResponse:
        return in_json({"webhook": (await management().get(webhook_id)).to_json()})

    async def update_webhook(request: Request, webhook_id: str) -> HTTPResponse:
        return in_json({"webhook": (await management().update(webhook_id, _read_body(request))).to_json()})

    async def enable_webhook(request: Request, webhook_id: str) -> HTTPResponse:
        return in_json({"webhook": (await management().enable(webhook_id)).to_json()})

    async def disable_webhook(request: Request, webhook_id: str) -> HTTPResponse:
        return in_json({"webhook": (await management().disable(webhook_id)).to_json()})

    async def delete_webhook(request: Request, webhook_id: str) -> HTTPResponse:
        await management().delete(webhook_id)
        return in_json({})

    async def replay_delivery(request: Request, webhook_id: str, delivery_id: str) -> HTTPResponse:
        return in_json({"status": (await management().replay(webhook_id, delivery_id)).status})

    async def list_deliveries(request: Request, webhook_id: str) -> HTTPResponse:
        limit = request.args.get("limit", "50")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
            raise InvalidWebhook(f"limit: {limit[:20]!r}, wanted 1 to {MAX_LISTED}")
        deliveries = await management().deliveries(webhook_id, int(limit), request.args.get("before"))
        return in_json({"deliveries": deliveries})

    one = f"{PREFIX}/<webhook_id:str>"
    for handler, path, method in (
        (whoami, "/api/whoami-v2", "GET"),
        (list_webhooks, PREFIX, "GET"),
        (create_webhook, PREFIX, "POST"),
        (get_webhook, one, "GET"),
        (update_webhook, one, "POST"),
        (delete_webhook, one, "DELETE"),
        (enable_webhook, f"{one}/enable", "POST"),
        (disable_webhook, f"{one}/disable", "POST"),
        (replay_delivery, f"{one}/replay/<delivery_id:str>", "POST"),
        (list_deliveries, f"{one}/deliveries", "GET"),
    ):
        blueprint.add_route(
            require_token(is_write=method != "GET")(handler), path, methods=[method], name=handler.__name__
        )
    blueprint.add_route(list_harnesses, "/api/agent-harnesses", methods=["GET"], name="harnesses")


def _get_bearer_token(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _read_body(request: Request) -> Any:
    if len(request.body) > MAX_BODY:
        raise InvalidWebhook(f"body: {len(request.body)} bytes, wanted at most {MAX_BODY}")
    # Each value but the first stands behind one of these.
    if sum(map(request.body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InvalidWebhook(f"body: more than {MAX_VALUES} values")
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError):
        raise InvalidWebhook("body: it is no JSON") from None
