"""nginx and Caddy in front of two servers that share a database, with the configurations of deploy/proxy."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from benchmarks.postgres import PostgresServer
from robojax.client import AsyncClient
from service.distributed.peers import SERVER_NAME_HEADER
from tests.testing.peers import require_peers
from tests.testing.rig import started

DEPLOY = Path(__file__).parents[3] / "deploy" / "proxy"
PICTURES, POSE = {"front": np.zeros((48, 64, 3), np.uint8)}, [0.0] * 6


def nginx(folder: Path, port: int, servers: list[str]) -> list[str]:
    """Return the nginx command; its configuration differs from deploy/ only in addresses, TLS and folders."""
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"listen 443 ssl;\n.*\n.*\n", f"listen 127.0.0.1:{port};\n", text)
    for before, after in zip(("10.0.0.5:8001", "10.0.0.6:8001"), servers, strict=True):
        assert before in text
        text = text.replace(before, after)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds) + "    access_log off;\n"
    text = text.replace("http {\n", f"http {{\n{paths}", 1)
    text = f"daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\n{text}"
    (folder / "nginx.conf").write_text(text)
    return ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


def caddy(folder: Path, port: int, servers: list[str]) -> list[str]:
    text = (DEPLOY / "Caddyfile").read_text().replace("robots.example", f"http://127.0.0.1:{port}")
    for before, after in zip(("10.0.0.5:8001", "10.0.0.6:8001"), servers, strict=True):
        assert before in text
        text = text.replace(before, after)
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + text)
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


class Proxied:
    """Servers ``a`` and ``b``, and a proxy at `url`."""

    def __init__(self, url: str, servers: dict[str, str]):
        self.url, self.servers = url, servers

    async def server_of(self, path: str) -> str:
        async with aiohttp.ClientSession() as http, http.get(self.url + path, allow_redirects=False) as answer:
            return answer.headers[SERVER_NAME_HEADER]


@pytest.fixture(params=["nginx", "caddy"])
async def proxied(
    request: pytest.FixtureRequest, database: PostgresServer, tmp_path: Path, unused_tcp_port: int
) -> AsyncIterator[Proxied]:
    name, port = request.param, unused_tcp_port
    require_peers(name)
    async with AsyncExitStack() as stack:
        servers = {}
        for front in "ab":
            kept: dict[str, Any] = {"database": database.url, "front_name": front, "state": str(tmp_path / front)}
            server = await stack.enter_async_context(started(policy_owners=("policies",), **kept))
            servers[front] = server.url
        make: Any = {"nginx": nginx, "caddy": caddy}[name]
        command = make(tmp_path, port, [url.removeprefix("http://") for url in servers.values()])
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
        log = stack.enter_context((tmp_path / "proxy.log").open("wb"))
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
        try:
            async with asyncio.timeout(30), aiohttp.ClientSession() as http:
                while True:
                    assert process.returncode is None, (tmp_path / "proxy.log").read_text()
                    try:
                        async with http.get(f"http://127.0.0.1:{port}/health") as answer:
                            assert answer.status == 200, await answer.text()
                        break
                    except aiohttp.ClientConnectionError:
                        await asyncio.sleep(0.05)
            yield Proxied(f"http://127.0.0.1:{port}", servers)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def test_session_is_created_and_requested_at_one_server(proxied: Proxied) -> None:
    async with AsyncClient(proxied.url) as client:
        for number in range(3):
            session = await client.create(f"arm-{number}", "policies/act", camera_names=("front",), rate=50.0)
            owners = {await proxied.server_of(f"{prefix}/sessions/arm-{number}") for prefix in ("", "/api")}
            assert len(owners) == 1
            assert "front" not in (await session.status()).stats
            assert client._http._urls == {}, "no request was redirected"
    # Ports differ in each run, and so does the hash.
    assert {await proxied.server_of(f"/sessions/leg-{number}") for number in range(40)} == {"a", "b"}


async def test_session_on_another_server_is_reached_for_each_request(
    proxied: Proxied, request: pytest.FixtureRequest
) -> None:
    away = {"a": "b", "b": "a"}[await proxied.server_of("/sessions/arm")]
    async with AsyncClient(proxied.servers[away]) as direct:
        await direct.create("arm", "policies/act", camera_names=("front",), rate=50.0)
    async with AsyncClient(proxied.url) as client:
        session = client.session("arm")
        assert len((await session.act(PICTURES, POSE, reset=True)).actions) > 1
        async with session.stream() as stream:
            assert len(stream.welcome.joint_names) == 6
            assert len((await stream.act(PICTURES, POSE)).actions) > 1  # type: ignore[union-attr]
        is_followed_by_the_proxy = "nginx" in request.node.name
        assert (client._http._urls == {}) == is_followed_by_the_proxy
        await session.emergency_stop("a hand")
        assert (await session.status()).stats["emergency_stop"] == "a hand"
        await session.delete()
        assert await client.sessions() == []
