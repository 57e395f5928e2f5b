"""Makes a file of each kind that robojax writes: ``python files_of_before.py FOLDER`` in a checkout of its version."""

import asyncio
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from hooks.registry.delivery import Schedule
from hooks.registry.registry import Registry, RegistrySettings
from hooks.registry.sender import SenderSettings

POLICY = "robojax/sim/policy"
TOKEN = "hf_" + "t" * 30
TARGET = 18766  # of the registry's webhooks
TINY = {
    "chunk_size": 4, "n_action_steps": 2, "vision_backbone": "small_cnn", "dim_model": 8, "n_heads": 2,
    "dim_feedforward": 8, "n_encoder_layers": 1, "latent_dim": 4, "n_vae_encoder_layers": 1,
}  # fmt: skip


def robojax(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "robojax.cli", *arguments], check=True, text=True, stdout=subprocess.PIPE, **how
    )


def call(url: str, method: str, path: str, body: object = None, key: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-api-key": key}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{method} {path}: {error.code} {error.read()!r}") from None


def make_state(folder: Path) -> None:
    """A state folder of a server that was killed, with sessions, latches, deployments, an event, and keys."""
    keys = folder / "keys.json"
    told = robojax("token", "new", "--role", "operator", "--name", "ann", "--keys-file", str(keys), "--json")
    key = json.loads(told.stdout)["key"]
    (folder / "key.txt").write_text(key + "\n")
    state, port = folder / "state", "18765"
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "robojax.cli",
        "serve",
        "--port",
        port,
        "--state",
        str(state),
        "--policy-roots",
        POLICY,
    ]
    secret = "a-secret-of-files"
    server = subprocess.Popen(
        [*command, "--keys-file", str(keys)], env={**os.environ, "WEBHOOK_SECRET": secret}, stdout=subprocess.DEVNULL
    )
    while True:
        try:
            call(url, "GET", "/health", key=key)
            break
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or server.poll() is not None:
                raise
            time.sleep(0.2)
    for name, where in (("arm", url), ("latched", "direct"), ("deleted", "direct"), ("direct", "direct")):
        body = {"session_id": name, "policy_path": POLICY, "transport_server_url": where, "camera_names": ["front"]}
        call(url, "POST", "/sessions", {**body, "rate": 25.0}, key)
    for name in ("latched", "deleted"):
        call(url, "POST", f"/sessions/{name}/emergency_stop", {"reason": f"of {name}"}, key)
    call(url, "DELETE", "/sessions/deleted", key=key)
    call(url, "POST", "/sessions/arm/start", key=key)
    (folder / "secret.txt").write_text(secret)
    robojax(
        "webhooks", "send", f"{url}/webhooks/policies", "--repo", "lab/act", "--secret-file", str(folder / "secret.txt")
    )
    time.sleep(2.0)  # figures of loading are written now and then
    server.kill()
    server.wait()


class _Target(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200 if self.path == "/taken" else 500)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


async def make_registry(folder: Path) -> None:
    """A registry with a webhook whose delivery was taken, one whose delivery waits, and one that is disabled."""
    settings = RegistrySettings(
        tokens=(TOKEN,),
        database=folder / "registry.sqlite3",
        allowed_networks=("127.0.0.0/8",),
        sender=SenderSettings(schedule=Schedule(waits=(0.0, 3600.0), jitter=0.0)),
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", TARGET), _Target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registry = Registry(settings)
    async with registry.running():
        for path in ("taken", "refused", "off"):
            body = {"url": f"http://127.0.0.1:{TARGET}/{path}", "watched": [{"type": "user", "name": "lab"}]}
            made = await registry.create_webhook({**body, "domains": ["session"], "secret": f"secret of {path}"})
            if path == "off":
                await registry.disable_webhook(made.id)
        await registry.emit_session("session.started", {"session_id": "arm"})
        await asyncio.sleep(2.0)
    server.shutdown()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    make_state(folder)
    asyncio.run(make_registry(folder))
    robojax("demo", "--episodes", "1", "--headless", "--record", str(folder / "recordings"))
    dataset = folder / "dataset"
    robojax("record-demo", str(dataset), "--episodes", "1")
    robojax(
        "train", "--policy.type=act", f"--dataset.root={dataset}", f"--output_dir={folder / 'run'}", "--steps=4",
        "--save_freq=2", "--batch_size=2", "--image_size=32", "--log_freq=2",
        *(f"--policy.{name}={value}" for name, value in TINY.items()),
        env={**os.environ, "ROBOJAX_FRAME_CACHE": str(folder / "frames")},
    )  # fmt: skip
    shutil.rmtree(folder / "frames", ignore_errors=True)


if __name__ == "__main__":
    main()
