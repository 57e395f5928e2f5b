"""Access over HTTP: each role calls each route, and keys of two owners call each other's sessions."""

import asyncio
import logging
import re
import time
from types import SimpleNamespace

import pytest

from service.api.blueprint import API_ROUTES, ROUTES
from service.auth import guard
from service.auth.caller import Role
from service.auth.guard import REFUSALS
from service.auth.tokens import SecretFile

OPEN = {"/", "/health", "/ready", "/openapi.json", "/openapi-full.json", "/docs", "/ui", "/ui/{name}"}
STOPS = {"/debug/emergency_stop", "/sessions/{session_id}/emergency_stop"}
PARTS = {"session_id": "unknown", "name": "nothing", "deployment_id": "none", "commit": "0" * 40}


def path_of(route, prefix=""):
    return prefix + re.sub(r"{(\w+)}", lambda part: PARTS[part[1]], route.path)


def test_public_routes_are_listed_and_every_key_may_stop():
    assert {route.path for route in ROUTES if route.role is None} == OPEN
    assert {route.path for route in ROUTES if route.path in STOPS and route.role is Role.VIEWER} == STOPS
    assert {route.path for route in ROUTES if route.is_stop} == {*STOPS, "/sessions/{session_id}/stop"}
    changing = [route for route in ROUTES if route.method != "GET" and route.role is Role.VIEWER]
    assert {route.path for route in changing} == STOPS | {"/tickets"}
    debug = [route for route in ROUTES if route.path.startswith("/debug") and route.path not in STOPS]
    assert {route.path for route in debug if route.role is not Role.ADMIN} == {"/debug/sessions/{session_id}/reset"}


async def test_each_route_admits_its_roles_under_both_prefixes(server):
    by_role = {Role.VIEWER: "eve", Role.OPERATOR: "alice", Role.ADMIN: "root"}
    for prefix, routes in (("", ROUTES), ("/api", API_ROUTES)):
        for route in routes:
            status, body = await server.call(route.method, path_of(route, prefix))
            if route.role is None:
                assert status not in (401, 403), (route.path, body)
                continue
            assert (status, body["code"]) in ((401, "unauthorized"), (429, "too_many_requests")), route.path
            for role, name in by_role.items():
                status, body = await server.call(route.method, path_of(route, prefix), name)
                if role < route.role:
                    assert (status, body["code"]) == (403, "forbidden"), (route.path, name)
                    assert str(route.role) in body["detail"]
                    assert f"robojax token new --role {route.role}" in body["detail"]
                else:
                    assert status not in (401, 403), (route.path, name, body)
                    assert status < 500, (route.path, body)


async def test_a_session_is_hidden_from_other_keys(server):
    assert (await server.create("arm", "alice"))[0] == 200
    routes = [route for route in ROUTES if "{session_id}" in route.path and route.path not in STOPS]
    assert len(routes) >= 9
    for route in routes:
        path = route.path.replace("{session_id}", "arm")
        payload = {"on": True} if path.endswith("/record") else {"tried": 1, "succeeded": 1}
        for name in ("bob", "eve"):
            status, body = await server.call(route.method, path, name, json=payload)
            allowed = Role.OPERATOR if name == "bob" else Role.VIEWER
            expected = 404 if route.role is not None and route.role <= allowed else 403
            assert status == expected, (name, route.path, body)
            if status == 404:
                same, unknown = await server.call(route.method, path.replace("arm", "other"), name, json=payload)
                assert (same, unknown["code"]) == (404, body["code"])
                assert unknown["detail"] == body["detail"].replace("arm", "other")
    for path in ("/sessions", "/deployments?session_id=arm", "/recordings"):
        assert await server.call("GET", path, "bob") == (200, [])
    assert 'session="arm"' not in (await server.call("GET", "/metrics", "bob"))[1]
    assert 'session="arm"' in (await server.call("GET", "/metrics", "alice"))[1]
    status, body = await server.create("arm", "bob")
    assert (status, body["code"]) == (409, "session_exists")
    assert "ready" not in body["detail"]
    for name in ("alice", "root"):
        assert [session["session_id"] for session in (await server.call("GET", "/sessions", name))[1]] == ["arm"]
    assert (await server.call("DELETE", "/sessions/arm", "root"))[0] == 200


