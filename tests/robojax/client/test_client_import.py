"""What importing the client costs."""

import subprocess
import sys

PROGRAM = """
import sys, time
began = time.process_time()
import robojax.client
print(time.process_time() - began)
print(*(name for name in ("jax", "sanic", "aiortc", "av", "pydantic", "service", "numpy") if name in sys.modules))
"""


def test_the_client_is_imported_at_once_and_without_the_server() -> None:
    def look() -> tuple[float, str]:
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        seconds, _, modules = done.stdout.partition("\n")
        return float(seconds), modules.strip()

    looks = [look() for _ in range(5)]
    assert {modules for _, modules in looks} == {""}
    # Seconds of processor time, the fewest: what else a busy machine does costs some of it, too.
    assert min(seconds for seconds, _ in looks) < 0.15


def test_what_is_exported_is_there_and_sorted() -> None:
    import robojax.client

    assert sorted(robojax.client.__all__) == robojax.client.__all__
    assert all(hasattr(robojax.client, name) for name in robojax.client.__all__)
