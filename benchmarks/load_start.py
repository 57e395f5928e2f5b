"""L7 of ``benchmarks/load.py``: how long until a server is ready; ``benchmarks/cold_start.py`` says more."""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.cold_start import Times, help_time, server
from benchmarks.load_scene import Row, row
from benchmarks.measured import SHIPPED
from benchmarks.processes import call


def l7(options: argparse.Namespace) -> list[Row]:
    """Start-up; the best of a few, as other work can only make it longer."""
    helps = [help_time() for _ in range(5)]
    with tempfile.TemporaryDirectory() as cache:
        _start(Path(cache))  # compiles what the others find compiled
        starts = [_start(Path(cache)) for _ in range(3)]
    figure = {"help_s": round(min(helps), 2)}
    figure |= {name: round(min(one[name] for one in starts), 2) for name in starts[0]}
    figure["health_before_jax"] = all(one["health_before_jax"] for one in starts)
    return [
        row(
            "L7",
            "--help 0.5 s, listening 2 s, /health before JAX is imported, session ready (compiled before) 3 s",
            figure,
            figure["help_s"] <= 0.5
            and figure["listening_s"] <= 2
            and bool(figure["health_before_jax"])
            and figure["session_ready_s"] <= 3,
        )
    ]


def _start(cache: Path) -> Times:
    with server(cache) as (made, url, times):
        began = time.monotonic()
        body = {"session_id": "first", "policy_path": str(SHIPPED), "transport_server_url": url}
        call(f"{url}/sessions", "POST", body)
        now = time.monotonic()
        return times | {"session_ready_s": now - began, "session_ready_after_start_s": now - made.began}
