"""Write a file of each kind that robojax writes: ``python files_of_before.py FOLDER`` in a checkout of the version."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

POLICY = "robojax/sim/policy"
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
    """Make the state folder of a killed server with sessions, latches, deployments, an event and keys."""
    keys = folder / "keys.json"
    process = robojax("token", "new", "--role", "operator", "--name", "ann", "--keys-file", str(keys), "--json")
    key = json.loads(process.stdout)["key"]
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
    for name, rooms_url in (("arm", url), ("latched", "direct"), ("deleted", "direct"), ("direct", "direct")):
        body = {"session_id": name, "policy_path": POLICY, "transport_server_url": rooms_url, "camera_names": ["front"]}
        call(url, "POST", "/sessions", {**body, "rate": 25.0}, key)
    for name in ("latched", "deleted"):
        call(url, "POST", f"/sessions/{name}/emergency_stop", {"reason": f"of {name}"}, key)
    call(url, "DELETE", "/sessions/deleted", key=key)
    call(url, "POST", "/sessions/arm/start", key=key)
    (folder / "secret.txt").write_text(secret)
    robojax(
        "webhooks", "send", f"{url}/webhooks/policies", "--repo", "lab/act", "--secret-file", str(folder / "secret.txt")
    )
    time.sleep(2.0)  # The server writes load durations periodically.
    server.kill()
    server.wait()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    make_state(folder)
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
