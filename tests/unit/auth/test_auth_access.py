"""Who may do what over HTTP: every route of the table by every role, and two keys at each other's sessions."""

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
PARTS = {"session_id": "nobodys", "name": "nothing", "deployment_id": "none", "commit": "0" * 40}


def path_of(route, prefix=""):
    return prefix + re.sub(r"{(\w+)}", lambda part: PARTS[part[1]], route.path)


def test_what_is_open_is_listed_and_every_key_may_stop():
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
            status, told = await server.call(route.method, path_of(route, prefix))
            if route.role is None:
                assert status not in (401, 403), (route.path, told)
                continue
            assert (status, told["code"]) in ((401, "unauthorized"), (429, "too_many_requests")), route.path
            for role, name in by_role.items():
                status, told = await server.call(route.method, path_of(route, prefix), name)
                if role < route.role:
                    assert (status, told["code"]) == (403, "forbidden"), (route.path, name)
                    assert str(route.role) in told["detail"]
                    assert f"robojax token new --role {route.role}" in told["detail"]
                else:
                    assert status not in (401, 403), (route.path, name, told)
                    assert status < 500, (route.path, told)


async def test_a_session_is_not_there_for_other_keys(server):
    assert (await server.create("arm", "alice"))[0] == 200
    routes = [route for route in ROUTES if "{session_id}" in route.path and route.path not in STOPS]
    assert len(routes) >= 9
    for route in routes:
        path = route.path.replace("{session_id}", "arm")
        body = {"on": True} if path.endswith("/record") else {"tried": 1, "succeeded": 1}
        for name in ("bob", "eve"):
            status, told = await server.call(route.method, path, name, json=body)
            allowed = Role.OPERATOR if name == "bob" else Role.VIEWER
            wanted = 404 if route.role is not None and route.role <= allowed else 403
            assert status == wanted, (name, route.path, told)
            if status == 404:
                same, unknown = await server.call(route.method, path.replace("arm", "other"), name, json=body)
                assert (same, unknown["code"]) == (404, told["code"])
                assert unknown["detail"] == told["detail"].replace("arm", "other")
    for path in ("/sessions", "/deployments?session_id=arm", "/recordings"):
        assert await server.call("GET", path, "bob") == (200, [])
    assert 'session="arm"' not in (await server.call("GET", "/metrics", "bob"))[1]
    assert 'session="arm"' in (await server.call("GET", "/metrics", "alice"))[1]
    status, told = await server.create("arm", "bob")
    assert (status, told["code"]) == (409, "session_exists")
    assert "ready" not in told["detail"]
    for name in ("alice", "root"):
        assert [one["session_id"] for one in (await server.call("GET", "/sessions", name))[1]] == ["arm"]
    assert (await server.call("DELETE", "/sessions/arm", "root"))[0] == 200


async def test_every_key_stops_every_robot_and_learns_only_of_its_own(server):
    await server.create("arm", "alice")
    await server.create("leg", "bob")
    status, told = await server.call("POST", "/debug/emergency_stop", "eve")
    assert (status, told["stopped"]) == (200, [])
    assert "2 sessions" in told["message"]
    assert (await server.call("POST", "/sessions/arm/emergency_stop", "eve"))[0] == 200
    _, found = await server.call("GET", "/sessions", "root")
    assert [one["status"] for one in found] == ["stopped", "stopped"]
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
        gone = server.keys["root"]
        server.file.revoke("root")
        ways = ({"x-api-key": server.keys["alice"]}, {"authorization": f"Bearer {token}"})
        for headers in ways:
            assert (await server.call("GET", "/sessions", headers=headers))[0] == 200
        for path in (server.file.path, secret.path):
            FILE_FAULTS[fault](path)
        for headers in ways:
            # Twice as often as an address may be refused: this does not keep a stop out.
            refused = [(await server.call("GET", "/sessions", headers=headers))[0] for _ in range(REFUSALS[1])]
            assert {*refused} <= {401, 429}
            for path in STOP_PATHS:
                assert (await server.call("POST", path, headers=headers))[0] == 200, path
        for refused in ({"x-api-key": "rjk_" + "g" * 43}, {"x-api-key": gone}, {}):
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
async def test_the_clock_refuses_no_stop(serve, tmp_path, monkeypatch, shift):
    now = time.time()
    secret = SecretFile(tmp_path / "state" / "jwt-secret")
    token = secret.create().sign("alice", Role.OPERATOR, 3000, now)
    async with serve() as server:
        await server.create("arm", "alice")
        key = server.file.create("month", Role.OPERATOR, "alice", now, days=30)
        monkeypatch.setattr(guard, "time", SimpleNamespace(time=lambda: now + shift, monotonic=time.monotonic))
        ways = {"token": {"authorization": f"Bearer {token}"}, "key": {"x-api-key": key}}
        for way, headers in ways.items():
            for path in STOP_PATHS:
                assert (await server.call("POST", path, headers=headers))[0] == 200, (way, path)
        is_refused = {"token": True, "key": shift > 30 * 86400}
        for way, headers in ways.items():
            status, body = await server.call("POST", "/sessions/arm/start", headers=headers)
            assert status == (401 if is_refused[way] else 409), (way, body)
            assert way == "key" or ("expired" if shift > 0 else "not valid yet") in body["detail"]
        forged = {"authorization": f"Bearer {token[:-4]}AAAA"}
        assert (await server.call("POST", STOP_PATHS[0], headers=forged))[0] == 401