async def test_every_key_stops_all_robots_and_sees_only_its_own(server):
    await server.create("arm", "alice")
    await server.create("leg", "bob")
    status, body = await server.call("POST", "/debug/emergency_stop", "eve")
    assert (status, body["stopped"]) == (200, [])
    assert "2 sessions" in body["message"]
    assert (await server.call("POST", "/sessions/arm/emergency_stop", "eve"))[0] == 200
    _, found = await server.call("GET", "/sessions", "root")
    assert [session["status"] for session in found] == ["stopped", "stopped"]
    for name, expected in (("bob", 404), ("alice", 200)):
        assert (await server.call("POST", "/debug/sessions/arm/reset", name))[0] == expected


STOP_PATHS = ("/debug/emergency_stop", "/api/sessions/arm/emergency_stop", "/sessions/arm/stop")
# How the files of keys and of the secret become missing or unusable.
FILE_FAULTS = {
    "missing": lambda path: path.unlink(),
    "writable by others": lambda path: path.chmod(0o666),
    "a folder": lambda path: (path.unlink(), path.mkdir(0o700)),
    "empty": lambda path: path.write_bytes(b""),
    "malformed": lambda path: path.write_text("not a file"),
    "half written": lambda path: path.write_bytes(path.read_bytes()[:30]),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
async def test_last_known_keys_and_secret_only_stop_robots(serve, tmp_path, fault):
    secret = SecretFile(tmp_path / "state" / "jwt-secret")
    token = secret.create().sign("alice", Role.OPERATOR, 3600, time.time())
    async with serve() as server:
        await server.create("arm", "alice")
        revoked = server.keys["root"]
        server.file.revoke("root")
        credentials = ({"x-api-key": server.keys["alice"]}, {"authorization": f"Bearer {token}"})
        for headers in credentials:
            assert (await server.call("GET", "/sessions", headers=headers))[0] == 200
        for path in (server.file.path, secret.path):
            FILE_FAULTS[fault](path)
        for headers in credentials:
            # Together the keys are refused twice as often as an address may be. Stops are still accepted.
            refused = [(await server.call("GET", "/sessions", headers=headers))[0] for _ in range(REFUSALS[1])]
            assert {*refused} <= {401, 429}
            for path in STOP_PATHS:
                assert (await server.call("POST", path, headers=headers))[0] == 200, path
        for refused in ({"x-api-key": "rjk_" + "g" * 43}, {"x-api-key": revoked}, {}):
            for path in STOP_PATHS:
                assert (await server.call("POST", path, headers=refused))[0] == 401, path


async def test_a_revoked_key_of_a_readable_file_stops_nothing(server):
    await server.create("arm", "alice")
    server.file.revoke("alice")
    for path in STOP_PATHS:
        assert (await server.call("POST", path, "alice"))[0] == 401, path
    # The file is read again before it goes missing, so the revoked key is not among the last known keys.
    server.file.path.unlink()
    assert (await server.call("POST", STOP_PATHS[0], "alice"))[0] == 401
    assert (await server.call("POST", STOP_PATHS[0], "eve"))[0] == 200


async def test_refused_stops_are_not_counted_and_logged_at_a_limited_rate(server, caplog):
    guess = {"x-api-key": "rjk_" + "g" * 43}
    for _ in range(3 * REFUSALS[1]):
        assert (await server.call("POST", STOP_PATHS[0], headers=guess))[0] == 401
    assert sum("is refused" in record.getMessage() for record in caplog.records) == REFUSALS[1]
    assert (await server.call("GET", "/sessions", headers=guess))[0] == 401, "the limit of refusals is not used up"


@pytest.mark.parametrize("shift", [-86400, -60, 3600, 86400, 31 * 86400])
async def test_an_expired_or_early_key_or_token_still_stops_robots(serve, tmp_path, monkeypatch, shift):
    now = time.time()
    secret = SecretFile(tmp_path / "state" / "jwt-secret")
    token = secret.create().sign("alice", Role.OPERATOR, 3000, now)
    async with serve() as server:
        await server.create("arm", "alice")
        key = server.file.create("month", Role.OPERATOR, "alice", now, days=30)
        monkeypatch.setattr(guard, "time", SimpleNamespace(time=lambda: now + shift, monotonic=time.monotonic))
        credentials = {"token": {"authorization": f"Bearer {token}"}, "key": {"x-api-key": key}}
        for kind, headers in credentials.items():
            for path in STOP_PATHS:
                assert (await server.call("POST", path, headers=headers))[0] == 200, (kind, path)
        is_refused = {"token": True, "key": shift > 30 * 86400}
        for kind, headers in credentials.items():
            status, body = await server.call("POST", "/sessions/arm/start", headers=headers)
            assert status == (401 if is_refused[kind] else 409), (kind, body)
            assert kind == "key" or ("expired" if shift > 0 else "not valid yet") in body["detail"]
        forged = {"authorization": f"Bearer {token[:-4]}AAAA"}
        assert (await server.call("POST", STOP_PATHS[0], headers=forged))[0] == 401


async def test_callers_without_a_key_see_only_that_the_server_runs(server):
    await server.create("arm", "alice")
    status, body = await server.call("GET", "/health")
    assert (status, body["active_sessions"], body["session_ids"]) == (200, 1, [])
    assert set(body) == {"status", "server_running", "active_sessions", "session_ids"}
    assert (await server.call("GET", "/health", "alice"))[1]["session_ids"] == ["arm"]
    _, ready = await server.call("GET", "/ready")
    assert "arm" not in str(ready)


async def test_a_key_is_valid_from_its_creation_to_its_revocation(serve):
    async with serve(names=()) as server:

        async def statuses(*names):
            return [(await server.call("GET", "/sessions", name))[0] for name in names]

        assert await statuses(None) == [200]
        server.keys["root"] = server.file.create("root", Role.ADMIN, "root", time.time())
        assert await statuses(None, "root") == [401, 200]
        server.file.revoke("root")
        assert await statuses(None, "root") == [401, 401], "the server stays closed after the last key is revoked"
        server.file.path.write_text("broken")
        assert await statuses("root") == [401]


async def test_tokens_and_keys_are_accepted_in_one_header_only(server):
    secret = SecretFile(server.file.path.parent / "jwt-secret")
    token = secret.create().sign("alice", Role.OPERATOR, 60, time.time())
    key = server.keys["alice"]
    await server.create("arm", "alice")
    for headers in (
        {"authorization": f"Bearer {token}"},
        {"authorization": f"bearer {key}"},
        {"x-api-key": key},
        {"x-api-key": key, "authorization": "Basic c29tZTpib2R5"},
    ):
        status, found = await server.call("GET", "/sessions", headers=headers)
        assert (status, len(found)) == (200, 1), headers
    for headers in (
        {"x-api-key": key, "authorization": f"Bearer {token}"},
        {"x-api-key": token},
        {"authorization": f"Basic {key}"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
    ):
        status, body = await server.call("GET", "/sessions", headers=headers)
        assert (status, body["code"]) == (401, "unauthorized"), headers
    for query in ({"key": key}, {"api_key": key}, {"token": token}, {"ticket": key}, {"ticket": token}):
        assert (await server.call("GET", "/sessions", params=query))[0] == 401


async def test_refusals_are_limited_per_address_while_keys_work(server, caplog):
    caplog.set_level(logging.INFO)
    guess = "rjk_" + "g" * 43
    async with server.http.get("/sessions", headers={"x-api-key": guess}) as answer:
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "robojax token new" in (await answer.json())["detail"]
    for _ in range(REFUSALS[1] - 1):
        assert (await server.call("GET", "/sessions", headers={"x-api-key": guess}))[0] == 401
    async with server.http.get("/sessions", headers={"x-api-key": guess}) as answer:
        assert answer.status == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 6
    assert (await server.call("GET", "/sessions", "alice"))[0] == 200
    expired = server.file.create("late", Role.VIEWER, "late", time.time() - 86400, days=0.5)
    status, body = await server.call("GET", "/sessions", headers={"x-api-key": expired})
    assert (status, "has expired" in body["detail"]) == (401, True)
    refused = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert len(refused) == REFUSALS[1]
    assert guess not in caplog.text
    assert server.keys["alice"] not in caplog.text


async def test_a_ticket_allows_one_read_and_no_change(server):
    await server.create("arm", "alice")

    async def ticket(by="alice"):
        status, body = await server.call("POST", "/tickets", by)
        assert (status, body["expires_in"]) == (200, 30)
        return {"ticket": body["ticket"]}

    one = await ticket()
    status, found = await server.call("GET", "/sessions", params=one)
    assert (status, len(found)) == (200, 1)
    assert (await server.call("GET", "/sessions", params=one))[0] == 401
    assert (await server.call("GET", "/sessions", params=await ticket("bob"))) == (200, [])
    assert (await server.call("POST", "/sessions/arm/stop", params=await ticket()))[0] == 401
    assert (await server.call("GET", "/debug/system", params=await ticket()))[0] == 403
    late = await ticket()
    server.file.revoke("alice")
    assert (await server.call("GET", "/sessions", params=late))[0] == 401


async def test_no_response_contains_a_key_or_the_path_of_the_keys(server):
    await server.create("arm", "root")
    own = server.app.ctx.guard.admissions.own.headers(None)["x-api-key"]
    secrets = (*server.keys.values(), own, str(server.file.path.parent))
    for path in (path_of(route).replace("unknown", "arm") for route in ROUTES if route.method == "GET"):
        _, answer = await server.call("GET", path, "root")
        assert not [secret for secret in secrets if secret in str(answer)], path


async def test_every_response_has_security_headers(server):
    hardened = {
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    for path in ("/", "/docs", "/nope", "/sessions"):
        async with server.http.get(path) as answer:
            headers = answer.headers
        assert {name: headers[name] for name in hardened} == hardened, path
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert "access-control-allow-origin" not in headers


async def test_webhooks_need_no_key_but_their_pages_do(server):
    payload = {"event": {"action": "update", "scope": "repo"}, "webhook": {"id": "1" * 24, "version": 3}}
    status, body = await server.call("POST", "/webhooks/policies", json=payload)
    assert status != 401, body
    for path in ("/webhooks", "/webhooks/_events"):
        assert (await server.call("GET", path))[0] == 401, path
    assert (await server.call("GET", "/webhooks", "eve"))[0] == 200
    assert (await server.call("POST", "/webhooks/_events/x/replay", "eve"))[0] == 403


async def test_webhook_events_need_the_secret_or_an_admin_key(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("WEBHOOK_SECRET", "a-secret-of-some-length")
    async with serve() as server:
        assert (await server.call("GET", "/webhooks/_events/", "root"))[0] == 200
        assert (await server.call("GET", "/webhooks/_events/", "alice"))[0] == 401, "events name other owners' policies"
    (tmp_path / "state" / "keys.json").unlink()
    async with serve(names=()) as server:
        assert (await server.call("GET", "/webhooks/_events/"))[0] == 200


async def test_without_keys_foreign_host_names_are_refused(serve):
    async def get_status(server, host):
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        writer.write(f"GET /sessions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n")
        writer.close()
        return int(head.split()[1])

    foreign = ("evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example", "")
    async with serve(names=()) as server:
        assert {host: await get_status(server, host) for host in foreign} == dict.fromkeys(foreign, 403)
        assert await get_status(server, "[") == 400, "not a host name"
        for host in ("127.0.0.1:1", "localhost", "[::1]:1"):
            assert await get_status(server, host) == 200, host
    async with serve(names=(), origins="https://arms.example") as server:
        assert (await get_status(server, "arms.example"), await get_status(server, "evil.example")) == (200, 403)


async def test_a_page_of_another_origin_is_refused_even_with_a_key(server):
    page = {"origin": "https://evil.example"}
    status, body = await server.call("GET", "/sessions", "root", headers=page)
    assert (status, body["code"]) == (403, "origin_refused")
    assert (await server.call("POST", "/tickets", "root", headers=page))[0] == 403
