"""L7 of ``benchmarks/load.py``: how long until a server is ready; ``benchmarks/cold_start.py`` says more."""

import argparse
import subprocess
import sys
import time
from typing import Any

from benchmarks.load_scene import Row, row
from benchmarks.measured import ROOT, SHIPPED
from benchmarks.processes import Refused, call, child


def l7(options: argparse.Namespace) -> list[Row]:
    """Start-up."""
    helps = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "service.cli", "--help"], capture_output=True, check=True, cwd=ROOT)
        helps.append(time.monotonic() - began)
    starts = [_start() for _ in range(3)]
    best = {name: round(min(one[name] for one in starts), 2) for name in starts[0] if name != "health_first"}
    figure = {
        "help_s": round(min(helps), 2),
        **best,
        "health_before_jax": all(one["health_first"] for one in starts),
    }
    return [
        row(
            "L7",
            "--help 0.5 s, listening 2 s, /health before JAX is imported, session ready (compiled before) 3 s",
            figure,
            figure["help_s"] <= 0.5
            and figure["listening_s"] <= 2
            and figure["health_before_jax"]
            and figure["session_ready_s"] <= 3,
        )
    ]


def _start() -> dict[str, Any]:
    with child("-m", "service.cli", "serve", "--port", "0", "--state", "off") as server:
        url = next(word for word in server.line().split() if word.startswith("http"))
        listening = time.monotonic() - server.began
        call(f"{url}/health")
        health = time.monotonic() - server.began
        health_first = not _is_ready(url)
        while not _is_ready(url):
            time.sleep(0.05)
        imported = time.monotonic() - server.began
        began = time.monotonic()
        body = {"session_id": "first", "policy_path": str(SHIPPED), "transport_server_url": url}
        call(f"{url}/sessions", "POST", body)
        return {
            "listening_s": listening,
            "health_s": health,
            "health_first": health_first,
            "jax_imported_s": imported,
            "session_ready_s": time.monotonic() - began,
            "session_ready_after_start_s": time.monotonic() - server.began,
        }


def _is_ready(url: str) -> bool:
    try:
        return bool(call(f"{url}/ready")["ready"])
    except Refused:
        return False
