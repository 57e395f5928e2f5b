"""NaN and infinity are refused in every spelling of JSON and in every message."""

import asyncio
import json

import pytest

from service.http.bodies import json_response
from service.setting_types import SettingsError
from service.settings import load_settings
from service.transport import protocol
from service.transport.protocol import JointUpdate, StateSync
from tests.testing.rig import started

NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")
ROOM = "/robotics/workspaces/w/rooms/r"


def session(more: str) -> str:
    return '{"session_id": "arm", "policy_path": "p", "transport_server_url": "http://rooms", ' + more + "}"


# Places of a number in a request: path and body, with @ for the number.
BODIES = {
    "rate": ("/sessions", session('"rate": @')),
    "max_relative_target": ("/sessions", session('"max_relative_target": @')),
    "max_relative_target by name": ("/sessions", session('"max_relative_target": {"Jaw": @}')),
    "an unknown field": ("/sessions", session('"more": [1, {"a": @}]')),
    "the policy check": ("/policies/check", '{"policy_path": "p", "more": @}'),
    "a joint's command": (f"{ROOM}/command", '{"joints": [{"name": "Jaw", "value": @}]}'),
    "a joint's speed": (f"{ROOM}/command", '{"joints": [{"name": "Jaw", "value": 1, "speed": @}]}'),
    "a video's rate": ("/video/workspaces/w/rooms", '{"room_id": "v", "config": {"framerate": @}}'),
    "a signal": ("/video/workspaces/w/rooms/v/webrtc/signal", '{"client_id": "a", "message": {"type": "ice", "x": @}}'),
}


@pytest.fixture(scope="module")
def answered():
    """Return the status and text of the answer to each request, from one server."""

    async def run():
        found = {}
        async with started() as server:
            http = server.http
            await server.call("POST", "/robotics/workspaces/w/rooms", json={"room_id": "r"})
            for name, (path, body) in BODIES.items():
                for number in NUMBERS:
                    headers = {"content-type": "application/json"}
                    async with http.post(path, data=body.replace("@", number), headers=headers) as response:
                        found[name, number] = (response.status, await response.text())
            assert await server.call("GET", "/sessions") == (200, [])
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("position", BODIES)
def test_a_request_with_a_number_that_is_not_finite_is_422(answered, position, number):
    status, text = answered[position, number]
    # Python turns a number that is too large into infinity. In a field that is not read, it has no effect.
    if position in ("an unknown field", "the policy check") and "e999" in number:
        assert "Infinity" not in text
        return
    assert status == 422, text
    json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "write",
    [
        lambda number: json_response({"a": [number]}),
        lambda number: protocol.encode({"a": {"b": number}}),
        lambda number: protocol.build_message(JointUpdate(({"name": "Jaw", "value": number},))),
        lambda number: protocol.build_message(StateSync({"Jaw": number})),
    ],
    ids=["an answer", "a room's answer", "a command", "a room's state"],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_never_written(write, bad):
    with pytest.raises((ValueError, protocol.WireError)):
        write(bad)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("name", ["rate", "frame_age_limit", "request_deadline", "update_difference"])
def test_a_setting_must_be_a_finite_number(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=name):
        load_settings({name: text})
