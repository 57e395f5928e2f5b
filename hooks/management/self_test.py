"""A delivery that a receiver can do without: does its address answer at all?"""

import json
import time
import uuid
from dataclasses import dataclass

import httpx2

from hooks.limits import within
from hooks.management.webhooks import WebhookInfo

LIMIT = 10.0  # seconds, in which a receiver has to acknowledge
SCOPE = "webhook.test"  # no scope of the Hub's: receivers that look at it do nothing


@dataclass(frozen=True)
class Healing:
    """What became of one suspended webhook.

    Attributes:
        webhook: as it is now.
        is_healed: whether it was enabled.
        reason: why it was not, or what the self-test said.
    """

    webhook: WebhookInfo
    is_healed: bool
    reason: str


def self_test(webhook: WebhookInfo, secret: str | None) -> tuple[bool, str]:
    """Send a payload to the webhook's address from this machine; whether it was taken, and what was found.

    Args:
        secret: of the webhook; without it, an answer that asks for one is as good as it gets.
    """
    if webhook.url is None:
        return True, "it starts a job: there is no address to try"
    watched = webhook.watched[0].name if webhook.watched else "none/none"
    payload = {
        "event": {"action": "update", "scope": SCOPE},
        "repo": {
            "type": "model",
            "name": watched,
            "id": "0" * 24,
            "private": False,
            "url": {"web": "https://huggingface.co", "api": "https://huggingface.co"},
            "owner": {"id": "0" * 24},
        },
        "webhook": {"id": webhook.id, "version": 3},
    }
    headers = {"Content-Type": "application/json", "Webhook-Id": f"self-test-{uuid.uuid4()}"}
    if secret is not None:
        headers["X-Webhook-Secret"] = secret
    url = webhook.url

    def send() -> int:
        # A client of its own: the one of huggingface_hub may carry what was meant for the Hub alone.
        with httpx2.Client(timeout=LIMIT) as client:
            return client.post(url, content=json.dumps(payload), headers=headers).status_code

    began = time.monotonic()
    try:
        status = within(LIMIT, send)
    except (httpx2.TimeoutException, TimeoutError):
        return False, f"its address did not answer in {LIMIT:g} s"
    except (httpx2.RequestError, httpx2.InvalidURL) as error:
        return False, f"its address cannot be reached: {error}"
    found = f"its address answered {status} in {1000 * (time.monotonic() - began):.0f} ms"
    if status in (401, 403) and secret is None:
        return True, f"{found}: it asks for the secret, which was not given to the self-test"
    return 200 <= status < 300, found
