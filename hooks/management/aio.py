"""The client for an event loop: each call in a thread, which the loop does not wait for at its end."""

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from huggingface_hub import HfApi

from hooks.limits import begin
from hooks.management.client import WebhooksClient
from hooks.management.operations import TIMEOUT, Token

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def _in_thread(
    method: Callable[Concatenate[WebhooksClient, Arguments], Result],
) -> Callable[Concatenate["AsyncWebhooksClient", Arguments], Coroutine[Any, Any, Result]]:
    @functools.wraps(method)
    async def call(self: "AsyncWebhooksClient", *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        return await asyncio.wrap_future(begin(lambda: method(self.client, *arguments, **named)))

    return call


class AsyncWebhooksClient:
    """`WebhooksClient`, awaited. Cancelling a call ends the waiting; what was sent may still be done."""

    def __init__(
        self,
        endpoint: str | None = None,
        token: Token = None,
        *,
        timeout: float = TIMEOUT,
        allow_http: Collection[str] = (),
        api: HfApi | None = None,
    ):
        """As `WebhooksClient`."""
        self.client = WebhooksClient(endpoint, token, timeout=timeout, allow_http=allow_http, api=api)

    def __repr__(self) -> str:
        return f"Async{self.client!r}"

    @property
    def endpoint(self) -> str:
        """Where the webhooks are."""
        return self.client.endpoint

    list_webhooks = _in_thread(WebhooksClient.list_webhooks)
    get_webhook = _in_thread(WebhooksClient.get_webhook)
    create_webhook = _in_thread(WebhooksClient.create_webhook)
    update_webhook = _in_thread(WebhooksClient.update_webhook)
    enable_webhook = _in_thread(WebhooksClient.enable_webhook)
    disable_webhook = _in_thread(WebhooksClient.disable_webhook)
    delete_webhook = _in_thread(WebhooksClient.delete_webhook)
    replay = _in_thread(WebhooksClient.replay)
    ensure = _in_thread(WebhooksClient.ensure)
    heal = _in_thread(WebhooksClient.heal)
