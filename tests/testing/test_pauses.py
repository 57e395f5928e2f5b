import signal
import subprocess
import sys
import time

STOPPED = """
import time
from tests.testing.pauses import Pauses
with Pauses() as pauses:
    began = time.monotonic()
    print("ready", flush=True)
    input()
    now = time.monotonic()
    print(pauses.lost(began, now), now - began, pauses.running(began, now))
"""


def test_a_stop_of_the_process_is_noted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)
        told, _ = process.communicate("\n", timeout=60)
    lost, whole, running = map(float, told.split())
    assert 0.2 < lost < whole
    assert running == whole - lost
