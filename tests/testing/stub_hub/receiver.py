"""The simplest receiver of deliveries there is; the product's own has its own tests."""

import http.server
import threading
from collections.abc import Callable
from typing import Self

from hooks.payload import WebhookPayload


class Receiver:
    """Keeps headers (in small letters) and payload of each delivery, and calls ``on_delivery``."""

    def __init__(self, on_delivery: Callable[[WebhookPayload, str], object] | None = None):
        self.got: list[tuple[dict[str, str], WebhookPayload]] = []
        self.on_delivery = on_delivery
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.take(headers, WebhookPayload.model_validate_json(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/webhooks/push"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.got]

    def take(self, headers: dict[str, str], payload: WebhookPayload) -> None:
        self.got.append((headers, payload))
        if self.on_delivery is not None:
            self.on_delivery(payload, headers["webhook-id"])
