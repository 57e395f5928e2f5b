"""Responses of the stub: status, headers, body, and errors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.testing.stub_hub.failures import Failure


@dataclass(frozen=True)
class Answer:
    """One HTTP response; with ``breaks``, only half of its body is sent before that failure."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    breaks: Failure | None = None


class Refusal(Exception):
    """Request that ends in an error; the client derives its exception from ``code``, sent as ``X-Error-Code``."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        named = {"X-Error-Code": code} if code else {}
        body = json.dumps({"error": message}).encode()
        self.answer = Answer(status, body, {"Content-Type": "application/json", "X-Error-Message": message, **named})


def as_json(value: object, headers: Mapping[str, str] | None = None, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})