async def test_strangers_learn_only_that_the_server_runs(server):
    await server.create("arm", "alice")
    status, told = await server.call("GET", "/health")
    assert (status, told["active_sessions"], told["session_ids"]) == (200, 1, [])
    assert set(told) == {"status", "server_running", "active_sessions", "session_ids"}
    assert (await server.call("GET", "/health", "alice"))[1]["session_ids"] == ["arm"]
    _, ready = await server.call("GET", "/ready")
    assert "arm" not in str(ready)


async def test_a_key_counts_from_when_it_is_made_until_it_is_revoked(serve):
    async with serve(names=()) as server:

        async def statuses(*names):
            return [(await server.call("GET", "/sessions", name))[0] for name in names]

        assert await statuses(None) == [200]
        server.keys["root"] = server.file.create("root", Role.ADMIN, "root", time.time())
        assert await statuses(None, "root") == [401, 200]
        server.file.revoke("root")
        assert await statuses(None, "root") == [401, 401], "revoking the last key opens nothing"
        server.file.path.write_text("broken")
        assert await statuses("root") == [401]


async def test_tokens_and_keys_come_in_either_header_and_not_twice(server):
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
        status, told = await server.call("GET", "/sessions", headers=headers)
        assert (status, told["code"]) == (401, "unauthorized"), headers
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
    over = server.file.create("late", Role.VIEWER, "late", time.time() - 86400, days=0.5)
    status, told = await server.call("GET", "/sessions", headers={"x-api-key": over})
    assert (status, "has expired" in told["detail"]) == (401, True)
    refused = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert len(refused) == REFUSALS[1]
    assert guess not in caplog.text
    assert server.keys["alice"] not in caplog.text


async def test_a_ticket_looks_once_and_changes_nothing(server):
    await server.create("arm", "alice")

    async def ticket(by="alice"):
        status, told = await server.call("POST", "/tickets", by)
        assert (status, told["expires_in"]) == (200, 30)
        return {"ticket": told["ticket"]}

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


async def test_no_answer_holds_a_key_or_a_folder_of_it(server):
    await server.create("arm", "root")
    own = server.app.ctx.guard.admissions.own.headers(None)["x-api-key"]
    secrets = (*server.keys.values(), own, str(server.file.path.parent))
    for path in (path_of(route).replace("nobodys", "arm") for route in ROUTES if route.method == "GET"):
        _, answer = await server.call("GET", path, "root")
        assert not [secret for secret in secrets if secret in str(answer)], path


async def test_every_answer_is_hardened(server):
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


async def test_webhooks_keep_their_own_proofs_and_their_pages_want_a_key(server):
    payload = {"event": {"action": "update", "scope": "repo"}, "webhook": {"id": "1" * 24, "version": 3}}
    status, told = await server.call("POST", "/webhooks/policies", json=payload)
    assert status != 401, told
    for path in ("/webhooks", "/webhooks/_events"):
        assert (await server.call("GET", path))[0] == 401, path
    assert (await server.call("GET", "/webhooks", "eve"))[0] == 200
    assert (await server.call("POST", "/webhooks/_events/x/replay", "eve"))[0] == 403


async def test_what_came_is_seen_by_the_secret_or_by_whoever_sees_everything(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("WEBHOOK_SECRET", "a-secret-of-some-length")
    async with serve() as server:
        assert (await server.call("GET", "/webhooks/_events/", "root"))[0] == 200
        assert (await server.call("GET", "/webhooks/_events/", "alice"))[0] == 401, "it names the policies of others"
    (tmp_path / "state" / "keys.json").unlink()
    async with serve(names=()) as server:
        assert (await server.call("GET", "/webhooks/_events/"))[0] == 200


async def test_without_keys_a_name_that_was_pointed_here_gets_nothing(serve):
    async def asked(server, host):
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        writer.write(f"GET /sessions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n")
        writer.close()
        return int(head.split()[1])

    foreign = ("evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example", "")
    async with serve(names=()) as server:
        assert {host: await asked(server, host) for host in foreign} == dict.fromkeys(foreign, 403)
        assert await asked(server, "[") == 400  # no name at all
        for host in ("127.0.0.1:1", "localhost", "[::1]:1"):
            assert await asked(server, host) == 200, host
    async with serve(names=(), origins="https://arms.example") as server:
        assert (await asked(server, "arms.example"), await asked(server, "evil.example")) == (200, 403)


async def test_a_page_of_another_origin_is_refused_although_it_has_a_key(server):
    page = {"origin": "https://evil.example"}
    status, told = await server.call("GET", "/sessions", "root", headers=page)
    assert (status, told["code"]) == (403, "origin_refused")
    assert (await server.call("POST", "/tickets", "root", headers=page))[0] == 403
