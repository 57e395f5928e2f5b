"""Attacks by addresses, in a network namespace: ``unshare -rn python -m tests.hostile.closed_network FOLDER``.

All packets to other machines leave through one end of a veth pair, and the other end records them. The namespace has a
default route, so that a packet to any address is sent and seen. A server with a moving robot and a Hub run on loopback.
The program prints a JSON object: for each attack, the destinations of TCP and UDP packets and the server's response.
"""

import asyncio
import ipaddress
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aioice import mdns, stun
from aiortc import RTCConfiguration, RTCPeerConnection

from tests.faults.fleet import SHIPPED, Fleet, moving_fleet
from tests.faults.processes import server
from tests.hostile.test_hostile_video import offer_of, with_lines
from tests.testing.stub_hub import StubHub
from tests.testing.waiting import until

OWN, GATEWAY = "10.99.0.2", "10.99.0.1"
MAC, OWN_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
NETWORK = f"""
link set lo up
link add v0 type veth peer name v1
link set v0 address {OWN_MAC}
link set v1 address {MAC}
link set v0 up
link set v1 up
addr add {OWN}/32 dev v0
route add {GATEWAY} dev v0
route add default via {GATEWAY}
neigh add {GATEWAY} lladdr {MAC} dev v0 nud permanent
addr add fd99::2/64 dev v0 nodad
route add default via fd99::1
neigh add fd99::1 lladdr {MAC} dev v0 nud permanent
"""
METADATA = "169.254.169.254"
FORBIDDEN = (METADATA, f"::ffff:{METADATA}", "fd00:ec2::254", "100.100.100.200", "255.255.255.255", "0.0.0.0", "::")
FORBIDDEN += ("224.0.0.251", "239.1.2.3", "ff02::1", "metadata.google.internal", "2130706433", "localhost")
ROBOT, OTHER = "10.77.0.9", "10.77.0.8"
RELAY = "203.0.113.9"
MDNS = "224.0.0.251:5353"
PUBLIC = "93.184.215.14"
API, FILE = r"GET /api/models/", r"GET .*/resolve/.*model"


def candidate(host: str, port: int = 50000, more: str = "typ host", priority: int = 2**31 - 1) -> str:
    return f"candidate:1 1 udp {priority} {host} {port} {more}"


# The lowest priority: it is tried after all others.
LAST = candidate(ROBOT, priority=1)
CANDIDATES = [*map(candidate, FORBIDDEN), candidate(OTHER, 53), candidate(ROBOT, 80)]


def with_attributes(values: Sequence[str]) -> Callable[[str], str]:
    """Return a function that adds these attributes to a description and replaces the host in its other lines."""
    lines = "".join(f"a={value}\r\n" for value in values)
    return lambda sdp: sdp.replace("IP4 0.0.0.0", f"IP4 {METADATA}") + lines


class Network:
    """Packets of this network namespace that leave for other machines."""

    def __init__(self) -> None:
        subprocess.run(["ip", "-batch", "-"], input=NETWORK, text=True, check=True)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind(("v1", 0))
        self._socket.setblocking(False)
        self._seen: dict[str, None] = {}

    def read(self) -> list[str]:
        """Return the addresses and ports of TCP and UDP packets since `clear`, ordered by first appearance."""
        while True:
            try:
                frame, address = self._socket.recvfrom(2048)
            except BlockingIOError:
                return list(self._seen)
            kind, packet = struct.unpack("!H", frame[12:14])[0], frame[14:]
            if address[2] == socket.PACKET_OUTGOING:
                continue
            if kind == 0x0800 and packet[9] in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                host, content = packet[16:20], packet[4 * (packet[0] & 15) :]
            elif kind == 0x86DD and packet[6] in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                host, content = packet[24:40], packet[40:]
            else:
                continue
            self._seen[f"{ipaddress.ip_address(host)}:{struct.unpack('!H', content[2:4])[0]}"] = None

    def clear(self) -> None:
        self.read()
        self._seen.clear()

    def forge(self, source: str, port: int, to: int, data: bytes) -> None:
        """Send a UDP packet to this machine with a forged source address."""
        datagram = struct.pack("!HHHH", port, to, 8 + len(data), 0) + data
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(datagram), 0, 0, 64, socket.IPPROTO_UDP, 0)
        head += socket.inet_aton(source) + socket.inet_aton(OWN)
        total = sum(struct.unpack("!10H", head))
        total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        frame = bytes.fromhex((OWN_MAC + MAC).replace(":", "")) + b"\x08\x00"
        self._socket.send(frame + head[:10] + struct.pack("!H", total) + head[12:] + datagram)


