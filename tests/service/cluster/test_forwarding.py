"""Two fronts that share a directory: a client may ask either of them for any session, with its own key."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

pytest.importorskip("ray", reason="no ray; pip install 'robojax[ray]'")

from sanic import HTTPResponse

from service.app import create_app
from service.auth.keys import KeyFile
from service.auth.roles import Role
from service.cluster import directory_actor, forwarding, front, joining, knock
from service.cluster.connection import ask
from service.cluster.directory import LEASE, Directory, MemoryStore
from service.cluster.directory_actor import DirectoryActor
from service.cluster.forwarding import PASSED, Forwarding
from service.cluster.front import FrontOfCluster, NameTaken
from service.cluster.knock import NAME
from service.edge.origins import Origins
from service.engine.engine import Engine
from service.engine.progress import Durations
from service.engine.scripted_policy import ScriptedLoader
from service.serving import listen, serving
from service.sessions.request import NewSession
from service.sessions.sessions import Sessions
from service.settings import Settings
from service.transport.memory import MemoryTransport

KEYS = {"eve": Role.VIEWER, "alice": Role.OPERATOR, "bob": Role.OPERATOR, "root": Role.ADMIN}


class Clock:
    """Stands where the module ``time`` stands in the directory's actor."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return 100.0 + self.ahead  # only a test says that time goes by: a front is dead three seconds after its word


class Local(DirectoryActor):
    """The actor without Ray."""

    def __init__(self, now: float) -> None:
        self._directory = Directory(MemoryStore(), now)


