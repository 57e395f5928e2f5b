"""Malformed requests as bytes: what schemathesis makes of the OpenAPI documents, and valid ones that were spoiled."""

import contextlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

BODY = {"session_id": "arm", "policy_path": "p", "transport_server_url": "http://127.0.0.1:9"}
# A stop is a stop however it is worded; that this one gets through is tested elsewhere.
LEFT_OUT = "/debug/emergency_stop"


def from_documents(documents: Iterable[Mapping[str, Any]], count: int, seed: int) -> Iterator[bytes]:
    """Requests that schemathesis thinks of, as bytes."""
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Unsatisfiable
    from schemathesis.generation import GenerationMode

    operations: list[Any] = [
        operation.ok()  # pyright: ignore[reportAttributeAccessIssue] - it is one: the documents are ours
        for document in documents
        for operation in schemathesis.openapi.from_dict(dict(document)).get_all_operations()
    ]
    # Those that take something can be sent something wrong.
    kinds = [
        (operation, mode)
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or operation.body or operation.query
    ]
    kinds = [kind for kind in kinds if not kind[0].path.endswith(LEFT_OUT)]
    weights = [8 if operation.body else 3 if operation.query else 1 for operation, _ in kinds]
    for (operation, mode), weight in zip(kinds, weights, strict=True):
        found: list[Any] = []
        each = max(1, round(count * weight / sum(weights)))

        @settings(
            max_examples=each,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        @seeded(seed)
        @given(case=operation.as_strategy(generation_mode=mode))
        def collect(case: Any) -> None:
            found.append(case.as_transport_kwargs(base_url="http://server"))  # noqa: B023 - it runs in this round only

        with contextlib.suppress(Unsatisfiable):
            collect()
        for arguments in found:
            with contextlib.suppress(requests.RequestException, ValueError):  # what its own client could not send
                yield _written(requests.Request(**arguments).prepare())


def _written(request: Any) -> bytes:
    body = request.body or b""
    body = body.encode("utf-8", "surrogateescape") if isinstance(body, str) else bytes(body)
    head = [f"{request.method} {request.path_url} HTTP/1.1", "Host: 127.0.0.1"]
    head += [f"{_text(name)}: {_text(value)}" for name, value in request.headers.items()]
    return "\r\n".join(head).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def seeds() -> list[bytes]:
    """Valid requests to make hostile ones of."""

    def request(method: str, path: str, body: object = None, *headers: str) -> bytes:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
        if raw:
            lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw

    socket_headers = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    return [
        request("GET", "/health"),
        request("GET", "/sessions"),
        request("POST", "/sessions", BODY | {"camera_names": ["front", "wrist"], "rate": 50}),
        request("POST", "/api/sessions", BODY | {"session_id": "x" * 64, "max_relative_target": {"Jaw": 1.5}}),
        request("DELETE", "/sessions/arm"),
        request("POST", "/sessions/arm/start"),
        request("POST", "/sessions/arm/policy", {"revision": "main", "force": True}),
        request("POST", "/sessions/arm/rollback"),
        request("GET", "/deployments?limit=5&session_id=arm"),
        request("GET", "/debug/logs?limit=10&level=info"),
        request("GET", "/debug/sessions/arm/queue"),
        request("GET", "/metrics", None, "Accept: */*", "Range: bytes=0-1"),
        request("GET", "/openapi-full.json", None, "Accept-Encoding: gzip"),
        request("GET", "/ui"),
        request("POST", "/models/nobody/forward", {"inputs": {"x": [1, 2, 3]}}),
        request("POST", "/robotics/workspaces/w/rooms", {"room_id": "r"}),
        request("POST", "/robotics/workspaces/w/rooms/r/command", {"joints": [{"name": "Jaw", "value": 5}]}),
        request("POST", "/video/workspaces/w/rooms", {"room_id": "r", "config": {"framerate": 30}}),
        request("GET", "/robotics/workspaces/w/rooms/r/ws", None, *socket_headers),
        request("POST", "/sessions", BODY | {"session_id": "door", "transport_server_url": "direct"}),
        request("PATCH", "/sessions/door", {"overlap": "ensemble", "ask_ahead": 0.1}),
        request("POST", "/sessions/door/act", {"images": {"front": "aGVsbG8="}, "state": [0] * 6, "want": "action"}),
        request("GET", "/sessions/door/stream", None, *socket_headers) + b"\x81\xfe\x00\x80" + b'{"kind":' * 20,
        request("GET", "/sessions/door/openpi", None, *socket_headers) + b"\x82\xff" + b"\x00" * 40,
        request("OPTIONS", "/sessions", None, "Origin: http://evil.example", "Access-Control-Request-Method: POST"),
        request("POST", "/webhooks/policies", {"event": {"action": "update", "scope": "repo"}}),
        b"POST /sessions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ]


PIECES = [
    b"\x00", b"\r\n", b"\n", b"\r", b": ", b"%00", b"%2e%2e%2f", b"../", b"//", b"?", b"#", b"%", b"\xff\xfe",
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"99999999999999999999", b"null", b"[]", b"{}", b'"',
    b"\\ud800", b"\xc3\x28",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"Host: b\r\n", b"[" * 2000, b'{"a":' * 500, b"a" * 9000,
    b"HTTP/1.1", b"HTTP/2.0", b"HTTP/0.9", b"${jndi:ldap://a}", b"' OR 1=1--", b"<script>", b"%s%n", "ü∞".encode(),
]  # fmt: skip


def bytes_of(count: int, seed: int) -> Iterator[bytes]:
    """Valid requests, spoiled."""
    chance = random.Random(seed)
    plain = seeds()
    for _ in range(count):
        data = bytearray(chance.choice(plain))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(7):
                case 0:
                    data[at:at] = chance.choice(PIECES)
                case 1:
                    data[at : at + chance.randrange(1, 20)] = chance.choice(PIECES)
                case 2:
                    del data[at : at + chance.randrange(1, 30)]
                case 3:
                    del data[at:]
                case 4 if data:
                    data[at % len(data)] ^= 1 << chance.randrange(8)
                case 5:
                    other = chance.choice(plain)
                    data[at:at] = other[chance.randrange(len(other)) :]
                case _:
                    data[at:at] = bytes(data[at : at + 200])
        # A whole stop that two pieces happen to make would be no surprise, and stop the robot.
        if b"emergency" not in data:
            yield bytes(data)
