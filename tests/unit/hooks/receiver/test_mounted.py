"""The receiver's blueprint in the app of the service."""

import io
import json

import aiohttp
import pytest

from hooks.receiver.endpoint import ReceiverSettings
from hooks.receiver.receiver import Receiver
from service.app import create_app
from service.http.server import listen
from service.http.server import serve_app as service_serving
from service.settings import Settings
from tests.unit.hooks.receiver.conftest import Sender

SIGNED = {"x-webhook-secret": "a-secret-of-sixteen"}


def receiver(**more) -> Receiver:
    made = Receiver(ReceiverSettings(secrets=("a-secret-of-sixteen",), **more), prefix="/others")

    def size(payload: dict) -> int:
        return len(payload["padding"])

    def breaks() -> None:
        raise RuntimeError("private detail")

    made.add(size)
    made.add(breaks)
    return made


async def test_a_mounted_receiver_has_its_own_body_limit() -> None:
    app = create_app(
        Settings.from_values(max_body=1 << 20), load=lambda *names, **more: pytest.fail("no policy is loaded")
    )
    app.blueprint(receiver().blueprint())
    async with service_serving(app, listen("127.0.0.1", 0)) as url, aiohttp.ClientSession() as session:

        async def post(size: int, headers: dict = SIGNED, path: str = "size") -> tuple[int, object]:
            body = io.BytesIO(json.dumps({"padding": "x" * size}).encode())
            response = await Sender(url, session).post(f"/others/{path}", data=body, headers=headers)
            return response.status, response.json

        assert await post(5_000_000) == (200, 5_000_000)
        assert await post(6_000_000) == (413, {"error": "The body has more than 5242880 bytes."})
        assert await post(5_000_000, {}) == (401, {"error": "x-webhook-secret header not set."})
        assert await post(5_000_000, {"x-webhook-secret": "no"}) == (403, {"error": "Invalid webhook secret."})
        status, error = await post(3, path="breaks")
        assert (status, "private" in str(error)) == (500, False)
        response = await Sender(url, session).post("/others/size", method="GET")
        assert (response.status, response.json) == (405, {"error": "Method Not Allowed"})
        async with session.get(f"{url}/") as answer:
            assert answer.status == 200
