"""One call of the Hub's webhooks API: within a limit, repeated only where that does no harm, and without secrets told.

The requests go through ``huggingface_hub.get_session()``, the client that the process configured (proxy, certificates,
offline mode), with a timeout of their own each. ``HfApi``'s methods take none, their client has none, and the one way
to give it one, ``set_client_factory``, would change every download of the process and end those that run.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpx2
from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from hooks.errors import HubTrouble, InvalidWebhook
from hooks.limits import within
from hooks.management.retries import asked_to_wait, may_have_been_done, wait_before_retry
from hooks.management.trouble import HubRefused, HubSilent, HubUnreachable, WebhookUnknown
from hooks.management.webhooks import MASK

ROOT = "/api/settings/webhooks"
CONNECT = 10.0  # seconds


class Hub:
    """The webhooks API of an endpoint.

    Args:
        api: tells the endpoint, the token and the headers.
        timeout: seconds for one call, with all that is waited for and repeated.
    """

    def __init__(self, api: HfApi, timeout: float):
        if not timeout > 0:
            raise InvalidWebhook(f"timeout {timeout!r}: wanted seconds above 0")
        if not api.endpoint.startswith(("http://", "https://")):
            raise InvalidWebhook(f"endpoint {api.endpoint!r}: wanted https://host, as https://huggingface.co")
        self.api = api
        self.timeout = timeout
        self.endpoint = api.endpoint.rstrip("/")

    def call(
        self,
        method: str,
        path: str = "",
        body: Mapping[str, object] | None = None,
        *,
        token: bool | str | None = None,
        repeats: bool = False,
        hidden: Iterable[str] = (),
    ) -> Any:
        """The JSON of the answer, None where it has no body.

        Args:
            path: after ``ROOT``.
            repeats: whether doing it twice is doing it once.
            hidden: secrets that no message may hold.

        Raises:
            HubTrouble: it was refused, not answered in time, or answered with nonsense.
        """
        headers = self._headers(token)
        end = time.monotonic() + self.timeout
        hidden = [secret for secret in hidden if secret]
        maybe_done = False
        attempt = 0
        while True:
            attempt += 1
            try:
                response = self._send(method, path, body, headers, end)
                return self._read(response, path, hidden)
            except HubTrouble as trouble:
                if method == "DELETE" and maybe_done and trouble.status == 404:
                    return None  # an attempt before this one did it
                maybe_done |= may_have_been_done(trouble)
                wait = wait_before_retry(trouble, attempt, now=time.time()) if repeats else None
                if wait is None or time.monotonic() + wait >= end:
                    raise
            time.sleep(wait)

    def _headers(self, token: bool | str | None) -> dict[str, str]:
        api = self.api
        try:
            headers = build_hf_headers(
                token=api.token if token is None else token,
                library_name=api.library_name,
                library_version=api.library_version,
                user_agent=api.user_agent,
                headers=api.headers,
            )
        except LocalTokenNotFoundError:
            raise HubTrouble("there is no token; run `hf auth login`, or set HF_TOKEN") from None
        # Looked at here: the HTTP client's error would quote it.
        if not all(" " <= character <= "~" for character in headers.get("authorization", "")):
            raise InvalidWebhook("the token has characters that no token has; wanted it as hf_...")
        return headers

    def _send(
        self, method: str, path: str, body: Mapping[str, object] | None, headers: dict[str, str], end: float
    ) -> httpx2.Response:
        progress = _Progress(end)
        began = time.monotonic()
        seconds = max(end - began, 0.001)
        content = None
        if body is not None:
            encoded = json.dumps(body).encode()
            # As a stream: huggingface_hub logs bodies that are at hand when HF_DEBUG is set, secrets with them.
            content = iter((encoded,))
            headers = {**headers, "content-type": "application/json", "content-length": str(len(encoded))}

        def send() -> httpx2.Response:
            return get_session().request(
                method,
                self.endpoint + ROOT + path,
                headers=headers,
                content=content,
                timeout=httpx2.Timeout(seconds, connect=min(CONNECT, seconds)),
                extensions={"trace": progress},
            )

        try:
            # The client's timeouts are for each piece it waits for, and an address look-up has none.
            return within(seconds, send)
        except (httpx2.TimeoutException, TimeoutError):
            what = f"did not answer {method} {ROOT}{path}" if progress.is_sent else "could not be connected to"
            raise HubSilent(
                f"{self.endpoint} {what} in {time.monotonic() - began:.1f} s (timeout {self.timeout:g} s); "
                "try again later, or give a longer timeout",
                was_sent=progress.is_sent,
            ) from None
        except OfflineModeIsEnabled:
            raise HubUnreachable("HF_HUB_OFFLINE is set: nothing is sent; unset it", was_sent=False) from None
        except httpx2.RequestError as error:
            raise HubUnreachable(
                f"{self.endpoint} cannot be reached: {error}; look at the endpoint and the network",
                was_sent=progress.is_sent,
            ) from None
        except httpx2.InvalidURL as error:
            raise InvalidWebhook(f"endpoint {self.endpoint!r} is no address: {error}") from None
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
            # Another thread met a broken connection, upon which huggingface_hub closes the client of all.
            raise HubUnreachable(
                f"the connection to {self.endpoint} was closed by another thread", was_sent=progress.is_sent
            ) from None

    def _read(self, response: httpx2.Response, path: str, hidden: list[str]) -> Any:
        try:
            hf_raise_for_status(response)
        except HfHubHTTPError as error:
            raise self._refusal(error, path, hidden) from None
        if not response.content.strip() or response.request.method == "DELETE":
            return None
        try:
            return response.json()
        except ValueError:
            raise HubTrouble(
                f"{self.endpoint} answered {response.status_code} with no JSON to {response.request.method} "
                f"{ROOT}{path}; is it a Hub?",
                response.status_code,
            ) from None

    def _refusal(self, error: HfHubHTTPError, path: str, hidden: list[str]) -> HubRefused:
        response = error.response
        status = response.status_code
        said = error.server_message or response.reason_phrase
        for secret in hidden:
            said = said.replace(secret, MASK)
        told = f"{self.endpoint} refused {response.request.method} {ROOT}{path} with {status}: {said[:500]}"
        if status == 404 and path:
            webhook_id, *rest = path.split("/")[1:]
            what = f"webhook {webhook_id!r}" + (f" with a delivery {rest[1]!r}" if rest[:1] == ["replay"] else "")
            there = f"there is no {what} at {self.endpoint}: {said[:200]}; list_webhooks() tells which there are"
            return WebhookUnknown(there, response=response, server_message=said)
        asked = asked_to_wait(response.headers, now=time.time())
        then = {
            401: "log in with `hf auth login`, or set HF_TOKEN",
            403: "the token may not manage webhooks: wanted one with write access of the account they belong to",
            429: "try again later" if asked is None else f"it asks to wait {asked:.0f} s",
        }.get(status)
        return HubRefused(f"{told}; {then}" if then else told, response=response, server_message=said)


class _Progress:
    """Hears from the connection how far a request got, and stops one that would be sent after its limit."""

    def __init__(self, end: float):
        self.end = end
        self.is_sent = False

    def __call__(self, event: str, details: object) -> None:
        if event.endswith("send_request_headers.started"):
            if time.monotonic() > self.end:
                raise httpx2.WriteTimeout("the limit is over")
            self.is_sent = True
