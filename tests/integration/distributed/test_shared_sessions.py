"""Two servers that share a PostgreSQL database: each accepts requests for all sessions, with the client's own key."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import database_kills
from benchmarks.postgres import PostgresServer
from robojax.client import AsyncClient, Client, RequestRefused
from service.api import redirects
from service.api.redirects import ADDRESS_HEADER, CODE
from service.auth.caller import Role
from service.auth.keys import KeyFile
from service.distributed import peers, session_table
from service.distributed.peers import FORWARDED_HEADER, SERVER_NAME_HEADER, PeerSessions
from service.distributed.postgres import DatabaseUnusable, Postgres
from service.errors import NoDatabase, ServerNameTaken
from service.sessions import store
from service.sessions.request import DIRECT, NewSession
from service.transport.address import Address
from service.transport.client.rest import RoomsApi, http_session
from service.transport.client.robot import LatchState, SessionLatch
from tests.testing import rig
from tests.testing.pauses import Pauses
from tests.testing.rig import ROOMS, expect_ok, expect_refusal, started
from tests.testing.waiting import until

KEYS = {"eve": Role.VIEWER, "alice": Role.OPERATOR, "bob": Role.OPERATOR, "root": Role.ADMIN}


class Server(rig.Server):
    """A server with a client that follows redirects."""

    @property
    def name(self) -> str:
        return str(self.app.ctx.settings.cluster.front_name)

    @property
    def peer_sessions(self) -> PeerSessions:
        assert self.app.ctx.peer_sessions is not None
        return self.app.ctx.peer_sessions

    async def call(self, method: str, path: str, key: str | None = None, **more: Any) -> tuple[int, Any]:
        headers = {"x-api-key": key} if key else {}
        return await super().call(method, path, headers=headers | more.pop("headers", {}), **more)

    async def create(self, session_id: str, key: str | None = None, **more: Any) -> tuple[int, Any]:
        return await super().create(session_id, key, **{"transport_server_url": DIRECT} | more)

    async def listed(self, key: str | None = None) -> dict[str, str]:
        status, reply = await self.call("GET", "/sessions", key)
        assert status == 200
        assert len({one["session_id"] for one in reply}) == len(reply)
        return {one["session_id"]: one["status"] for one in reply}

    def own(self) -> dict[str, str]:
        return {session.id: str(session.stage) for session in self.app.ctx.sessions.list()}


def server(name: str, database: str, folder: Path, keys: str | None = None) -> AbstractAsyncContextManager[Server]:
    kept: dict[str, Any] = {"front_name": name, "state": str(folder / name), "keys_file": keys}
    return started(Server, database=database, policy_owners=("policies",), **kept)


class Servers:
    def __init__(self, stack: AsyncExitStack, database: PostgresServer, folder: Path):
        self._stack, self.database, self._folder = stack, database, folder
        self.a: Server
        self.b: Server

    async def begin(self, keys: str | None = None) -> "Servers":
        made = [server(name, self.database.url, self._folder, keys) for name in "ab"]
        self.a, self.b = [await self._stack.enter_async_context(one) for one in made]
        await self.beat()
        return self

    async def beat(self) -> None:
        for one in (self.a, self.b):
            await self.beat_of(one)

    async def beat_of(self, one: Server) -> None:
        await one.peer_sessions._beat()
        self.forget_places(one)

    def forget_places(self, one: Server) -> None:
        one.app.ctx.stop_elsewhere.__self__._cache.clear()  # type: ignore[union-attr]

    async def lose(self, one: Server) -> None:
        """Expire the server's heartbeat without ending the server."""
        self.database.sql(f"UPDATE robojax_fronts SET heartbeat = heartbeat - interval '1 minute' {where(one.name)}")
        other = self.b if one is self.a else self.a
        await other.peer_sessions._beat()
        self.forget_places(other)

    def another(self, name: str, url: str, of: Server) -> PeerSessions:
        database = Postgres(self.database.url, session_table.SCHEMA, session_table.PREFIX)
        self._stack.push_async_callback(database.close)
        return PeerSessions(name, url, of.app.ctx.sessions, database, database)


def where(name: str) -> str:
    return f"WHERE name = '{name}'"