class Attacker:
    """A participant of another session's camera room, and a client of the server."""

    def __init__(self, fleet: Fleet, network: Network, hub: StubHub):
        self._fleet, self._network, self._hub = fleet, network, hub
        self.found: dict[str, Any] = {}

    @asynccontextmanager
    async def attack(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Record the packets, and check that STOP and commands are on time during the attack."""
        found = self.found[name] = {}
        self._network.clear()
        began = time.monotonic()
        yield found
        await asyncio.sleep(0.1)
        found["sent"] = self._network.read()
        self._fleet.check_stops(began)
        self._fleet.check_commands(began)

    async def until_sent(self, address: str) -> None:
        await until(lambda: address in self._network.read())
        await asyncio.sleep(0.1)

    async def offer(
        self, name: str, change: Callable[[str], str], trickled: Sequence[str] = (), forged: Sequence[str] = ()
    ) -> None:
        """Join the camera room of a new session as its producer, offer, and send candidates and forged checks."""
        http, url = self._fleet.http, self._fleet.process.url
        body = {"session_id": name, "policy_path": str(SHIPPED), "camera_names": ["front"], "transport_server_url": url}
        session = await self._fleet.call("POST", "/sessions", body)
        path = f"{url}/video/workspaces/{session['workspace_id']}/rooms/{session['camera_room_ids']['front']}"
        browser = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        async with self.attack(name) as found, http.ws_connect(f"{path}/ws") as there:
            await there.send_json({"participant_id": "stranger", "role": "producer"})

            async def find_listener() -> list[str]:
                room = await self._fleet.call("GET", path.removeprefix(url))
                return room["room"]["participants"]["consumers"]

            (listener,) = await until(find_listener)
            plain = await offer_of(browser)
            kept = [line for line in plain.splitlines() if not line.startswith(("a=candidate", "a=end-of"))]
            sdp = change("\r\n".join(kept) + "\r\n")

            async def signal(kind: str, **content: Any) -> int:
                message = {"type": kind, "target_consumer": listener, **content}
                data = {"client_id": "stranger", "message": message}
                async with http.post(f"{path}/webrtc/signal", json=data) as answer:
                    return answer.status

            found["status"] = await signal("offer", sdp=sdp)
            for each in trickled:
                await signal("ice", candidate={"candidate": each, "sdpMLineIndex": 0})
            if found["status"] == 200:
                if forged:
                    await self._forge(browser.localDescription.sdp, await self._answer(there), forged)
                await self.until_sent(f"{OTHER if forged else ROBOT}:50000")
        await browser.close()
        await self._fleet.call("DELETE", f"/sessions/{name}")

    async def _answer(self, there: aiohttp.ClientWebSocketResponse) -> str:
        async with asyncio.timeout(10):
            while (message := await there.receive_json())["type"] != "webrtc_answer":
                pass
        return message["answer"]["sdp"]

    async def _forge(self, offer: str, answer: str, sources: Sequence[str]) -> None:
        """Send checks with the right password that claim to come from other machines."""

        def value(sdp: str, name: str) -> str:
            return next(line.partition(":")[2] for line in sdp.splitlines() if line.startswith(f"a={name}:"))

        port = next(line.split()[5] for line in answer.splitlines() if f" {OWN} " in line)
        for source in sources:
            check = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
            check.attributes["USERNAME"] = f"{value(answer, 'ice-ufrag')}:{value(offer, 'ice-ufrag')}"
            check.attributes["PRIORITY"] = 1
            check.attributes["ICE-CONTROLLING"] = 1
            check.add_message_integrity(value(answer, "ice-pwd").encode())
            self._network.forge(source, 50000, int(port), bytes(check))

    async def redirect(self, name: str, pattern: str, to: str, is_sent_to: str | None = None) -> None:
        """Load a policy from a Hub that redirects; with ``is_sent_to``, end the load when a packet is sent there."""
        failure = self._hub.script(pattern, 302, times=None, more={"Location": to})
        body = {"session_id": name, "policy_path": "someone/arm", "transport_server_url": "direct"}
        async with self.attack(name) as found:
            asked = asyncio.create_task(self._create(body))
            if is_sent_to is None:
                found["status"], found["answer"] = await asked
            else:
                await self.until_sent(is_sent_to)
                asked.cancel()
        failure.times = 0

    async def _create(self, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._fleet.http.post(f"{self._fleet.process.url}/sessions", json=body) as answer:
            return answer.status, await answer.json()


async def run(folder: Path) -> dict[str, Any]:
    network = Network()
    async with AsyncExitStack() as stack:
        hub = stack.enter_context(StubHub())
        trap = stack.enter_context(StubHub())
        hub.push("someone/arm", {path.name: path.read_bytes() for path in SHIPPED.iterdir() if path.is_file()})
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "HF_HUB_CACHE": str(folder / "hub")}
        running = stack.enter_context(server(folder / "server", "--frozen", "warn", scripted=False, env=env))
        fleet = await stack.enter_async_context(moving_fleet(running, 1))
        attacker = Attacker(fleet, network, hub)

        responder = await mdns.create_mdns_protocol()
        stack.push_async_callback(responder.close)
        for name, host in (("metadata.local", METADATA), ("robot.local", ROBOT)):
            await responder.publish(name, host)
        named = [candidate("metadata.local"), candidate("nobody.local"), candidate("metadata.google.internal")]
        named.append(candidate("robot.local"))
        relays = [candidate(OTHER, more=f"typ {kind} raddr {RELAY} rport 3478") for kind in ("srflx", "relay")]
        servers = [f"ice-server:turn:{RELAY}:3478", f"rtcp:3478 IN IP4 {RELAY}"]
        await attacker.offer("described", with_attributes([*CANDIDATES, LAST]))
        await attacker.offer("trickled", with_attributes([]), trickled=[*CANDIDATES, LAST])
        await attacker.offer("forged", with_attributes([LAST]), forged=[METADATA, "100.100.100.200", OTHER])
        await attacker.offer("named", with_attributes(named[:2]), trickled=named[2:])
        await attacker.offer("relayed", with_attributes([*servers, *relays, LAST]))
        await attacker.offer("many", with_attributes([LAST, *(candidate(f"10.78.0.{n}") for n in range(1, 101))]))
        await attacker.offer("huge", lambda sdp: with_lines(sdp, f"a={CANDIDATES[0]}", 20_000))
        async with attacker.attack("chosen servers") as found:
            chosen = {"ice_servers": [f"turn:{RELAY}:3478"], "transport_server_url": running.url}
            body = {"session_id": "chosen", "policy_path": str(SHIPPED), **chosen}
            found["status"], found["answer"] = await attacker._create(body)
        for name, pattern, to in (
            ("listing-metadata", API, f"http://{METADATA}/latest"),
            ("metadata", FILE, f"http://{METADATA}/latest"),
            ("mapped-metadata", FILE, f"http://[::ffff:{METADATA}]/"),
            ("number-metadata", FILE, "http://2852039166/"),
            ("private", FILE, "http://10.0.0.1/"),
            ("loopback", FILE, f"http://localhost:{trap.url.rpartition(':')[2]}/"),
        ):
            await attacker.redirect(name, pattern, to)
        await attacker.redirect("public", FILE, f"http://{PUBLIC}/", is_sent_to=f"{PUBLIC}:80")
        assert not trap.requests
    return attacker.found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run(Path(sys.argv[1])))))
