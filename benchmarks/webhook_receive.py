"""How long do senders and bystanders wait while webhook handlers are slow, compared with huggingface_hub's server?

    python -m benchmarks.webhook_receive                                 # ours alone
    python -m benchmarks.webhook_receive --peer-python VENV/bin/python   # one with huggingface_hub, gradio, fastapi

Each server is a process of its own with a secret, the same three handlers and its default settings; ours writes its
events to a file. A round sends three deliveries to a sync handler of two seconds and, at the same time on a fixed
schedule (one of each every 20 ms for a second, whether those before were answered or not): an unrelated GET, and a
delivery to a quick handler, whose answer is its acknowledgement. The same schedule without the slow ones is the idle
case. The peer and ours take turns. Target: the unrelated request waits less than 50 ms.

Last, in ms (p50 / p99), 2 cores, Python 3.11, against huggingface_hub 2.4.0 with gradio 6.31:

                                     ours            huggingface_hub
    unrelated, idle                  1.1 / 2.2       2.7 / 4.1
    unrelated, with slow handlers    1.1 / 2.4       5475 / 5968
    acknowledged, idle               3.2 / 5.2       1.8 / 2.9       (ours is on the disk by then, thrice)
    acknowledged, with slow handlers 3.2 / 4.8       5446 / 5916
    slow handlers, reply mode        2007 / 2007     4004 / 6013
    slow handlers, queue mode        2.0 / 3.5       none
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp

from benchmarks.measured import RESULTS, machine, percentiles, write
from benchmarks.processes import peer_versions

SECRET = "a-secret-of-the-benchmark"
SLOW = 2.0  # seconds
TARGET_MS = 50.0
COUNT = itertools.count()

HANDLERS = """
import sys, time

def slow(payload: WebhookPayload) -> str:
    time.sleep(float(sys.argv[2]))
    return payload.repo.name

def quick(payload: WebhookPayload) -> str:
    return payload.repo.name
"""
OURS = (
    """
import asyncio, socket
from pathlib import Path
from sanic import Sanic, text
from hooks.payload import WebhookPayload
from hooks.receiver.receiver import Receiver
from hooks.receiver.endpoint import ReceiverSettings
"""
    + HANDLERS
    + """
def queued(payload: WebhookPayload) -> str:
    return slow(payload)

async def main():
    app = Sanic("benchmark", configure_logging=False)
    app.config.update(TOUCHUP=False, MOTD=False, AUTO_EXTEND=False)
    receiver = Receiver(ReceiverSettings(secrets=(sys.argv[3],), database=Path(sys.argv[4])))
    receiver.add(slow)
    receiver.add(quick)
    receiver.add(queued, mode="queue")
    app.blueprint(receiver.blueprint())
    app.add_route(lambda request: text("well"), "/unrelated", name="unrelated")
    server = await app.create_server(
        sock=socket.create_server(("127.0.0.1", int(sys.argv[1]))), return_asyncio_server=True, access_log=False
    )
    await server.startup()
    await server.before_start()
    await server.after_start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
)
PEER = (
    """
from huggingface_hub import WebhookPayload, WebhooksServer
"""
    + HANDLERS
    + """
server = WebhooksServer(webhook_secret=sys.argv[3])
server.add_webhook("/slow")(slow)
server.add_webhook("/quick")(quick)
server.launch(prevent_thread_lock=True, share=False, server_port=int(sys.argv[1]))
server.fastapi_app.add_api_route("/unrelated", lambda: "well")
time.sleep(3600)
"""
)


