"""WebhooksClient: manages the webhooks of an account on the Hub or on a robojax server.

The client uses huggingface_hub's (2.4) session, headers and errors, but not its webhook methods, which have no timeout,
drop ``hasSecret`` and the job's id from the response, and log a body with its secrets under HF_DEBUG.
"""

import asyncio
import functools
import itertools
import json
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

import httpx2
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, parse_ratelimit_headers

from hooks.client.webhook import (
    GOOD_SECRET,
    HUB_DOMAINS,
    MASK,
    Watchable,
    WebhookInfo,
    check_webhook_id,
    make_body,
    mask_url,
    read_webhook,
)
from hooks.errors import HubTrouble, InvalidWebhook, UnknownWebhook
from hooks.registry.delivery import parse_retry_after
from hooks.threads import run_with_timeout, start_in_thread

ROOT = "/api/settings/webhooks"
TIMEOUT = 30.0  # seconds
CONNECT = 10.0
ATTEMPTS = 4
FIRST_WAIT = 0.5  # seconds; doubled from attempt to attempt

Token = bool | str | None
# One or several items, mappings, or texts ``type:name``.
Watched = Watchable | Iterable[Watchable]
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class HubRefused(HubTrouble, HfHubHTTPError):
    """The Hub responded with an error status; also huggingface_hub's ``HfHubHTTPError``.

    Example:
        >>> from hooks import WebhooksClient
        >>> try:
        ...     WebhooksClient(token="hf_unknown").list_webhooks()
        ... except HubRefused as error:
        ...     print(error.response.status_code)
        401
    """

    def __init__(self, message: str, *, response: httpx2.Response, server_message: str | None = None):
        HfHubHTTPError.__init__(self, message, response=response, server_message=server_message)
        self.status = response.status_code


class WebhookNotFound(UnknownWebhook, HubRefused):
    """The Hub responded with 404: it has no webhook with this id."""


class HubSilent(HubTrouble, TimeoutError):
    """The Hub did not respond within the timeout.

    Example:
        >>> from hooks import HubTrouble
        >>> issubclass(HubSilent, HubTrouble) and issubclass(HubSilent, TimeoutError)
        True
    """


class HubUnreachable(HubTrouble, ConnectionError):
    """The Hub could not be connected to, or the connection broke.

    Example:
        >>> from hooks import WebhooksClient
        >>> try:
        ...     WebhooksClient("http://127.0.0.1:9", token="hf_any", timeout=0.1).list_webhooks()
        ... except HubUnreachable as error:
        ...     print(error.was_sent)
        False
    """


class WebhookFields(TypedDict, total=False):
    """Fields of a webhook by huggingface_hub's names; None counts as omitted.

    A webhook sends to ``url`` or starts the job ``job_id``. ``domains`` default to the Hub's domains in a new webhook.
    Deliveries contain ``secret``. An update replaces the named ``secrets`` (variables of the job) or removes them if
    they are empty.
    """

    url: str | None
    job_id: str | None
    domains: str | Iterable[str] | None
    secret: str | None
    secrets: Mapping[str, str] | None


