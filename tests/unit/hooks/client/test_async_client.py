"""The client on an event loop: the same operations, and a loop that a hanging Hub does not hold."""

import asyncio
import subprocess
import sys
import time

import pytest

from hooks import AsyncWebhooksClient, HubSilent


async def test_a_hanging_hub_holds_no_loop_and_ends_in_time(stub, pauses):
    stub.script("GET", "hang", None)
    client = AsyncWebhooksClient(stub.url, "hf_token", timeout=0.4)
    calls = [asyncio.create_task(client.list_webhooks()) for _ in range(40)]
    longest, last = 0.0, time.monotonic()
    while not all(call.done() for call in calls):
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, pauses.running(last, now)), now
    assert longest < 0.3
    for call in calls:
        with pytest.raises(HubSilent):
            await call


def test_a_program_ends_although_the_hub_still_hangs(stub):
    stub.script("GET", "hang", None)
    program = f"""
import asyncio
from hooks import AsyncWebhooksClient
async def main():
    try:
        await asyncio.wait_for(AsyncWebhooksClient({stub.url!r}, "hf_token", timeout=60).list_webhooks(), 0.3)
    except TimeoutError:
        print("left")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == "left\n"
