"""A robojax server, called from Python: sessions, actions, streams, rooms.

``Client`` is for programs without an event loop, ``AsyncClient`` for those with one. Importing this is quick: neither
JAX nor the server nor WebRTC is imported.
"""

from robojax.client.answers import Action, Chunk, Rooms, SessionStatus
from robojax.client.asynchronous import AsyncClient, AsyncSession
from robojax.client.client import Client, Session
from robojax.client.errors import ClientError, Garbled, Refused, StreamClosed, Unreachable, Unusable
from robojax.client.messages import Command, Message, Pong, Status, Stopped, Welcome, Wrong
from robojax.client.stream import AsyncStream, Stream

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