@pytest.fixture
async def bare(database: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    monkeypatch.setattr(peers, "BEAT_PERIOD", 3600.0)  # The tests call the heartbeats.
    names = ((peers, "QUERY_TIMEOUT"), (peers, "STOP_TIMEOUT"), (peers, "PROBE_TIMEOUT"))
    for module, name in (*names, (redirects, "STOP_LOOKUP_TIMEOUT"), (store, "STOP_PUBLISH_TIMEOUT")):
        monkeypatch.setattr(module, name, 30.0)  # All servers run; a busy machine may answer late.
    async with AsyncExitStack() as stack:
        yield Servers(stack, database, tmp_path)


@pytest.fixture
async def servers(bare: Servers) -> Servers:
    return await bare.begin()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, dict[str, str]]:
    file = tmp_path / "keys.json"
    return str(file), {name: KeyFile(file).create(name, role, name, time.time()) for name, role in KEYS.items()}


async def test_request_for_another_server_is_redirected_unchanged(servers: Servers) -> None:
    await servers.a.create("arm")
    for method, path in (("GET", "/sessions/arm?a=b"), ("POST", "/sessions/arm/act"), ("DELETE", "/sessions/arm")):
        async with servers.b.http.request(method, path, data=b"x" * 70_000, allow_redirects=False) as found:
            reply = await found.json()
            assert (found.status, found.headers["location"]) == (307, f"{servers.a.url}{path}")
            assert (found.headers[FORWARDED_HEADER], found.headers[SERVER_NAME_HEADER]) == ("a", "b")
            assert f"http://{found.headers[ADDRESS_HEADER]}" == servers.a.url
        assert reply["code"] == CODE
    observation = {"state": [0.0] * 6, "want": "action", "images": {}}
    status, reply = await servers.b.call("POST", "/sessions/arm/act", json=observation)
    assert status == 422, "the session has no camera"
    assert (await servers.a.call("POST", "/sessions/arm/act", json=observation)) == (status, reply)
    assert (await servers.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert await servers.a.listed() == await servers.b.listed() == {}
    assert (await servers.b.create("arm"))[0] == 200


async def test_id_is_taken_on_all_servers(servers: Servers) -> None:
    await servers.a.create("arm")
    assert (await servers.b.create("arm"))[0] == 409
    answers = await asyncio.gather(servers.a.create("leg"), servers.b.create("leg"))
    assert sorted(status for status, _ in answers) == [200, 409]
    assert await servers.a.listed() == {"arm": "ready", "leg": "ready"}


async def test_failed_creation_leaves_the_id_free(servers: Servers) -> None:
    assert (await servers.a.create("arm", camera_names=["a", "a"]))[0] == 422
    assert (await servers.b.create("arm"))[0] == 200


async def test_forbidden_pages_are_refused_and_not_redirected(servers: Servers) -> None:
    await servers.a.create("arm")
    page = {"origin": "http://evil.example"}
    for path in ("/sessions/arm/start", "/sessions/arm/emergency_stop"):
        expect_refusal(await servers.b.call("POST", path, headers=page), 403, "origin_refused")
    assert await servers.a.listed() == {"arm": "ready"}


async def test_session_of_a_dead_server_shows_its_last_status(servers: Servers) -> None:
    await servers.a.create("arm")
    await servers.lose(servers.a)
    status, reply = await servers.b.call("GET", "/sessions/arm")
    assert (status, reply["status"], reply["stats"]["front"]) == (200, "interrupted", "a")
    expect_refusal(await servers.b.call("POST", "/sessions/arm/start"), 409, "move_refused", "/sessions/arm/adopt")
    status, reply = await servers.b.call("POST", "/sessions/arm/adopt")
    assert status == 409, "its server still answers"
    assert "answers" in reply["detail"]
    assert (await servers.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert await servers.b.listed() == {}


async def test_id_claimed_by_a_dead_server_is_not_a_session(servers: Servers) -> None:
    new = NewSession("arm", "policies/act", ROOMS)
    await servers.a.peer_sessions._query(
        servers.a.peer_sessions._database, session_table.claim, "a", servers.a.peer_sessions._process, new
    )
    await servers.lose(servers.a)
    assert (await servers.b.call("GET", "/sessions/arm"))[0] == 404
    assert (await servers.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert (await servers.b.create("arm"))[0] == 200


async def test_sessions_of_two_servers_never_share_a_room(servers: Servers) -> None:
    def seeing(camera: str) -> dict[str, Any]:
        room = {"transport_server_url": ROOMS, "workspace_id": "lab"}
        return room | {"camera_names": [camera], "rename": {"front": camera}}

    assert (await servers.a.create("arm-left", **seeing("wrist")))[0] == 200
    expect_refusal(await servers.b.create("arm", **seeing("left-wrist")), 409, "rooms_taken", "'arm-left'")
    assert (await servers.b.create("arm", **seeing("wrist")))[0] == 200
    assert (await servers.a.call("DELETE", "/sessions/arm-left"))[0] == 200
    assert (await servers.b.create("third", **seeing("wrist")))[0] == 200
    at_once = await asyncio.gather(
        servers.a.create("leg-left", **seeing("wrist")), servers.b.create("leg", **seeing("left-wrist"))
    )
    assert sorted(status for status, _ in at_once) == [200, 409]


async def test_stop_runs_on_the_server_of_the_session(servers: Servers) -> None:
    await servers.a.create("arm")
    async with servers.b.http.post(
        "/sessions/arm/emergency_stop", json={"reason": "a hand"}, allow_redirects=False
    ) as found:
        assert (found.status, (await found.json())["stopped"]) == (200, ["arm"])
    assert servers.a.app.ctx.sessions.get("arm").latch == "a hand"
    servers.a.peer_sessions.url = "http://127.0.0.1:1"
    await servers.beat()
    status, reply = await servers.b.call("POST", "/sessions/arm/emergency_stop")
    assert (status, reply["code"]) == (502, "front_lost")
    assert "127.0.0.1" not in reply["detail"]


async def test_stop_reaches_all_servers(servers: Servers) -> None:
    await servers.a.create("arm")
    await servers.b.create("leg")
    # A page may send the request, too.
    own = {"origin": servers.b.url, "cookie": "a=b", "referer": servers.b.url}
    status, reply = await servers.b.call("POST", "/debug/emergency_stop", json={"reason": "a hand"}, headers=own)
    assert (status, reply["count"], sorted(reply["stopped"])) == (200, 2, ["arm", "leg"])
    assert reply["fronts_not_reached"] == {}
    status, reply = await servers.a.call("GET", "/sessions/arm")
    assert "a hand" in json.dumps(reply)
    assert reply["status"] == "stopped"
    status, reply = await servers.b.call("POST", "/debug/emergency_stop", headers={FORWARDED_HEADER: "a"})
    assert (status, reply["count"]) == (200, 1)
    assert "fronts_not_reached" not in reply, "a forwarded stop is not forwarded again"


async def test_stop_names_the_servers_that_it_does_not_reach(servers: Servers) -> None:
    await servers.a.create("arm")
    servers.a.peer_sessions.url = "http://127.0.0.1:1"
    await servers.beat()
    status, reply = await servers.b.call("POST", "/debug/emergency_stop")
    assert (status, reply["count"], list(reply["fronts_not_reached"])) == (200, 0, ["a"])


async def test_stop_reaches_a_server_that_lost_the_database(servers: Servers) -> None:
    await servers.a.create("arm")
    await servers.a.create("hand")
    await servers.lose(servers.a)
    expect_ok(await servers.b.call("POST", "/sessions/hand/emergency_stop", json={"reason": "one"}))
    await servers.lose(servers.a)  # It has just confirmed the stop.
    status, reply = await servers.b.call("POST", "/debug/emergency_stop", json={"reason": "all"})
    assert (status, reply["count"], reply["fronts_not_reached"]) == (200, 2, {})
    stopped = {session.id: session.latch for session in servers.a.app.ctx.sessions.list()}
    assert stopped == {"arm": "all", "hand": "one"}


async def test_stop_continues_after_its_client_disconnects(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    await servers.a.create("arm")
    begun, go = asyncio.Event(), asyncio.Event()
    stop = peers._stop_all

    async def slow(*arguments: Any) -> Any:
        begun.set()
        await go.wait()
        return await stop(*arguments)

    monkeypatch.setattr(peers, "_stop_all", slow)
    asking = asyncio.create_task(servers.b.call("POST", "/debug/emergency_stop"))
    await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.05)
    go.set()
    await until(lambda: servers.a.own()["arm"] == "stopped")


async def test_each_key_sees_its_own_sessions_on_all_servers(bare: Servers, keys: tuple[str, dict[str, str]]) -> None:
    file, key = keys
    servers = await bare.begin(file)
    assert (await servers.a.create("arm", key["alice"]))[0] == 200
    for one in (servers.a, servers.b):
        for who, status in (("alice", 200), ("root", 200), ("bob", 404), ("eve", 404)):
            assert (await one.call("GET", "/sessions/arm", key[who]))[0] == status
            assert list(await one.listed(key[who])) == (["arm"] if status == 200 else [])
        for path in ("/sessions/arm", "/sessions/none"):
            assert (await one.call("GET", path))[0] == 401
    assert (await servers.b.call("DELETE", "/sessions/arm", key["bob"]))[0] == 404
    assert (await servers.b.call("POST", "/sessions/arm/stop", key["eve"]))[0] == 403
    status, reply = await servers.b.create("arm", key["bob"])
    assert status == 409
    assert "server a" not in reply["detail"]
    # A key without other rights may stop each session that it sees.
    assert (await servers.b.call("POST", "/sessions/arm/emergency_stop", key["eve"]))[0] == 200
    await servers.lose(servers.a)
    for who, status in (("alice", 200), ("bob", 404), ("eve", 404)):
        assert (await servers.b.call("GET", "/sessions/arm", key[who]))[0] == status
    assert (await servers.b.call("DELETE", "/sessions/arm", key["bob"]))[0] == 404
    assert (await servers.b.call("POST", "/sessions/arm/adopt", key["bob"], json={"force": True}))[0] == 404
    assert (await servers.b.call("POST", "/sessions/arm/adopt", key["alice"], json={"force": True}))[0] == 200
    assert await servers.b.listed(key["alice"]) == {"arm": "interrupted"}
    assert servers.b.app.ctx.sessions.get("arm").is_latched


async def test_returning_server_gives_up_an_adopted_session(servers: Servers) -> None:
    for session_id in ("arm", "leg"):
        await servers.a.create(session_id)
    await servers.lose(servers.a)
    assert (await servers.b.call("POST", "/sessions/arm/adopt", json={"force": True}))[0] == 200
    assert (await servers.b.call("POST", "/sessions/arm/adopt", json={"force": True}))[0] == 409
    await servers.a.peer_sessions._beat()
    await asyncio.gather(*servers.a.peer_sessions._hand_overs)
    assert servers.a.own() == {"leg": "ready"}
    await servers.beat()
    assert await servers.a.listed() == await servers.b.listed() == {"arm": "interrupted", "leg": "ready"}
    assert (await servers.a.call("POST", "/sessions/arm/restart"))[0] == 200
    await servers.beat()
    assert await servers.a.listed() == {"arm": "ready", "leg": "ready"}
    assert servers.database.sql("SELECT id, front FROM robojax_sessions ORDER BY id") == [["arm", "b"], ["leg", "a"]]


async def test_adoption_with_a_lost_response_is_completed(servers: Servers) -> None:
    await servers.a.create("arm")
    await servers.lose(servers.a)
    owning = await servers.b.peer_sessions._query(servers.b.peer_sessions._database, session_table.find_server, "a")
    # The response is lost.
    await servers.b.peer_sessions._query(
        servers.b.peer_sessions._database, session_table.adopt, "b", servers.b.peer_sessions._process, "arm", owning
    )
    assert (await servers.b.call("POST", "/sessions/arm/adopt"))[0] == 200
    assert await servers.b.listed() == {"arm": "interrupted"}


async def test_server_that_lost_its_disk_gets_its_sessions_back(servers: Servers) -> None:
    await servers.a.create("arm")
    servers.a.app.ctx.sessions._sessions.clear()
    await servers.a.peer_sessions._beat()
    assert servers.a.own() == {"arm": "interrupted"}


async def test_silent_loopback_address_of_another_machine_is_ignored(servers: Servers) -> None:
    await servers.a.create("arm")
    servers.a.peer_sessions._machine = "another machine"
    servers.a.peer_sessions.url = servers.b.url  # Another server uses this address.
    await servers.a.peer_sessions._beat()
    await servers.lose(servers.a)
    expect_refusal(await servers.b.call("POST", "/sessions/arm/adopt"), 409, "move_refused", "front_url")


async def test_server_is_dead_if_another_server_has_its_address(servers: Servers) -> None:
    await servers.a.create("arm")
    servers.a.peer_sessions.url = servers.b.url
    await servers.a.peer_sessions._beat()
    await servers.lose(servers.a)
    assert (await servers.b.call("POST", "/sessions/arm/adopt"))[0] == 200


async def test_session_of_an_ended_server_is_adopted_with_its_stop(servers: Servers) -> None:
    await servers.a.create("arm")
    await servers.a.app.ctx.sessions.emergency_stop("a hand")
    assert (await servers.b.call("POST", "/sessions/arm/adopt"))[0] == 409
    servers.a.app.ctx.sessions.begin_close()
    await servers.a.peer_sessions.close()
    await servers.b.peer_sessions._beat()
    servers.forget_places(servers.b)
    assert servers.b.peer_sessions.silent == [], "its robots must be held"
    reply = (await servers.b.call("GET", "/sessions/arm"))[1]
    assert (reply["status"], reply["error_message"]) == ("interrupted", "the server a ended in order; it was stopped")
    # Its address still answers.
    assert (await servers.b.call("POST", "/sessions/arm/adopt"))[0] == 200
    assert servers.b.app.ctx.sessions.get("arm").latch == "a hand"


async def test_unreadable_record_does_not_prevent_a_start(servers: Servers) -> None:
    await servers.a.create("arm")
    servers.database.sql(
        """INSERT INTO robojax_sessions VALUES ('leg', 'a', 'null', '{}', '{"status": "running"}', NULL)"""
    )
    await servers.a.peer_sessions.close()
    again = servers.another("a", servers.a.url, servers.a)
    await again.open()
    await again._beat()
    await again.close()
    assert servers.database.sql("SELECT id FROM robojax_sessions") == [["arm"]]


async def test_second_server_of_one_name_does_not_start(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    await servers.a.create("arm")
    monkeypatch.setattr(peers, "HEARTBEAT_TIMEOUT", 0.0)
    monkeypatch.setattr(peers, "BEAT_PERIOD", 0.01)
    # Another address: it asks server a. The same address: it reads the heartbeat.
    for url in (servers.b.url, servers.a.peer_sessions.url):
        await servers.a.peer_sessions._beat()
        twin = servers.another("a", url, servers.b)
        with pytest.raises(ServerNameTaken, match=r"another server has the name a.*--front-name"):
            await twin.open()
        await twin.close()
    await servers.beat()
    assert await servers.b.listed() == {"arm": "ready"}
    await servers.lose(servers.a)
    twin = servers.another("a", servers.b.url, servers.b)
    with pytest.raises(ServerNameTaken, match=f"answers at {servers.a.peer_sessions.url}"):
        await twin.open()


async def test_restarted_server_waits_for_its_name(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT_PERIOD", 0.01)
    monkeypatch.setattr(peers, "HEARTBEAT_TIMEOUT", 60.0)  # It waits for this long.
    again = servers.another("a", servers.a.peer_sessions.url, servers.b)  # As after a kill without a goodbye.
    await servers.a.peer_sessions._beat()
    starting = asyncio.create_task(again.open())
    await asyncio.sleep(0.1)
    assert not starting.done()
    await servers.lose(servers.a)
    await starting
    await again.close()


async def test_server_whose_name_was_taken_gives_up_its_sessions(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    await servers.a.create("arm")
    await servers.lose(servers.a)
    twin = servers.another("a", servers.a.peer_sessions.url, servers.b)
    await twin.open()
    assert servers.b.own() == {"arm": "interrupted"}
    await servers.a.peer_sessions.publish()
    await asyncio.gather(*servers.a.peer_sessions._hand_overs)
    assert servers.a.own() == {}
    assert "gives up its sessions" in caplog.text
    assert "has the name a" in str(servers.a.peer_sessions.facts()["trouble"])
    expect_refusal(await servers.a.create("leg"), 503, "front_name_taken")


async def test_emergency_stop_follows_a_deleted_id_to_another_server(servers: Servers) -> None:
    for session_id in ("arm", "leg"):
        await servers.a.create(session_id)
        place = f"/sessions/{session_id}/emergency_stop"
        assert (await servers.a.call("POST", place, json={"reason": "hand"}))[0] == 200
        assert (await servers.a.call("DELETE", f"/sessions/{session_id}"))[0] == 200
    assert (await servers.b.create("arm"))[0] == 200
    assert await servers.a.listed() == {"arm": "stopped"}
    expect_refusal(await servers.b.call("POST", "/sessions/arm/start"), 409, "move_refused", "hand")
    status, reply = await servers.a.call("POST", "/debug/sessions/arm/reset")
    assert (status, reply["session_id"]) == (200, "arm")
    # A latch without a session can be reset on any server, once.
    assert (await servers.b.call("POST", "/debug/sessions/leg/reset"))[0] == 200
    assert (await servers.b.call("POST", "/debug/sessions/leg/reset"))[0] == 404
    assert (await servers.b.create("leg"))[0] == 200
    assert (await servers.b.listed())["leg"] == "ready"
    # A latch that was reset elsewhere does not return, neither by adoption nor by a new session.
    await servers.lose(servers.b)
    assert (await servers.a.call("POST", "/sessions/leg/adopt", json={"force": True}))[0] == 200
    assert not servers.a.app.ctx.sessions.get("leg").is_latched
    await servers.b.peer_sessions._beat()
    await asyncio.gather(*servers.b.peer_sessions._hand_overs)
    assert (await servers.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert (await servers.a.create("arm"))[0] == 200
    assert not servers.a.app.ctx.sessions.get("arm").is_latched


def sending(number: signal.Signals) -> Callable[[PostgresServer], None]:
    return lambda database: database.signal_all(number)


@pytest.mark.parametrize(
    ("take_away", "bring_back"),
    [(PostgresServer.stop, PostgresServer.start), (sending(signal.SIGSTOP), sending(signal.SIGCONT))],
    ids=["database ended", "database frozen"],
)
async def test_sessions_continue_without_database_and_sync_later(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    take_away: Callable[[PostgresServer], None],
    bring_back: Callable[[PostgresServer], None],
) -> None:
    for session_id in ("arm", "hand", "old", "older"):
        await servers.a.create(session_id)
    await servers.a.call("POST", "/sessions/old/emergency_stop", json={"reason": "before"})
    await servers.b.create("leg")
    await asyncio.to_thread(take_away, servers.database)
    timeouts = {name: getattr(peers, name) for name in ("QUERY_TIMEOUT", "STOP_TIMEOUT")}
    try:
        for name in timeouts:
            monkeypatch.setattr(peers, name, 0.5)  # A frozen database never answers.
        servers.forget_places(servers.a)
        assert (await servers.a.call("GET", "/sessions/arm"))[0] == 200
        expect_refusal(await servers.a.call("GET", "/sessions/leg"), 503, "no_directory")
        async with servers.a.http.get("/sessions") as found:
            assert [one["session_id"] for one in await found.json()] == ["arm", "hand", "old", "older"]
            assert "database" in found.headers["x-robojax-incomplete"]
        expect_refusal(await servers.a.create("new"), 503, "not_kept")
        status, reply = await servers.a.call("POST", "/sessions/hand/emergency_stop", json={"reason": "a hand"})
        assert (status, reply["stopped"]) == (200, ["hand"])
        assert "other servers do not know" in reply["warning"]
        assert (await servers.a.call("POST", "/debug/sessions/old/reset"))[0] == 200
        assert (await servers.a.call("DELETE", "/sessions/older"))[0] == 200
        assert (await servers.a.call("GET", "/cluster"))[1]["front"]["trouble"] == peers.NO_DATABASE
    finally:
        await asyncio.to_thread(bring_back, servers.database)
        for name, seconds in timeouts.items():
            monkeypatch.setattr(peers, name, seconds)
    await servers.beat()
    assert await servers.b.listed() == {"leg": "ready", "arm": "ready", "hand": "stopped", "old": "stopped"}
    assert [one[0] for one in servers.database.sql("SELECT id FROM robojax_latches")] == ["hand"]
    servers.a.peer_sessions.trouble = None  # Its next heartbeat finds the database again.
    assert (await servers.a.create("new"))[0] == 200


@pytest.mark.parametrize(
    ("path", "by", "latch"),
    [
        ("/sessions/arm/emergency_stop", "eve", "a hand"),
        ("/api/sessions/arm/stop", "alice", None),
        ("/debug/emergency_stop", "eve", "a hand"),
    ],
)
async def test_stop_through_another_server_needs_no_database(
    bare: Servers,
    keys: tuple[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    pauses: Pauses,
    path: str,
    by: str,
    latch: str | None,
) -> None:
    servers = await bare.begin(keys[0])
    await servers.a.create("arm", keys[1]["alice"])
    await servers.a.call("POST", "/sessions/arm/start", keys[1]["alice"])
    servers.forget_places(servers.b)
    for module, name in ((redirects, "STOP_LOOKUP_TIMEOUT"), (store, "STOP_PUBLISH_TIMEOUT")):
        monkeypatch.setattr(module, name, 0.1)
    await asyncio.to_thread(servers.database.signal_all, signal.SIGSTOP)
    try:
        # The id must not lead to another route of the other server.
        assert (await servers.b.call("POST", "/sessions/..%2Fdebug/emergency_stop", keys[1][by]))[0] == 503
        assert servers.a.app.ctx.sessions.get("arm").latch is None
        began = time.monotonic()
        status, answer = await servers.b.call("POST", path, keys[1][by], json={"reason": "a hand"})
        assert pauses.running(began) < 2, "a query may take 30 s"
        assert status == 200, answer
        assert "other servers do not know" in answer["warning"]
        session = servers.a.app.ctx.sessions.get("arm")
        assert (str(session.stage), session.latch) == ("stopped", latch)
        # A session of no known server, and a key that may not stop this session.
        for session_id, name in (("leg", by), ("arm", "bob")):
            if path.endswith("/stop") or session_id == "leg":
                place = f"/sessions/{session_id}/{path.rsplit('/', 1)[1]}"
                status, answer = await servers.b.call("POST", place, keys[1][name])
                assert (status, answer["code"]) == (503, "no_directory")
                assert "the server a answers 404" in answer["detail"]
        status, answer = await servers.b.call("POST", "/sessions/arm/emergency_stop", "rjk_" + "g" * 43)
        assert (status, answer["code"]) == (401, "unauthorized")
    finally:
        await asyncio.to_thread(servers.database.signal_all, signal.SIGCONT)
    await servers.beat()
    assert (await servers.b.listed(keys[1]["alice"]))["arm"] == "stopped"


async def test_deletion_unknown_to_the_database_survives_a_kill(
    bare: Servers, database: PostgresServer, tmp_path: Path
) -> None:
    for is_second in (False, True):
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(server("a", database.url, tmp_path))
            if is_second:
                assert one.own() == {"leg": "interrupted"}
                assert database.sql("SELECT id FROM robojax_sessions") == [["leg"]]
                assert [row[0] for row in database.sql("SELECT id FROM robojax_latches")] == ["arm"]
                return
            for session_id in ("arm", "leg"):
                assert (await one.create(session_id))[0] == 200
            one.peer_sessions.trouble = "away"  # The database does not receive the next changes.
            assert (await one.call("POST", "/sessions/arm/emergency_stop"))[0] == 200
            assert (await one.call("DELETE", "/sessions/arm"))[0] == 200
            assert len(database.sql("SELECT id FROM robojax_sessions")) == 2


async def test_client_follows_a_session_to_its_server(bare: Servers, keys: tuple[str, dict[str, str]]) -> None:
    servers = await bare.begin(keys[0])
    async with AsyncClient(servers.a.url, key=keys[1]["alice"]) as first:
        await first.create("arm", "policies/act", camera_names=("front",), rate=50.0)
    pictures, pose = {"front": np.zeros((48, 64, 3), np.uint8)}, [0.0] * 6
    async with AsyncClient(servers.b.url, key=keys[1]["alice"]) as client:
        session = client.session("arm")
        assert len((await session.act(pictures, pose, reset=True)).actions) > 1
        async with session.stream() as stream:
            assert len(stream.welcome.joint_names) == 6
        await session.emergency_stop("a hand")
        await session.reset()
        assert await asyncio.to_thread(ask_without_a_loop, servers.b.url, keys[1]["alice"]) == "stopped"
        # The session moved to another server, so the client must forget its address.
        servers.a.app.ctx.sessions.begin_close()
        await servers.a.peer_sessions.close()
        await servers.beat_of(servers.b)
        assert (await session.status()).stats["front"] == "a"
        assert (await client.request("POST", "/sessions/arm/adopt"))["status"] == "interrupted"
        assert "front" not in (await session.status()).stats
        await session.delete()


def ask_without_a_loop(url: str, key: str) -> str:
    with Client(url, key=key) as client:
        with client.session("arm").stream() as stream:
            assert len(stream.welcome.joint_names) == 6
        return client.session("arm").status().status


@pytest.mark.parametrize("where", ["an address that is not of the database", "another path"])
async def test_key_is_sent_to_listed_servers_only(servers: Servers, where: str) -> None:
    paths: list[str] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        paths.append(head.split()[1])
        path = "/sessions/arm" if where.startswith("an address") else "/elsewhere"
        body = b'{"code": "on_another_server", "detail": "it is elsewhere"}'
        status = f"307 Temporary Redirect\r\nLocation: {servers.b.url}{path}"
        if "/cluster" in head:
            status, body = (
                "200 OK",
                b'{"front": {"url": "http://127.0.0.1:8", "others": [{"url": "http://127.0.0.1:9"}]}}',
            )
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(record, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncClient(url, key="rjk_secret") as client:
            with pytest.raises(RequestRefused, match="it is elsewhere") as refused:
                await client.session("arm").delete()
    assert refused.value.status == 307
    assert paths == ["/sessions/arm"] if where == "another path" else ["/sessions/arm", "/cluster"]


async def test_robot_in_rooms_receives_a_stop_on_another_server(servers: Servers) -> None:
    await servers.a.create("arm")
    await servers.a.call("POST", "/sessions/arm/emergency_stop", json={"reason": "a hand"})
    async with http_session() as http:
        address = Address.parse(servers.b.url)
        latch = SessionLatch(RoomsApi(http, address), address, "arm")
        assert await latch.fetch() == LatchState("a hand")
        await servers.a.call("POST", "/debug/sessions/arm/reset")
        assert await latch.fetch() == LatchState(None)
        await latch.report_stop("mine")
    assert servers.a.app.ctx.sessions.get("arm").latch == "mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("INSERT INTO robojax_schema VALUES (99)", "is of version 99, this robojax knows 2"),
        ("ALTER ROLE robojax_poor NOLOGIN", "not permitted to log in"),
    ],
)
async def test_unusable_database_is_reported_at_once(
    bare: Servers, database: PostgresServer, tmp_path: Path, change: str, says: str
) -> None:
    database.sql("DROP ROLE IF EXISTS robojax_poor; CREATE ROLE robojax_poor LOGIN")
    made = Postgres(database.url, session_table.SCHEMA, session_table.PREFIX)
    assert await made.run(30, session_table.list_sessions) == []
    await made.close()
    database.sql(change)
    url = database.url.replace("robojax@", "robojax_poor:secret@") if "ROLE" in change else database.url
    broken = Postgres(url, session_table.SCHEMA, session_table.PREFIX)
    with pytest.raises(DatabaseUnusable, match=says):
        await broken.run(30, session_table.list_sessions)
    await broken.close()
    with pytest.raises(NoDatabase, match=says) as refused:
        async with server("a", url, tmp_path):
            pass
    assert "secret" not in str(refused.value)


async def test_deletion_during_an_update_is_written_next(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for session_id in ("arm", "leg"):
        await servers.a.create(session_id)
    entry, sessions = servers.a.peer_sessions._entry, servers.a.app.ctx.sessions

    def slow(session: Any) -> Any:
        found = entry(session)
        if session.id == "leg":  # The first session ends before the others are read.
            monkeypatch.setattr(servers.a.peer_sessions, "_entry", entry)
            session.begin_close()
            sessions._journal.delete(session)
        return found

    monkeypatch.setattr(servers.a.peer_sessions, "_entry", slow)
    await servers.a.peer_sessions._beat()
    assert servers.database.sql("SELECT id FROM robojax_sessions") == [["arm"]]
    await servers.a.peer_sessions._beat()
    assert servers.a.own() == {"arm": "ready"}


async def test_after_kills_no_session_is_lost_shared_or_moving(tmp_path: Path, database: PostgresServer) -> None:
    found = await database_kills.campaign(tmp_path, 4, 5, database)
    assert {fault: found[fault] for fault in database_kills.FAULTS} == dict.fromkeys(database_kills.FAULTS, 0), found[
        "notes"
    ]
    assert sum(found["sessions_looked_at"].values()) > 4