class Handle:
    """Of an actor, as Ray gives one; `is_lost` makes it unreachable."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._thread = ThreadPoolExecutor(1)  # as an actor has it: one call after the other
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.is_lost:
                raise TimeoutError
            return getattr(self._actor, name)(*arguments)

        def remote(*arguments: Any) -> Any:
            return SimpleNamespace(future=lambda: self._thread.submit(call, *arguments))

        return SimpleNamespace(remote=remote)


class Front:
    """A server, and a client of it; stands where its `Joining` stands."""

    def __init__(self, name: str, handle: Handle, patch: pytest.MonkeyPatch, keys: str | None = None):
        settings = Settings(policy_owners=("policies",), keys_file=keys, engine="ray-local")
        self.name, self.handle = name, handle
        self.transport = MemoryTransport()
        self.forwarding = Forwarding(Origins(settings.origins))
        self.load, self.cluster = ScriptedLoader(), None
        patch.setattr(joining, "Joining", lambda settings: self)
        self.app = create_app(settings, transport=self.transport, load=self.load)

        # A route whose answer has no end that is known before.
        async def count(request: Any, session_id: str) -> HTTPResponse | None:
            stream = await request.respond(content_type="text/plain")
            for number in range(3):
                await stream.send(f"{number} ")
            if session_id == "broken":
                request.transport.abort()
            return None

        self.app.add_route(count, "/sessions/<session_id:str>/count", name="count", ctx_role=None)

    async def begin(self, stack: AsyncExitStack) -> "Front":
        self.url = await stack.enter_async_context(serving(self.app, listen("127.0.0.1", 0)))
        self.http = await stack.enter_async_context(
            aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=20))
        )
        return self

    async def open(self, durations: Durations, own: Sequence[object]) -> Engine:
        self._own = f"http://{own[0]}:{own[1]}"
        return Engine(switch_interval=None, durations=durations)

    async def share(self, sessions: Sessions) -> FrontOfCluster:
        self.front = self.forwarding.front = FrontOfCluster(self.name, self._own, sessions)
        await self.front.open()
        return self.front

    async def claim(self, new: NewSession) -> None:
        await self.front.claim(new)

    async def close(self) -> None:
        await self.front.close()
        await self.forwarding.close()

    async def call(self, method: str, path: str, key: str | None = None, **more: Any) -> tuple[int, Any]:
        headers = {"x-api-key": key} if key else {}
        async with self.http.request(method, path, headers=headers | more.pop("headers", {}), **more) as answer:
            return answer.status, await answer.json()

    async def create(self, session_id: str, key: str | None = None, **more: Any) -> tuple[int, Any]:
        body = {"session_id": session_id, "policy_path": "policies/act", "transport_server_url": "direct"} | more
        return await self.call("POST", "/sessions", key, json=body)

    async def listed(self, key: str | None = None) -> dict[str, str]:
        status, told = await self.call("GET", "/sessions", key)
        assert status == 200
        assert len({one["session_id"] for one in told}) == len(told)
        return {one["session_id"]: one["status"] for one in told}


class Cluster:
    """Fronts ``a`` and ``b``."""

    def __init__(self, stack: AsyncExitStack, clock: Clock, handle: Handle, patch: pytest.MonkeyPatch):
        self._stack, self.clock, self.handle, self._patch = stack, clock, handle, patch
        self.a: Front
        self.b: Front

    async def begin(self, keys: str | None = None) -> "Cluster":
        self.a, self.b = [await Front(name, self.handle, self._patch, keys).begin(self._stack) for name in "ab"]
        await self.beat()
        return self

    async def beat(self) -> None:
        for one in (self.a, self.b):
            await one.front._beat()
            one.forwarding._places.clear()

    async def lose(self, one: Front) -> None:
        """It is not heard of any more, and goes on."""
        await one.front.close()
        self.clock.ahead += LEASE
        other = self.b if one is self.a else self.a
        await other.front._beat()
        other.forwarding._places.clear()


@pytest.fixture
async def bare(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    clock = Clock()
    handle = Handle(Local(clock.monotonic()))
    monkeypatch.setattr(directory_actor, "time", clock)
    monkeypatch.setattr(front, "find_directory", lambda: handle)
    monkeypatch.setattr(front, "PERIOD", 3600.0)  # they speak when the test says so
    for module, name in ((front, "ANSWER"), (forwarding, "CONNECT"), (forwarding, "STOPPING"), (knock, "PATIENCE")):
        monkeypatch.setattr(module, name, 30.0)  # all of them are there; a busy machine only takes longer to answer
    async with AsyncExitStack() as stack:
        yield Cluster(stack, clock, handle, monkeypatch)


@pytest.fixture
async def cluster(bare: Cluster) -> Cluster:
    return await bare.begin()


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, dict[str, str]]:
    file = tmp_path / "keys.json"
    return str(file), {name: KeyFile(file).new(name, role, name, time.time()) for name, role in KEYS.items()}


async def test_a_session_is_found_at_both_from_the_moment_it_is_promised(cluster: Cluster) -> None:
    assert (await cluster.a.create("arm"))[0] == 200
    status, told = await cluster.b.call("GET", "/sessions/arm")
    assert (status, told["session_id"], told["status"]) == (200, "arm", "ready")
    assert await cluster.a.listed() == await cluster.b.listed() == {"arm": "ready"}


async def test_what_is_asked_of_the_other_front_is_done_where_the_session_is(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    for prefix in ("", "/api"):
        observation = {"state": [0.0] * 6, "want": "action", "images": {}}
        status, told = await cluster.b.call("POST", f"{prefix}/sessions/arm/act", json=observation)
        assert status == 422, told
        assert (await cluster.a.call("POST", f"{prefix}/sessions/arm/act", json=observation)) == (status, told)
    status, told = await cluster.b.call("PATCH", "/sessions/arm", json={"nothing": 1})
    assert (status, told) == await cluster.a.call("PATCH", "/sessions/arm", json={"nothing": 1})
    assert (await cluster.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert await cluster.a.listed() == await cluster.b.listed() == {}
    assert (await cluster.b.create("arm"))[0] == 200


async def test_the_answer_says_which_front_gave_it(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    async with cluster.b.http.get("/sessions/arm", headers={"x-request-id": "mine"}) as found:
        assert (found.headers.getall(PASSED), found.headers.getall(NAME)) == (["a"], ["b"])
        assert found.headers.getall("x-request-id") == ["mine"]
        assert len(found.headers.getall("content-type")) == 1


async def test_an_id_is_anothers_everywhere(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    assert (await cluster.b.create("arm"))[0] == 409
    answers = await asyncio.gather(cluster.a.create("leg"), cluster.b.create("leg"))
    assert sorted(status for status, _ in answers) == [200, 409]
    assert await cluster.a.listed() == {"arm": "ready", "leg": "ready"}


async def test_an_answer_without_a_length_goes_on_in_pieces(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    async with cluster.b.http.get("/sessions/arm/count") as found:
        assert (found.status, await found.text(), found.content_length) == (200, "0 1 2 ", None)
        assert found.headers.getall(PASSED) == ["a"]


async def test_an_answer_that_breaks_off_breaks_off_here_too(cluster: Cluster) -> None:
    await cluster.a.create("broken")
    with pytest.raises(aiohttp.ClientError):
        async with cluster.b.http.get("/sessions/broken/count") as found:
            await found.read()


async def test_a_long_answer_of_known_length_goes_on_in_pieces(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.a.create("arm")
    monkeypatch.setattr(forwarding, "_AT_ONCE", 10)
    async with cluster.b.http.get("/sessions/arm") as found:
        assert found.content_length == len(await found.read()) > 10
        assert json.loads(await found.text())["session_id"] == "arm"


async def test_a_body_has_an_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.a.create("arm")
    monkeypatch.setattr(forwarding, "LARGEST", 1000)
    status, told = await cluster.b.call("POST", "/sessions/arm/act", data=b"x" * 2000)
    assert (status, told["code"]) == (413, "too_large")


async def test_a_socket_is_sent_to_where_the_session_is(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "x3JJHMbDL1EzLkh9GBhXDw==",
    }
    async with cluster.b.http.get("/sessions/arm/stream?a=b", headers=upgrade, allow_redirects=False) as found:
        assert (found.status, found.headers.get("location"), await found.text()) == (
            307,
            f"{cluster.a.url}/sessions/arm/stream?a=b",
            "",
        )


async def test_what_was_passed_on_is_not_passed_on_again(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    status, told = await cluster.b.call("GET", "/sessions/arm", headers={PASSED: "c"})
    assert (status, told["code"]) == (404, "unknown_session")
    # Both believe that it is the other's.
    cluster.a.forwarding._places["leg"] = (time.monotonic() + 60, (await cluster.b.front.find("arm")))  # type: ignore[assignment]
    status, told = await cluster.a.call("GET", "/sessions/leg")
    assert (status, told["code"]) == (404, "unknown_session")


async def test_pages_that_may_not_call_are_refused_before_anything_is_passed_on(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    status, told = await cluster.b.call("POST", "/sessions/arm/start", headers={"origin": "http://evil.example"})
    assert (status, told["code"]) == (403, "origin_refused")
    assert (await cluster.a.listed()) == {"arm": "ready"}
    # One of this server's own passes at the other one, too.
    own = {"origin": cluster.b.url}
    async with cluster.b.http.get("/sessions/arm", headers=own) as found:
        assert (found.status, found.headers.getall("access-control-allow-origin")) == (200, [cluster.b.url])


async def test_a_front_that_does_not_answer_is_said_to(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.a.create("arm")
    cluster.a.front.url = "http://127.0.0.1:1"
    await cluster.beat()
    status, told = await cluster.b.call("GET", "/sessions/arm")
    assert (status, told["code"]) == (502, "front_lost")
    assert "127.0.0.1" not in told["detail"]


async def test_without_the_directory_own_sessions_are_answered_for(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    await cluster.b.create("leg")
    cluster.handle.is_lost = True
    cluster.a.forwarding._places.clear()
    assert (await cluster.a.call("GET", "/sessions/arm"))[0] == 200
    assert (await cluster.a.call("GET", "/sessions/leg"))[0] == 503
    async with cluster.a.http.get("/sessions") as found:
        assert [one["session_id"] for one in await found.json()] == ["arm"]
        assert "directory" in found.headers["x-robojax-incomplete"]
    assert (await cluster.a.create("hand"))[0] == 503
    assert (await cluster.a.call("DELETE", "/sessions/arm"))[0] == 200


async def test_of_a_session_whose_front_died_it_is_told_how_it_stood(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    await cluster.lose(cluster.a)
    status, told = await cluster.b.call("GET", "/sessions/arm")
    assert (status, told["status"], told["stats"]["front"]) == (200, "interrupted", "a")
    status, told = await cluster.b.call("POST", "/sessions/arm/start")
    assert (status, told["code"]) == (409, "move_refused")
    assert "/sessions/arm/adopt" in told["detail"]
    status, told = await cluster.b.call("POST", "/sessions/arm/adopt")
    assert status == 409, "it answers"
    assert "answers" in told["detail"]
    assert (await cluster.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert await cluster.b.listed() == {}


async def test_an_id_of_a_front_that_died_before_it_told_of_it_is_no_session(cluster: Cluster) -> None:
    await ask(cluster.handle, 30.0, "claim", "a", cluster.a.front._process, "arm", None)
    await cluster.lose(cluster.a)
    assert (await cluster.b.call("GET", "/sessions/arm"))[0] == 404
    assert (await cluster.b.call("DELETE", "/sessions/arm"))[0] == 200
    assert (await cluster.b.create("arm"))[0] == 200


async def test_a_stop_reaches_all_fronts(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    await cluster.b.create("leg")
    status, told = await cluster.b.call("POST", "/debug/emergency_stop", json={"reason": "a hand"})
    assert (status, told["count"], sorted(told["stopped"])) == (200, 2, ["arm", "leg"])
    assert told["fronts_not_reached"] == {}
    status, told = await cluster.a.call("GET", "/sessions/arm")
    assert "a hand" in json.dumps(told)
    assert told["status"] == "stopped"


async def test_a_stop_from_a_page_reaches_all_fronts(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    own = {"origin": cluster.b.url, "cookie": "a=b", "referer": cluster.b.url}
    status, told = await cluster.b.call("POST", "/debug/emergency_stop", headers=own)
    assert (status, told["count"], told["fronts_not_reached"]) == (200, 1, {})


async def test_a_stop_names_the_fronts_that_it_does_not_reach(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    cluster.a.front.url = "http://127.0.0.1:1"
    await cluster.beat()
    status, told = await cluster.b.call("POST", "/debug/emergency_stop")
    assert (status, told["count"], list(told["fronts_not_reached"])) == (200, 0, ["a"])


async def test_a_stop_reaches_a_front_that_lost_its_cluster(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    await cluster.a.create("hand")
    await cluster.lose(cluster.a)
    status, told = await cluster.b.call("POST", "/sessions/hand/emergency_stop", json={"reason": "one"})
    assert status == 200, told
    status, told = await cluster.b.call("POST", "/debug/emergency_stop", json={"reason": "all"})
    assert (status, told["count"], told["fronts_not_reached"]) == (200, 2, {})
    stopped = {session.id: session.latch for session in cluster.a.app.ctx.sessions.list()}
    assert "one" in str(stopped["hand"])
    assert "all" in str(stopped["arm"])


async def test_a_stop_is_not_passed_on_twice(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    status, told = await cluster.b.call("POST", "/debug/emergency_stop", headers={PASSED: "a"})
    assert (status, told["count"]) == (200, 0)
    assert "fronts_not_reached" not in told


async def test_a_stop_goes_on_when_whoever_asked_does_not_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.a.create("arm")
    begun, go = asyncio.Event(), asyncio.Event()
    stop = forwarding._stop

    async def slow(*arguments: Any) -> Any:
        begun.set()
        await go.wait()
        return await stop(*arguments)

    monkeypatch.setattr(forwarding, "_stop", slow)
    asking = asyncio.create_task(cluster.b.call("POST", "/debug/emergency_stop"))
    await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.05)
    go.set()
    async with asyncio.timeout(30):
        while (await cluster.a.listed())["arm"] != "stopped":  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.01)


async def test_each_key_sees_its_own_on_all_fronts(bare: Cluster, keys: tuple[str, dict[str, str]]) -> None:
    file, key = keys
    cluster = await bare.begin(file)
    assert (await cluster.a.create("arm", key["alice"]))[0] == 200
    for one in (cluster.a, cluster.b):
        for who, status in (("alice", 200), ("root", 200), ("bob", 404), ("eve", 404)):
            assert (await one.call("GET", "/sessions/arm", key[who]))[0] == status
            assert list(await one.listed(key[who])) == (["arm"] if status == 200 else [])
        for path in ("/sessions/arm", "/sessions/none"):
            assert (await one.call("GET", path))[0] == 401
    assert (await cluster.b.call("DELETE", "/sessions/arm", key["bob"]))[0] == 404
    assert (await cluster.b.call("POST", "/sessions/arm/stop", key["eve"]))[0] == 403
    status, told = await cluster.b.create("arm", key["bob"])
    assert status == 409
    assert "front a" not in told["detail"]
    await cluster.lose(cluster.a)
    for who, status in (("alice", 200), ("bob", 404), ("eve", 404)):
        assert (await cluster.b.call("GET", "/sessions/arm", key[who]))[0] == status
    assert (await cluster.b.call("DELETE", "/sessions/arm", key["bob"]))[0] == 404
    assert (await cluster.b.call("POST", "/sessions/arm/adopt", key["bob"], json={"force": True}))[0] == 404
    assert (await cluster.b.call("POST", "/sessions/arm/adopt", key["alice"], json={"force": True}))[0] == 200
    assert await cluster.b.listed(key["alice"]) == {"arm": "interrupted"}


async def test_a_front_whose_session_was_adopted_gives_it_up_when_it_comes_back(cluster: Cluster) -> None:
    for session_id in ("arm", "leg"):
        await cluster.a.create(session_id)
    await cluster.lose(cluster.a)
    assert (await cluster.b.call("POST", "/sessions/arm/adopt", json={"force": True}))[0] == 200
    assert (await cluster.b.call("POST", "/sessions/arm/adopt", json={"force": True}))[0] == 409
    await cluster.b.front._beat()
    await cluster.a.front._beat()
    await asyncio.gather(*cluster.a.front._leaving)
    assert [session.id for session in cluster.a.app.ctx.sessions.list()] == ["leg"]
    await cluster.beat()
    assert await cluster.a.listed() == await cluster.b.listed() == {"arm": "interrupted", "leg": "ready"}
    assert (await cluster.a.call("POST", "/sessions/arm/restart"))[0] == 200
    await cluster.beat()
    assert (await cluster.a.listed()) == {"arm": "ready", "leg": "ready"}


async def test_an_adoption_whose_answer_is_lost_is_made_good(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    await cluster.lose(cluster.a)
    await ask(cluster.handle, 30.0, "adopt", "b", cluster.b.front._process, "arm")  # and its answer does not come
    assert (await cluster.b.call("POST", "/sessions/arm/adopt"))[0] == 200
    await cluster.b.front._beat()
    assert await cluster.b.listed() == {"arm": "interrupted"}


async def test_a_front_that_lost_its_records_gets_them_back(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    cluster.a.app.ctx.sessions._sessions.clear()
    cluster.a.front._spoken_of.clear()
    cluster.clock.ahead += 60
    await cluster.a.front._beat()
    assert [str(session.stage) for session in cluster.a.app.ctx.sessions.list()] == ["interrupted"]


async def test_silence_of_a_front_at_a_loopback_address_elsewhere_is_no_proof(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    cluster.a.front._machine = "another machine"
    cluster.a.front.url = cluster.b.url  # what is at this address here is another front
    await cluster.a.front._beat()
    await cluster.lose(cluster.a)
    status, told = await cluster.b.call("POST", "/sessions/arm/adopt")
    assert (status, told["code"]) == (409, "move_refused")
    assert "front_url" in told["detail"]


async def test_one_whose_address_another_front_has_now_is_dead(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    cluster.a.front.url = cluster.b.url
    await cluster.a.front._beat()
    await cluster.lose(cluster.a)
    assert (await cluster.b.call("POST", "/sessions/arm/adopt"))[0] == 200


async def test_a_record_that_cannot_be_read_keeps_no_front_from_starting(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    there = cluster.handle._actor._directory._entries
    there["leg"] = type(there["arm"])("leg", "a", record="{}", status={"status": "running"})
    await cluster.a.front.close()
    again = FrontOfCluster("a", cluster.a.url, cluster.a.app.ctx.sessions)
    await again.open()
    await again.close()
    assert set(there) == {"arm"}


async def test_a_second_server_of_one_name_does_not_start(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.a.create("arm")
    monkeypatch.setattr(front, "LEASE", 0.0)
    monkeypatch.setattr(front, "PERIOD", 0.01)
    for url in (cluster.b.url, cluster.a.front.url):  # another address: a is asked; the same one: the directory knows
        twin = FrontOfCluster("a", url, cluster.b.app.ctx.sessions)
        with pytest.raises(NameTaken, match=r"another server has the name a.*--front-name"):
            await twin.open()
        await twin.close()
    await cluster.beat()
    assert await cluster.b.listed() == {"arm": "ready"}


async def test_one_that_is_silent_in_the_cluster_keeps_its_name_while_it_answers(cluster: Cluster) -> None:
    await cluster.a.create("arm")
    await cluster.lose(cluster.a)
    twin = FrontOfCluster("a", cluster.b.url, cluster.b.app.ctx.sessions)
    with pytest.raises(NameTaken, match=f"answers at {cluster.a.front.url}"):
        await twin.open()


async def test_a_server_that_is_started_again_waits_for_its_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "PERIOD", 0.01)
    monkeypatch.setattr(front, "LEASE", 60.0)  # for as long it waits
    again = FrontOfCluster("a", cluster.a.front.url, cluster.b.app.ctx.sessions)  # as after a kill: nothing was said
    starting = asyncio.create_task(again.open())
    await asyncio.sleep(0.1)
    assert not starting.done()
    cluster.clock.ahead += LEASE
    await starting
    await again.close()


async def test_a_front_whose_name_was_taken_gives_up_what_it_had(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.a.create("arm")
    await cluster.lose(cluster.a)
    twin = FrontOfCluster("a", cluster.a.front.url, cluster.b.app.ctx.sessions)
    await twin.open()
    assert await cluster.b.listed() == {"arm": "interrupted"}
    await cluster.a.front.tell()
    await asyncio.gather(*cluster.a.front._leaving)
    assert cluster.a.app.ctx.sessions.list() == []
    assert "gives up its sessions" in caplog.text
    assert "has the name a" in cluster.a.front.facts()["trouble"]  # type: ignore[operator]
    status, told = await cluster.a.create("leg")
    assert (status, told["code"]) == (503, "front_name_taken")
    # The name is free again: it has what was taken from it, and moves nothing.
    cluster.b.app.ctx.sessions._sessions.clear()
    await twin.close()
    await cluster.a.front._beat()
    assert {session.id: str(session.stage) for session in cluster.a.app.ctx.sessions.list()} == {"arm": "interrupted"}


async def test_an_emergency_stop_follows_a_deleted_id_to_another_front(cluster: Cluster) -> None:
    for session_id in ("arm", "leg"):
        await cluster.a.create(session_id)
        assert (await cluster.a.call("POST", f"/sessions/{session_id}/emergency_stop", json={"reason": "hand"}))[
            0
        ] == 200
        assert (await cluster.a.call("DELETE", f"/sessions/{session_id}"))[0] == 200
    assert (await cluster.b.create("arm"))[0] == 200
    assert (await cluster.a.listed()) == {"arm": "stopped"}
    status, told = await cluster.b.call("POST", "/sessions/arm/start")
    assert (status, told["code"]) == (409, "move_refused")
    assert "hand" in told["detail"]
    status, told = await cluster.a.call("POST", "/debug/sessions/arm/reset")
    assert (status, told["session_id"]) == (200, "arm")
    # One whose session is nowhere is reset anywhere, once.
    assert (await cluster.b.call("POST", "/debug/sessions/leg/reset"))[0] == 200
    assert (await cluster.b.call("POST", "/debug/sessions/leg/reset"))[0] == 404
    assert (await cluster.b.create("leg"))[0] == 200
    assert (await cluster.b.listed())["leg"] == "ready"
