"""``python -m tests.hostile.flood KIND HOST PORT PATH COUNT SECONDS``: sockets that send as fast as they can.

The process lowers its priority, so that it competes for the server's event loop and not for its cores. It discards
what it receives, ends by itself, and prints its counts as a JSON object.
"""

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time

UPGRADE = (
    "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, PING = 0x1, 0x9
TURN = 8192  # Bytes that each socket sends before the next socket's turn.
NICE = 10
# Kinds of frames that each socket repeats. A heartbeat gets a response; joints are relayed to all consumers.
JOINTS = json.dumps({"type": "joint_update", "data": [{"name": "Jaw", "value": 1.0}]}).encode()


def frame(opcode: int, data: bytes = b"", is_final: bool = True) -> bytes:
    """Return a frame of a client, with a mask of zeros."""
    head = bytes([0x80 * is_final | opcode])
    head += bytes([0x80 | len(data)]) if len(data) < 126 else struct.pack(">BH", 0x80 | 126, len(data))
    return head + bytes(4) + data


FRAMES = {
    "pings": frame(PING),
    "heartbeats": frame(TEXT, b'{"type":"heartbeat"}'),
    "joints": frame(TEXT, JOINTS),
    "fragments": frame(TEXT, b"", False) + frame(0, b" ", False) * 500 + frame(0, b"", True),
    "stream pings": frame(TEXT, b'{"kind":"ping","number":1}'),
}
# Kinds of requests: the bytes, the number of concurrent requests, and whether the next one waits for a response.
REQUESTS = {
    "health": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "recordings": b"GET /recordings HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "stops": b"POST /sessions/direct/emergency_stop HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n",
}
CHUNKED = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 100_000
HEALTH = REQUESTS["health"]
BATCHES = REQUESTS | {"calls": HEALTH, "pipelined": HEALTH * 100, "chunks": CHUNKED, "connects": b"G"}
# Floods of sixty sockets by name: the kind and the path; ``{n}`` is the number of the socket.
ROOM = "/robotics/workspaces/w/rooms/r{n}/ws"
FLOODS = {
    "pings": ("pings", ROOM),
    "heartbeats": ("heartbeats", ROOM),
    "parts of a message": ("fragments", ROOM),
    "joints to sixty who listen": ("joints", "/robotics/workspaces/w/rooms/r0/ws"),
    "pings to a stream": ("pings", "/sessions/direct/stream"),
    "messages to a stream": ("stream pings", "/sessions/direct/stream"),
    "requests": ("health", "/"),
    "stops": ("stops", "/"),
    "requests at once": ("pipelined", "/"),
    "chunks of a byte": ("chunks", "/"),
    "connections": ("connects", "/"),
    "connections with a request": ("calls", "/"),
    "connections with an upgrade": ("handshakes", "/robotics/workspaces/w/rooms/r0/ws"),
}


class Client:
    def __init__(self, kind: str, address: tuple[str, int], path: str, number: int):
        self.kind, self.address, self.path, self.number = kind, address, path, number
        self.sent = self.opened = 0
        self.rest = b""
        self.raw: socket.socket | None = None

    def open(self) -> bool:
        try:
            raw = socket.create_connection(self.address, timeout=5)
            self.opened += 1
            if self.kind in FRAMES:
                raw.sendall(UPGRADE.format(path=self.path).encode())
                got = raw.recv(4096)
                if b" 101 " not in got:
                    raw.close()
                    return False
                role = "producer" if self.kind == "joints" else "consumer"
                if "/rooms/" in self.path:
                    join = json.dumps({"participant_id": f"f{self.number}-{self.opened}", "role": role})
                    raw.sendall(frame(TEXT, join.encode()))
            raw.setblocking(False)
        except OSError:
            return False
        self.raw, self.rest = raw, b""
        self.waits = False
        return True

    def turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(4):
                got = self.raw.recv(1 << 16)
                if not got:
                    raise ConnectionResetError
                self.waits = False
                if len(got) < 1 << 16:
                    break
        if self.kind in REQUESTS and self.waits:
            return
        if not self.rest:
            self.rest = self.batch()
            self.waits = self.kind in REQUESTS
        with contextlib.suppress(BlockingIOError):
            count = self.raw.send(self.rest)
            self.sent += count
            self.rest = self.rest[count:]

    def batch(self) -> bytes:
        if self.kind in FRAMES:
            one = FRAMES[self.kind]
            return one * max(TURN // len(one), 1)
        if self.kind == "handshakes":
            return UPGRADE.format(path=self.path).encode()
        return BATCHES[self.kind]

    def close(self, is_reset: bool = False) -> None:
        if self.raw is None:
            return
        if is_reset:
            with contextlib.suppress(OSError):
                self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.raw.close()
        self.raw = None


def flood(kind: str, address: tuple[str, int], path: str, count: int, seconds: float) -> dict[str, str | float]:
    """Send frames; with the suffix `` reset`` in ``kind``, each socket is reset repeatedly in the middle of a frame."""
    is_resetting = kind.endswith(" reset")
    kind = kind.removesuffix(" reset")
    clients = [Client(kind, address, path.replace("{n}", str(number)), number) for number in range(count)]
    until = time.monotonic() + seconds
    is_short = is_resetting or kind in ("connects", "handshakes", "calls")
    turns = 0
    while time.monotonic() < until:
        turns += 1
        for client in clients:
            if client.raw is None and not client.open():
                continue
            try:
                client.turn()
            except OSError:
                client.close()
            if is_short and (turns + client.number) % 3 == 0:
                client.close(is_reset=True)
        if kind in REQUESTS:
            _wait(clients)
    opened = sum(client.opened for client in clients)
    sent = sum(client.sent for client in clients)
    for client in clients:
        client.close(is_resetting)
    return {"kind": kind, "sockets": count, "opened": opened, "bytes": sent, "seconds": seconds}


def _wait(clients: list[Client]) -> None:
    with selectors.DefaultSelector() as selector:
        for client in clients:
            if client.raw is not None:
                selector.register(client.raw, selectors.EVENT_READ)
        if selector.get_map():
            selector.select(0.05)


if __name__ == "__main__":
    os.nice(NICE)
    kind, host, port, path, count, seconds = sys.argv[1:]
    sys.stdout.write(json.dumps(flood(kind, (host, int(port)), path, int(count), float(seconds))) + "\n")
