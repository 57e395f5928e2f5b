"""Python client of a robojax server: sessions, actions, streams and rooms.

``Client`` is for programs without an event loop, ``AsyncClient`` for programs with one. This import is quick, because
it does not import JAX, the server or WebRTC.
"""

from robojax.client.answers import Action, Chunk, SessionRooms, SessionStatus
from robojax.client.client import AsyncClient, AsyncSession, Client, Session
from robojax.client.errors import RobojaxError, ProtocolError, RequestRefused, StreamClosed, ServerUnreachable, InvalidArgument
from robojax.client.stream import AsyncStream, Command, Message, Pong, StatusMessage, StopMessage, Stream, Welcome, MessageRefused

__all__ = [
    "Action",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Chunk",
    "Client",
    "RobojaxError",
    "Command",
    "ProtocolError",
    "Message",
    "Pong",
    "RequestRefused",
    "SessionRooms",
    "Session",
    "SessionStatus",
    "StatusMessage",
    "StopMessage",
    "Stream",
    "StreamClosed",
    "ServerUnreachable",
    "InvalidArgument",
    "Welcome",
    "MessageRefused",
]
