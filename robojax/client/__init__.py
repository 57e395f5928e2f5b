"""Python client of a robojax server: sessions, actions, streams and rooms.

``Client`` is for programs without an event loop, ``AsyncClient`` for programs with one. This import is quick, because
it does not import JAX, the server or WebRTC.
"""

from robojax.client.answers import Action, Chunk, Rooms, SessionStatus
from robojax.client.client import AsyncClient, AsyncSession, Client, Session
from robojax.client.errors import ClientError, Garbled, Refused, StreamClosed, Unreachable, Unusable
from robojax.client.stream import AsyncStream, Command, Message, Pong, Status, Stopped, Stream, Welcome, Wrong

__all__ = [
    "Action",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Chunk",
    "Client",
    "ClientError",
    "Command",
    "Garbled",
    "Message",
    "Pong",
    "Refused",
    "Rooms",
    "Session",
    "SessionStatus",
    "Status",
    "Stopped",
    "Stream",
    "StreamClosed",
    "Unreachable",
    "Unusable",
    "Welcome",
    "Wrong",
]
