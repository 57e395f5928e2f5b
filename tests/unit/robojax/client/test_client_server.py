"""The client with the real server: sessions, acts, streams, rooms, keys."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robojax.client import (
    AsyncClient,
    AsyncSession,
    AsyncStream,
    Client,
    Command,
    RequestRefused,
    ServerUnreachable,
    StopMessage,
    Stream,
    StreamClosed,
)
from robojax.client.stream import open_async_stream
from service.auth.caller import Role
from tests.testing.rig import REAL, started
from tests.testing.waiting import wait_until

PICTURES = {"front": np.zeros((48, 64, 3), np.uint8)}
POSE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """Yield an operator's client of a server with keys."""
    settings: dict[str, Any] = {"state": str(tmp_path / "state"), "policy_owners": ("policies",)}
    async with (
        started(transport=REAL, roles={"alice": Role.OPERATOR}, **settings) as server,
        AsyncClient(server.url, key=server.keys["alice"]) as client,
    ):
        yield client


async def made(client: AsyncClient) -> AsyncSession:
    return await client.create("arm", "policies/act", camera_names=("front",), rate=50.0)


async def drain(stream: AsyncStream) -> None:
    """Read messages until the stream is closed."""
    async with asyncio.timeout(30):
        while True:
            await stream.next()


async def drive(session: AsyncSession) -> None:
    """Receive three commands of the session's control loop, then raise an error."""
    async with session, session.stream() as stream:
        await session.start()
        commands = 0
        async for message in stream:
            await stream.observe(PICTURES, POSE)
            if isinstance(message, Command):
                assert set(message.joints) == set(stream.welcome.joint_names)
                commands += 1
            if commands == 3:
                raise LookupError("of the user's program")


async def test_program_with_an_event_loop_uses_the_whole_api(client: AsyncClient, monkeypatch) -> None:
    session = await made(client)
    assert [each.session_id for each in await client.sessions()] == ["arm"]
    chunk = await session.act(PICTURES, POSE, number=7)
    assert (chunk.actions.shape, chunk.number, chunk.joint_names[5]) == ((20, 6), 7, "Jaw")
    np.testing.assert_allclose(chunk.actions[0], np.array(POSE) + 0.1, atol=1e-5)
    state = {f"{name}.pos": value for name, value in zip(chunk.joint_names, POSE, strict=True)} | {"timestamp": 1.0}
    again = await session.act(PICTURES, state, extra="ignore", reset=True)
    np.testing.assert_allclose(again.actions, chunk.actions, atol=1e-5)
    with pytest.raises(RequestRefused, match="unknown names: 'timestamp'"):
        await session.act(PICTURES, state)
    with pytest.raises(RequestRefused, match="did you mean 'executed'"):
        await session.act(PICTURES, POSE, exectued=3)  # pyright: ignore[reportCallIssue]
    first = await session.next_action(PICTURES, POSE, reset=True)
    np.testing.assert_allclose(first.action, chunk.actions[0], atol=1e-5)
    assert first.left == 19
    await session.patch(overlap="latest_only")
    with pytest.raises(RequestRefused, match="did you mean 'overlap'"):
        await session.patch(overlapp="latest_only")  # pyright: ignore[reportCallIssue]
    assert (chunk.warnings, first.warnings) == ((), ())
    odd = [150.0, *POSE[1:]]  # Outside of the range, which ends at 100.
    (warning,) = (await session.act(PICTURES, odd, reset=True)).warnings
    assert "Rotation" in warning
    assert (await session.next_action(PICTURES, odd, reset=True)).warnings == (warning,)

    with pytest.raises(RequestRefused) as refused:
        await session.act({"side": PICTURES["front"]}, POSE)
    assert (refused.value.status, refused.value.code) == (422, "invalid")
    assert "front" in refused.value.text
    # A client without a key is refused; a ticket opens one stream.
    ticket = await client.ticket()
    async with AsyncClient(client.url) as stranger:
        with pytest.raises(RequestRefused) as refused:
            await stranger.sessions()
        assert refused.value.status == 401
        async with stranger.session("arm").stream(ticket=ticket) as stream:
            assert stream.welcome.cameras == {"front": (48, 64)}

    with pytest.raises(LookupError):
        await drive(session)
    assert (await session.status()).status == "stopped"
    await session.reset()

    async with session.stream() as stream:
        chunk = await stream.act(PICTURES, POSE, number=8)
        assert (chunk.number, chunk.warnings) == (8, ())
        assert (await stream.act(PICTURES, odd)).warnings == (warning,)
        await session.emergency_stop("enough")
        async with asyncio.timeout(30):
            while not isinstance(stopped := await stream.next(), StopMessage):
                pass
        assert stopped.reason == "enough"
        with pytest.raises(RequestRefused, match="emergency"):
            await stream.act(PICTURES, POSE)
        await session.reset()
        await session.delete()
        with pytest.raises(StreamClosed):
            await drain(stream)
    with pytest.raises(RequestRefused) as refused:
        await session.status()
    assert (refused.value.status, refused.value.code) == (404, "unknown_session")


async def test_program_without_an_event_loop_uses_the_whole_api(client: AsyncClient, monkeypatch) -> None:
    def program() -> None:
        monkeypatch.setenv("ROBOJAX_KEY", client._key or "")
        with Client(client.url) as server:
            with server.create("arm", "policies/act") as session:
                np.testing.assert_allclose(session.act(PICTURES, POSE).actions[1], np.array(POSE) + 0.2, atol=1e-5)
                assert session.next_action(PICTURES, dict(zip(names, POSE, strict=True))).left == 19
                with session.stream() as stream:
                    session.start()
                    drive(stream)
                assert session.status().is_moving
            assert session.status().status == "stopped"
            with pytest.raises(RequestRefused, match="stopped"):
                session.act(PICTURES, POSE)
            with session:
                assert session.act(PICTURES, POSE).actions.shape == (20, 6)
                assert session.act(PICTURES, POSE, executed=2).actions.shape == (20, 6)
            server.emergency_stop("all of them")
            with pytest.raises(RequestRefused) as refused:
                session.start()
            assert refused.value.status == 409
            session.reset()
            session.delete()
            assert server.sessions() == []

    names = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")

    def drive(stream: Stream) -> None:
        def has_command() -> bool:
            stream.observe(PICTURES, POSE)
            return isinstance(stream.next(0.05), Command)

        wait_until(has_command)

    await asyncio.to_thread(program)


async def test_rooms_are_joined_with_the_same_client(client: AsyncClient) -> None:
    session = await client.create("arm", "policies/act", transport_server_url=client.url)
    assert (await session.status()).rooms.joint_output == "arm-joint-output"
    async with session.robot(client.url, on_command=lambda *_: None) as robot:
        assert robot.is_connected
    await session.delete()


async def test_end_of_the_server_ends_streams(tmp_path: Path) -> None:
    async with started(transport=REAL, state=str(tmp_path), policy_owners=("policies",)) as server:
        client = AsyncClient(server.url)
        session = await client.create("arm", "policies/act")
        stream = await session.stream().__aenter__()
    with pytest.raises(StreamClosed):
        await drain(stream)
    with pytest.raises(ServerUnreachable):
        await session.start()
    await client.close()


async def test_stream_does_not_follow_a_redirect() -> None:
    async def point_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: ws://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(point_away, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RequestRefused) as refused:
            async with open_async_stream(f"ws://127.0.0.1:{port}/", {"authorization": "Bearer rjk_x"}, 5):
                pass
    assert refused.value.status == 307
