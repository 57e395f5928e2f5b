"""What a sender is told, always as JSON, and what of a handler's value can be."""

import json
import logging
from collections.abc import Mapping

import pydantic_core
from sanic import HTTPResponse

from hooks.receiving.event import Answer, Event, Status

log = logging.getLogger(__name__)

# What a handler passes on of another server's answer does not say how this one is sent.
OF_THE_WIRE = ("content-type", "content-length", "transfer-encoding", "connection")
MOST_STORED = 1 << 20  # bytes of an answer that are kept for duplicates


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer."""
    return Answer(status, json.dumps(body, separators=(",", ":")).encode(), headers=headers or {})


def refusal(status: int, error: str, **more: object) -> Answer:
    """A JSON answer that says what is wrong."""
    return answer({"error": error, **more}, status)


def busy(error: str, retry_after: float) -> Answer:
    """Not now: the sender is to send it again."""
    headers = {"retry-after": str(max(1, round(retry_after)))}
    return answer({"error": error}, 503, headers)


def accepted(event_id: str) -> Answer:
    """It is kept, and will be handled."""
    return answer({"status": "accepted", "event_id": event_id}, 202)


def failed(event_id: str) -> Answer:
    """The handler failed and the sender is to send it again; what it raised is in the log and the inbox alone."""
    return answer({"error": "The handler of this webhook failed.", "event_id": event_id}, 500)


def value_of(handler: str, value: object) -> Answer:
    """A handler's value: an HTTPResponse as it is, anything else as JSON.

    A value that has no JSON is told as null: the handler has run, and an error would make the sender send again.
    """
    if isinstance(value, HTTPResponse):
        headers = {name: text for name, text in value.headers.items() if name.lower() not in OF_THE_WIRE}
        return Answer(value.status, value.body or b"", value.content_type or "text/plain", headers)
    try:
        return Answer(200, pydantic_core.to_json(value, by_alias=True, inf_nan_mode="null"))
    except (ValueError, TypeError, RecursionError) as error:
        log.error("handler %s returned a %s, which has no JSON: %s", handler, type(value).__name__, error)
        return Answer(200, b"null")


def stored(told: Answer) -> Answer:
    """What is kept of an answer."""
    return told if len(told.body) <= MOST_STORED else answer({"status": "done"})


def duplicate(event: Event) -> Answer:
    """Of an event that was accepted before."""
    marked = {"x-webhook-duplicate": "true"}
    if event.answer is not None and event.status is Status.DONE:
        told = event.answer
        return Answer(told.status, told.body, told.content_type, {**told.headers, **marked})
    if event.status in (Status.WAITING, Status.RUNNING):
        return Answer(202, accepted(event.id).body, headers=marked)
    return answer({"status": str(event.status), "event_id": event.id}, 200, marked)


def respond(told: Answer) -> HTTPResponse:
    """As Sanic sends it."""
    return HTTPResponse(told.body, told.status, dict(told.headers), told.content_type)