class WebhooksClient:
    """Client for the Hub's webhook API: huggingface_hub's seven operations, ``replay`` and ``ensure``.

    Every method takes ``token=``, which defaults to the client's token, then to HF_TOKEN or the login.

    Raises:
        InvalidWebhook: an argument is invalid (also a ValueError); nothing was sent.
        UnknownWebhook: there is no webhook with this id.
        HubTrouble: the Hub refused, did not respond in time, or sent an invalid response.

    Example:
        >>> client = WebhooksClient()
        >>> webhook = client.ensure(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm", secret=16 * "s")
        >>> webhook.status
        'enabled'
        >>> client.delete_webhook(webhook.id)
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: Token = None,
        *,
        timeout: float = TIMEOUT,
        allow_http: Collection[str] = (),
    ):
        """Create a client; nothing is sent yet.

        Args:
            endpoint: URL of the Hub or of a robojax server; defaults to HF_ENDPOINT or huggingface.co.
            timeout: seconds for one request with its waits and retries.
            allow_http: hosts and networks that webhooks may send to without TLS, in addition to loopback.
        """
        if not timeout > 0:
            raise InvalidWebhook(f"timeout {timeout!r}: wanted seconds above 0")
        self.endpoint = (constants.ENDPOINT if endpoint is None else endpoint).rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise InvalidWebhook(f"endpoint {self.endpoint!r}: wanted https://host, as https://huggingface.co")
        self._token = token
        self.timeout = timeout
        self.allow_http = tuple(allow_http)

    def list_webhooks(self, *, token: Token = None) -> list[WebhookInfo]:
        """List all webhooks of the account.

        Example:
            >>> from hooks import list_webhooks
            >>> [webhook.url for webhook in list_webhooks()]
            []
        """
        answer = self._request_json("GET", token=token)
        if not isinstance(answer, list):
            raise HubTrouble(f"{self.endpoint} answered {type(answer).__name__} instead of a list of webhooks")
        return [read_webhook(webhook) for webhook in answer]

    def get_webhook(self, webhook_id: str, *, token: Token = None) -> WebhookInfo:
        """Return the webhook with this id.

        Example:
            >>> from hooks import create_webhook, delete_webhook, get_webhook
            >>> webhook = create_webhook(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm")
            >>> get_webhook(webhook.id).watched
            [WebhookWatchedItem(type='model', name='lab/arm')]
            >>> delete_webhook(webhook.id)
        """
        return self._request_webhook("GET", webhook_id, token=token)

    def create_webhook(self, *, watched: Watched, token: Token = None, **fields: Unpack[WebhookFields]) -> WebhookInfo:
        """Create a webhook, without retries; after ``HubTrouble`` it may still exist (see ``ensure``).

        Example:
            >>> from hooks import create_webhook, delete_webhook
            >>> webhook = create_webhook(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm")
            >>> webhook.domains
            ['repo', 'discussion']
            >>> delete_webhook(webhook.id)
        """
        body = make_body(watched=watched, **fields, is_new=True, allow_http=self.allow_http)
        return self._request_webhook("POST", body=_add_default_domains(body), token=token, is_repeatable=False)

    def update_webhook(
        self,
        webhook_id: str,
        *,
        watched: Watched | None = None,
        allow_empty: bool = False,
        token: Token = None,
        **fields: Unpack[WebhookFields],
    ) -> WebhookInfo:
        """Change the given fields and keep the rest.

        The Hub always replaces ``watched`` and ``domains``, so their present values are read first if they are omitted;
        a change by another client in between is lost. With ``allow_empty``, an empty ``watched`` stops all deliveries.

        Example:
            >>> from hooks import create_webhook, delete_webhook, update_webhook
            >>> webhook = create_webhook(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm")
            >>> update_webhook(webhook.id, domains="repo").domains
            ['repo']
            >>> delete_webhook(webhook.id)
        """
        body = make_body(watched=watched, **fields, is_new=False, allow_empty=allow_empty, allow_http=self.allow_http)
        if not {"watched", "domains"} <= set(body):
            body = _get_current_fields(self.get_webhook(webhook_id, token=token)) | body
        return self._request_webhook("POST", webhook_id, body=body, token=token)

    def enable_webhook(self, webhook_id: str, *, token: Token = None) -> WebhookInfo:
        """Enable deliveries of a webhook (again).

        Example:
            >>> from hooks import create_webhook, delete_webhook, enable_webhook
            >>> webhook = create_webhook(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm")
            >>> enable_webhook(webhook.id).status
            'enabled'
            >>> delete_webhook(webhook.id)
        """
        return self._request_webhook("POST", webhook_id, "enable", token=token)

    def disable_webhook(self, webhook_id: str, *, token: Token = None) -> WebhookInfo:
        """Disable deliveries of a webhook until it is enabled.

        Example:
            >>> from hooks import create_webhook, delete_webhook, disable_webhook
            >>> webhook = create_webhook(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm")
            >>> disable_webhook(webhook.id).status
            'disabled'
            >>> delete_webhook(webhook.id)
        """
        return self._request_webhook("POST", webhook_id, "disable", token=token)

    def delete_webhook(self, webhook_id: str, *, token: Token = None) -> None:
        """Delete a webhook; this cannot be undone.

        Example:
            >>> from hooks import create_webhook, delete_webhook, list_webhooks
            >>> webhook = create_webhook(url="https://192.0.2.7/webhooks/push", watched="model:lab/arm")
            >>> delete_webhook(webhook.id)
            >>> list_webhooks()
            []
        """
        self._request_json("DELETE", webhook_id, token=token)

    def replay(self, webhook_id: str, log_id: str, *, token: Token = None) -> int:
        """Send a past delivery again, to the webhook's present address and with its present secret.

        Args:
            log_id: id of the delivery, from the webhook's activity page.

        Returns:
            The HTTP status of its receiver's response.
        """
        answer = self._request_json("POST", webhook_id, "replay", log_id, token=token, is_repeatable=False)
        status = answer.get("status") if isinstance(answer, Mapping) else None
        if not isinstance(status, int):
            raise HubTrouble(f"{self.endpoint} did not report the result of the replay: {str(answer)[:100]}")
        return status

    def ensure(
        self, *, watched: Watched, webhook_id: str | None = None, token: Token = None, **fields: Unpack[WebhookFields]
    ) -> WebhookInfo:
        """Create, update or enable a webhook so that exactly one webhook like this exists.

        A second call changes nothing. The webhook is found by its exact address or job. A secret is sent every time,
        because the Hub does not return it. If the response to a creation is lost, the webhook is searched before the
        creation is repeated.

        Args:
            webhook_id: id of the webhook, instead of a search by address or job.

        Raises:
            HubTrouble: several webhooks send to this address or start this job.
        """
        body = make_body(
            watched=watched, **fields, is_new=True, allow_http=self.allow_http, shortest_secret=GOOD_SECRET
        )
        url, job_id = body.get("url"), body.get("jobSourceId")
        existing = None if webhook_id is None else self.get_webhook(webhook_id, token=token)
        for attempt in itertools.count(1):
            existing = existing or _find_webhook(self.list_webhooks(token=token), url, job_id)
            if existing is not None:
                break
            try:
                return self._request_webhook("POST", body=_add_default_domains(body), token=token, is_repeatable=False)
            except HubTrouble as trouble:
                wait = wait_before_retry(trouble, attempt, now=time.time())
                if wait is None or wait > self.timeout:
                    raise
                time.sleep(wait)
        assert existing is not None
        # The Hub does not return the job of a webhook, so a job that is given together with an id is always sent.
        must_update = "secret" in body or bool(body.get("secrets")) or (webhook_id is not None and job_id is not None)
        body = {"domains": existing.domains} | body
        if must_update or existing.url != url or _as_sets(body) != _as_sets(_get_current_fields(existing)):
            existing = self._request_webhook("POST", existing.id, body=body, token=token)
        if existing.status != "enabled":
            existing = self.enable_webhook(existing.id, token=token)
        return existing

    def _request_webhook(self, method: str, *path: str, **more: Any) -> WebhookInfo:
        answer = self._request_json(method, *path, **more)
        return read_webhook(answer.get("webhook") if isinstance(answer, Mapping) else answer)

    def _request_json(
        self, method: str, *names: str, token: Token, body: Mapping[str, Any] | None = None, is_repeatable: bool = True
    ) -> Any:
        """Send a request to ``ROOT`` and ``names``, repeated after failures if that is safe; return its JSON."""
        path = "".join(f"/{check_webhook_id(name)}" for name in names)
        headers = self._build_headers(token)
        deadline = time.monotonic() + self.timeout
        may_have_succeeded, attempt = False, 0
        while True:
            attempt += 1
            try:
                return self._read_answer(self._send(method, path, body, headers, deadline), path, body or {})
            except HubTrouble as trouble:
                if method == "DELETE" and may_have_succeeded and trouble.status == 404:
                    return None  # An earlier attempt deleted the webhook.
                may_have_succeeded |= trouble.was_sent and (trouble.status is None or trouble.status >= 500)
                wait = wait_before_retry(trouble, attempt, now=time.time()) if is_repeatable else None
                if wait is None or time.monotonic() + wait >= deadline:
                    raise
            time.sleep(wait)

    def _build_headers(self, token: Token) -> dict[str, str]:
        try:
            headers = build_hf_headers(
                token=self._token if token is None else token, library_name="robojax", library_version=_version()
            )
        except LocalTokenNotFoundError:
            raise HubTrouble("there is no token; run `hf auth login`, or set HF_TOKEN") from None
        # Checked here, because the HTTP client's error would contain the token.
        if not all(" " <= character <= "~" for character in headers.get("authorization", "")):
            raise InvalidWebhook("the token has characters that are not printable ASCII; wanted hf_...")
        return headers

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: dict[str, str], deadline: float
    ) -> httpx2.Response:
        started_at, is_sent = time.monotonic(), False
        seconds = max(deadline - started_at, 0.001)
        content = None
        if body is not None:
            encoded = json.dumps(body).encode()
            # As a stream, because huggingface_hub with HF_DEBUG logs other bodies, with their secrets.
            content = iter((encoded,))
            headers = {**headers, "content-type": "application/json", "content-length": str(len(encoded))}

        def on_trace_event(event: str, details: object) -> None:
            nonlocal is_sent
            if event.endswith("send_request_headers.started"):
                if time.monotonic() > deadline:  # Nothing is sent after the deadline.
                    raise httpx2.WriteTimeout("the deadline has passed")
                is_sent = True

        def send() -> httpx2.Response:
            return get_session().request(
                method,
                self.endpoint + ROOT + path,
                headers=headers,
                content=content,
                timeout=httpx2.Timeout(seconds, connect=min(CONNECT, seconds)),
                extensions={"trace": on_trace_event},
            )

        try:
            # The HTTP client's timeouts apply to each read or write, and it has none for DNS look-ups.
            return run_with_timeout(seconds, send)
        except (httpx2.TimeoutException, TimeoutError):
            what = f"did not answer {method} {ROOT}{path}" if is_sent else "could not be connected to"
            raise HubSilent(
                f"{self.endpoint} {what} in {time.monotonic() - started_at:.1f} s (timeout {self.timeout:g} s); "
                "try again later, or give a longer timeout",
                was_sent=is_sent,
            ) from None
        except httpx2.InvalidURL as error:
            raise InvalidWebhook(f"endpoint {self.endpoint!r} is not a URL: {error}") from None
        except (httpx2.RequestError, OfflineModeIsEnabled, RuntimeError) as error:
            # After a broken connection in one thread, huggingface_hub closes the client of all threads.
            if type(error) is RuntimeError and "closed" not in str(error):
                raise
            raise HubUnreachable(
                f"{self.endpoint} cannot be reached: {error}; check the endpoint and the network",
                was_sent=is_sent,
            ) from None

    def _read_answer(self, response: httpx2.Response, path: str, body: Mapping[str, Any]) -> Any:
        request_line = f"{response.request.method} {ROOT}{path}"
        try:
            hf_raise_for_status(response)
            return response.json() if response.content.strip() and response.request.method != "DELETE" else None
        except HfHubHTTPError as error:
            message = error.server_message or response.reason_phrase
        except ValueError:
            raise HubTrouble(
                f"{self.endpoint} answered {response.status_code} with no JSON to {request_line}; is it a Hub?",
                response.status_code,
            ) from None
        for secret in filter(None, (body.get("secret"), *body.get("secrets", {}).values())):
            message = message.replace(secret, MASK)
        status = response.status_code
        if status == 404 and path:
            _, webhook_id, *rest = path.split("/")
            what = f"webhook {webhook_id!r}" + (f" with a delivery {rest[1]!r}" if rest[:1] == ["replay"] else "")
            text = f"there is no {what} at {self.endpoint}: {message[:200]}; list_webhooks() lists the webhooks"
            raise WebhookNotFound(text, response=response, server_message=message)
        wait = read_retry_after(response.headers, now=time.time())
        advice = {
            401: "; log in with `hf auth login`, or set HF_TOKEN",
            403: "; the token may not manage webhooks; use a token with write access to their account",
            429: "; try again later" if wait is None else f"; it asks to wait {wait:.0f} s",
        }.get(status, "")
        text = f"{self.endpoint} refused {request_line} with {status}: {message[:500]}{advice}"
        raise HubRefused(text, response=response, server_message=message)


def wait_before_retry(trouble: HubTrouble, attempt: int, *, now: float) -> float | None:
    """Return the seconds until the retry of a call that failed ``attempt`` times; None for no retry."""
    if attempt >= ATTEMPTS or not isinstance(trouble, HubRefused | HubSilent | HubUnreachable):
        return None
    retry_after = None
    if isinstance(trouble, HubRefused):
        if trouble.response.status_code < 500 and trouble.response.status_code != 429:
            return None
        retry_after = read_retry_after(trouble.response.headers, now=now)
    return FIRST_WAIT * 2 ** (attempt - 1) if retry_after is None else retry_after


def read_retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return the seconds to wait from the header ``RateLimit`` or ``Retry-After`` (seconds or a date), or None."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return parse_retry_after(httpx2.Headers(headers).get("retry-after"), now)


def _get_current_fields(webhook: WebhookInfo) -> dict[str, Any]:
    """Return the fields that the Hub would reset if an update omitted them."""
    return {"watched": [asdict(item) for item in webhook.watched], "domains": webhook.domains}


def _add_default_domains(body: dict[str, Any]) -> dict[str, Any]:
    """Add both domains of the Hub to a new webhook without domains."""
    return {"domains": list(HUB_DOMAINS)} | body


def _as_sets(body: Mapping[str, Any]) -> tuple[set[tuple[str, str]], set[str]]:
    return {(item["type"], item["name"]) for item in body["watched"]}, set(body["domains"])


def _find_webhook(webhooks: Collection[WebhookInfo], url: str | None, job_id: str | None) -> WebhookInfo | None:
    """Return the only webhook with this address or job, or None; raise ``HubTrouble`` if there may be several."""
    if url is not None:
        matching = [webhook for webhook in webhooks if webhook.url == url]
    else:
        # A registry returns the job that a webhook starts; the Hub does not.
        matching = [webhook for webhook in webhooks if webhook.job_id == job_id]
        unknown = [one.id for one in webhooks if one.job is not None and one.job_id is None]
        if not matching and unknown:
            raise HubTrouble(
                f"the Hub does not say which jobs these webhooks start: {', '.join(unknown)}; "
                "choose a webhook with webhook_id, or delete them"
            )
    if len(matching) > 1:
        what = f"start job {job_id}" if url is None else f"send to {mask_url(url)}"
        names = ", ".join(webhook.id for webhook in matching)
        raise HubTrouble(f"{len(matching)} webhooks {what}: {names}; keep only one webhook")
    return matching[0] if matching else None


def _in_thread(
    method: Callable[Concatenate[WebhooksClient, Arguments], Result],
) -> Callable[Concatenate["AsyncWebhooksClient", Arguments], Coroutine[Any, Any, Result]]:
    @functools.wraps(method)
    async def call(self: "AsyncWebhooksClient", *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        return await asyncio.wrap_future(start_in_thread(lambda: method(self.client, *arguments, **named)))

    return call


class AsyncWebhooksClient:
    """`WebhooksClient` for asyncio: each call runs in its own daemon thread.

    A cancelled call stops waiting; the Hub may still execute its request.

    Example:
        >>> import asyncio
        >>> asyncio.run(AsyncWebhooksClient().list_webhooks())
        []
    """

    def __init__(self, endpoint: str | None = None, token: Token = None, **options: Any):
        """Create a client; for the arguments see `WebhooksClient`."""
        self.client = WebhooksClient(endpoint, token, **options)
        self.endpoint = self.client.endpoint

    list_webhooks = _in_thread(WebhooksClient.list_webhooks)
    get_webhook = _in_thread(WebhooksClient.get_webhook)
    create_webhook = _in_thread(WebhooksClient.create_webhook)
    update_webhook = _in_thread(WebhooksClient.update_webhook)
    enable_webhook = _in_thread(WebhooksClient.enable_webhook)
    disable_webhook = _in_thread(WebhooksClient.disable_webhook)
    delete_webhook = _in_thread(WebhooksClient.delete_webhook)
    replay = _in_thread(WebhooksClient.replay)
    ensure = _in_thread(WebhooksClient.ensure)


def _make_function(method: Callable[Concatenate[WebhooksClient, ...], Result]) -> Callable[..., Result]:
    @functools.wraps(method)
    def call(*arguments: Any, token: Token = None, endpoint: str | None = None, **named: Any) -> Result:
        return method(WebhooksClient(endpoint, token), *arguments, **named)

    del call.__wrapped__  # The method's signature has ``self`` and no ``endpoint``.
    return call


# The operations as functions, by huggingface_hub's names; each takes ``token=`` and ``endpoint=``.
list_webhooks = _make_function(WebhooksClient.list_webhooks)
get_webhook = _make_function(WebhooksClient.get_webhook)
create_webhook = _make_function(WebhooksClient.create_webhook)
update_webhook = _make_function(WebhooksClient.update_webhook)
enable_webhook = _make_function(WebhooksClient.enable_webhook)
disable_webhook = _make_function(WebhooksClient.disable_webhook)
delete_webhook = _make_function(WebhooksClient.delete_webhook)


def _version() -> str | None:
    try:
        return version("robojax")
    except PackageNotFoundError:
        return None
