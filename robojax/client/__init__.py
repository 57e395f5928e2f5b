"""Python client of a robojax server: sessions, actions, streams and rooms.

``Client`` is for programs without an event loop, ``AsyncClient`` for programs with one. This import is quick, because
it does not import JAX, the server or WebRTC.
"""

from robojax.client.answers import Action, Chunk, SessionRooms, SessionStatus
from robojax.client.client import AsyncClient, AsyncSession, Client, Session
from robojax.client.errors import (
    InvalidArgument,
    ProtocolError,
    RequestRefused,
    RobojaxError,
    ServerUnreachable,
    StreamClosed,
)
from robojax.client.stream import (
    AsyncStream,
    Command,
    Message,
    MessageRefused,
    Pong,
    StatusMessage,
    StopMessage,
    Stream,
    Welcome,
)

__all__ = [
    "Action",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Chunk",
    "Client",
    "Command",
    "InvalidArgument",
    "Message",
    "MessageRefused",
    "Pong",
    "ProtocolError",
    "RequestRefused",
    "RobojaxError",
    "ServerUnreachable",
    "Session",
    "SessionRooms",
    "SessionStatus",
    "StatusMessage",
    "StopMessage",
    "Stream",
    "StreamClosed",
    "Welcome",
]