@contextmanager
def serving(python: str, program: str, folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_EXPERIMENTAL_WARNING": "1"}
    arguments = [python, "-c", program, str(port), str(SLOW), SECRET, str(folder / f"events-{port}.sqlite3")]
    with open(folder / f"{port}.log", "wb") as log:
        process = subprocess.Popen(arguments, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def logs_of(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))


def payload() -> dict[str, object]:
    number = next(COUNT)
    return {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {
            "id": f"repo-{number}",
            "owner": {"id": "owner"},
            "name": f"robots/{number}",
            "type": "model",
            "private": False,
            "url": {"web": "https://hub.example", "api": "https://hub.example/api"},
        },
        "webhook": {"id": "webhook", "version": 3},
    }


async def deliver(session: aiohttp.ClientSession, url: str) -> float:
    """Return the seconds until a delivery is acknowledged."""
    body = payload()
    headers = {"x-webhook-secret": SECRET, "webhook-id": f"delivery-{next(COUNT)}"}
    began = time.perf_counter()
    async with session.post(url, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status in (200, 202), f"{answer.status}: {text}"
    return time.perf_counter() - began


async def look(session: aiohttp.ClientSession, url: str) -> float:
    """Return the seconds of an unrelated GET."""
    began = time.perf_counter()
    async with session.get(f"{url}/unrelated") as answer:
        await answer.read()
        assert answer.status == 200, f"{url}/unrelated is {answer.status}"
    return time.perf_counter() - began


async def ready(session: aiohttp.ClientSession, url: str, within: float = 60.0) -> None:
    async with asyncio.timeout(within):
        while True:
            try:
                await look(session, url)
                await deliver(session, f"{url}/webhooks/quick")
            except (aiohttp.ClientError, AssertionError):
                await asyncio.sleep(0.1)
            else:
                return


async def beside(session: aiohttp.ClientSession, url: str, waits: dict[str, list[float]]) -> None:
    """Send one delivery of each kind every 20 ms for a second."""
    began = time.perf_counter()
    asked: dict[str, list[asyncio.Task[float]]] = {"unrelated": [], "acknowledged": []}
    for number in range(50):
        await asyncio.sleep(max(0.0, began + 0.02 * number - time.perf_counter()))
        asked["unrelated"].append(asyncio.create_task(look(session, url)))
        asked["acknowledged"].append(asyncio.create_task(deliver(session, f"{url}/webhooks/quick")))
    for name, tasks in asked.items():
        waits.setdefault(name, []).extend(await asyncio.gather(*tasks))


async def measure(session: aiohttp.ClientSession, url: str, found: dict[str, dict[str, list[float]]]) -> None:
    await beside(session, url, found.setdefault("idle", {}))
    slow = [asyncio.create_task(deliver(session, f"{url}/webhooks/slow")) for _ in range(3)]
    await asyncio.sleep(0.1)
    waits = found.setdefault("while_3_slow_handlers_run", {})
    await beside(session, url, waits)
    waits.setdefault("slow_ones", []).extend(await asyncio.gather(*slow))


async def measure_queued(session: aiohttp.ClientSession, url: str, found: dict[str, dict[str, list[float]]]) -> None:
    waits = found.setdefault("slow_handlers_in_queue_mode", {}).setdefault("acknowledged", [])
    waits.extend([await deliver(session, f"{url}/webhooks/queued") for _ in range(8)])
    await asyncio.sleep(SLOW + 0.5)


async def run(rounds: int, peer_python: str | None) -> dict[str, object]:
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        urls = {"ours": held.enter_context(serving(sys.executable, OURS, folder))}
        if peer_python is not None:
            urls["huggingface_hub"] = held.enter_context(serving(peer_python, PEER, folder))
        # No limit of connections: a sender must not wait for the answer of another sender.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            try:
                for url in urls.values():
                    await ready(session, url)
            except TimeoutError:
                sys.exit(f"a server did not start: {logs_of(folder)}")
            for _ in range(rounds):
                for name, url in urls.items():
                    await measure(session, url, found.setdefault(name, {}))
            await measure_queued(session, urls["ours"], found["ours"])
    return {
        side: {
            case: {name: percentiles(values, (50, 99)) for name, values in waits.items()}
            for case, waits in cases.items()
        }
        for side, cases in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", help="a Python that has huggingface_hub, gradio and fastapi")
    parser.add_argument("--output", type=Path, default=RESULTS / "webhook_receive.json")
    arguments = parser.parse_args()
    waits = asyncio.run(run(arguments.rounds, arguments.peer_python))
    unrelated = waits["ours"]["while_3_slow_handlers_run"]["unrelated"]  # type: ignore[index]
    result = {
        "question": "milliseconds that senders and bystanders wait while webhook handlers are slow",
        "rounds": arguments.rounds,
        "slow_handler_s": SLOW,
        "machine": machine(),
        "peer": peer_versions(arguments.peer_python, "huggingface_hub", "gradio", "fastapi"),
        "waits_ms": waits,
        "target_ms": TARGET_MS,
        "is_met": unrelated["p99"] < TARGET_MS,
    }
    write(arguments.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
