"""``python -m tests.testing.stub_hub [--port N] [--token T] [--no-secrets]``: a stub Hub until it is interrupted.

Prints its address. ``POST /_stub/push`` with ``{"repo": "a/b", "files": {"config.json": "{}"}}`` (bytes as
``{"base64": "..."}``) makes a commit and delivers it; ``/_stub/plan``, ``script`` and ``emit`` take the arguments of
`StubHub`'s methods, and ``/_stub/log`` and ``requests`` show what happened.
"""

import argparse
import signal
import sys
import threading

from tests.testing.stub_hub.hub import StubHub


def main() -> None:
    """Serve until a signal."""
    wanted = argparse.ArgumentParser(
        prog="python -m tests.testing.stub_hub", description="A small Hub on this machine."
    )
    wanted.add_argument("--port", type=int, default=0)
    wanted.add_argument("--token")
    wanted.add_argument("--no-secrets", action="store_true", help="show webhooks without their secrets")
    given = wanted.parse_args()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with StubHub(token=given.token, echoes_secrets=not given.no_secrets, port=given.port) as hub:
        sys.stdout.write(hub.url + "\n")
        sys.stdout.flush()
        ended.wait()


main()
