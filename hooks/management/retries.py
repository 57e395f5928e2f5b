"""When a call that failed may be tried again: after how long, or never."""

from collections.abc import Mapping

from huggingface_hub.utils import parse_ratelimit_headers

from hooks.errors import HubTrouble
from hooks.management.trouble import HubRefused, HubSilent, HubUnreachable
from hooks.sending.schedule import retry_after

ATTEMPTS = 4
FIRST_WAIT = 0.5  # seconds; doubled from attempt to attempt


def wait_before_retry(trouble: HubTrouble, attempt: int, *, now: float) -> float | None:
    """Seconds until the call may be repeated, if repeating it does no harm at all; None when it would not help.

    Args:
        attempt: that failed, from 1.
        now: seconds since 1970.
    """
    if attempt >= ATTEMPTS:
        return None
    wait = FIRST_WAIT * 2 ** (attempt - 1)
    if isinstance(trouble, HubRefused):
        status = trouble.response.status_code
        if status != 429 and status < 500:
            return None
        asked = asked_to_wait(trouble.response.headers, now=now)
        return wait if asked is None else asked
    return wait if isinstance(trouble, HubSilent | HubUnreachable) else None


def may_have_been_done(trouble: HubTrouble) -> bool:
    """Whether a call that failed like this may have had its effect all the same."""
    if isinstance(trouble, HubRefused):
        return trouble.response.status_code >= 500
    if isinstance(trouble, HubSilent | HubUnreachable):
        return trouble.was_sent
    return True  # it answered, if nonsense


def asked_to_wait(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds that an answer asks to wait, by ``RateLimit`` or by ``Retry-After`` (seconds or a date)."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return retry_after(next((value for name, value in headers.items() if name.lower() == "retry-after"), None), now)
