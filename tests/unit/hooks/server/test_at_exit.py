"""Scripts as processes: the server that starts at their end."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hooks.payload import sample
from tests.unit.hooks.server.conftest import ask, end

# The documented example, without other imports.
PLAIN = """
from hooks import WebhookPayload, webhook_endpoint

@webhook_endpoint
async def trigger_training(payload: WebhookPayload):
    return {"sha": payload.repo.headSha}
"""
POOLS = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
from hooks import webhook_endpoint

@webhook_endpoint
async def loop():
    with ThreadPoolExecutor(1) as pool:
        found = [pool.submit(lambda: "pool").result(), await asyncio.to_thread(lambda: "thread")]
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)
    echo = await asyncio.create_subprocess_exec("echo", "process", stdout=asyncio.subprocess.PIPE)
    return [*found, (await echo.communicate())[0].decode().strip()]
"""


def run(tmp_path: Path, environment: dict[str, str], text: str, *flags: str, **more: str) -> tuple[int, str, str]:
    """Run a script that ends by itself; return its exit code, output and errors."""
    (tmp_path / "app.py").write_text(text)
    process = subprocess.run(
        [sys.executable, *flags, "app.py"],
        cwd=tmp_path,
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_script_serves_at_its_end_and_a_signal_ends_it_with_0(script, number):
    with script(PLAIN) as (process, url):
        payload = sample(sha="c0ffee")
        assert ask(f"{url}/webhooks/trigger_training", payload).json() == {"sha": "c0ffee"}
        code, errors = end(process, number)
        assert (code, "Traceback" in errors) == (0, False)


COUNTING = """
from pathlib import Path
from hooks import Event, WebhookPayload, webhook_endpoint

@webhook_endpoint
def count(payload: WebhookPayload, event: Event):
    with Path("runs").open("a") as file:
        file.write(f"{event.delivery_id}\\n")
"""


def test_duplicates_are_detected_after_a_kill_by_default(script, tmp_path):
    for _ in range(2):
        with script(COUNTING) as (process, url):
            for _ in range(3):
                assert ask(f"{url}/webhooks/count", sample(), Webhook_Id="the-same").status_code == 200
            process.kill()
    assert (tmp_path / "runs").read_text().split() == ["the-same"]
    assert [path.name[:4] for path in (tmp_path / "state" / "robojax" / "webhooks").glob("*.sqlite3")] == ["app-"]


def test_handlers_can_use_pools_at_the_end_of_a_script(script):
    with script(POOLS) as (process, url):
        assert ask(f"{url}/webhooks/loop", {}).json() == ["pool", "thread", "process"]
        assert end(process)[0] == 0


PORT_ERROR = "wanted a number from 0 to 65535 (0: any free port)"


@pytest.mark.parametrize(
    ("more", "switches", "code", "error"),
    [
        ("", {"ROBOJAX_WEBHOOKS_AT_EXIT": "0"}, 0, ""),
        ("", {"GRADIO_SERVER_PORT": "80000"}, 1, f"webhooks: port 80000: {PORT_ERROR}"),
        ("raise KeyError('mine')\n", {}, 1, "KeyError: 'mine'"),
    ],
    ids=["disabled", "invalid port", "crashed script"],
)
def test_no_server_starts_and_the_script_keeps_its_exit_code(tmp_path, environment, more, switches, code, error):
    found, output, errors = run(tmp_path, environment, PLAIN + more, **switches)
    assert (found, output, errors.strip().splitlines()[-1:]) == (code, "", [error] if error else [])
    assert errors.count("Traceback") == (1 if more else 0)


def test_no_second_server_starts_after_an_explicit_launch(tmp_path, environment):
    text = PLAIN + "trigger_training.launch(prevent_thread_lock=True)\n"
    code, output, errors = run(tmp_path, environment, text)
    assert (code, "Traceback" in errors) == (0, False)
    assert output.count("Running on local URL") == 1


def test_no_server_starts_in_a_child_process_of_the_script(tmp_path, environment):
    text = PLAIN + (
        "if __name__ == '__main__':\n"
        "    import multiprocessing, os\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print, args=('child',))\n"
        "    child.start(); child.join(); print(child.exitcode)\n"
        "    trigger_training.launch(prevent_thread_lock=True)\n"
    )
    code, output, _ = run(tmp_path, environment, text)
    assert code == 0
    assert output.splitlines()[:2] == ["child", "0"]


STUCK = """
import threading
from hooks import webhook_endpoint

@webhook_endpoint
def stuck():
    print("in it", flush=True)
    threading.Event().wait()
"""


def test_a_hanging_handler_does_not_delay_the_end_of_the_server(script):
    with script(STUCK) as (process, url):
        threading.Thread(target=ask, args=(f"{url}/webhooks/stuck", {}), daemon=True).start()
        assert process.stdout is not None
        assert process.stdout.readline() == "in it\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
