"""Checks of this machine, each finding with its fix."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import jaxmodels
from service.auth.config import AccessSettings, keys_path
from service.auth.guard import create_guard
from service.http.config import ServerSettings
from service.http.origins import is_loopback
from service.http.server import CannotListen, listen
from service.inference.config import PolicySettings
from service.recording.recorder import RecordingSettings
from service.reloading_file import FileUnusable
from service.setting_types import SettingsError
from service.settings import Settings
from service.state import state_folder

Level = Literal["ok", "warn", "fail"]

_PACKAGES = ("jax", "flax", "sanic", "aiortc", "av", "huggingface_hub")
_PROBE_SECONDS = 90.0
_ANSWER_SECONDS, _MAX_ANSWER = 3.0, 1 << 20
_ROBOT_MODULES = ("scservo_sdk", "serial", "cv2", "yaml")
_DEVICE_FOLDER = Path("/dev")
_GIGABYTE = 1e9
_DEVICES = """
import json, jax
print(json.dumps([f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]))
"""
_RENDER = """
import mujoco
mujoco.GLContext(8, 8).make_current()
"""


@dataclass(frozen=True)
class Finding:
    """Result of one check; ``fix`` says what to do and is empty when there is nothing to do."""

    name: str
    level: Level
    found: str
    fix: str = ""


def diagnose(settings: Settings) -> list[Finding]:
    """Run all checks of this machine, in the order in which problems should be solved."""
    server, state = settings.server, settings.webhooks.state
    return [
        _python(),
        _packages(),
        _devices(),
        _rendering(),
        _codecs(),
        _port(server),
        _keys(settings.access, server, state),
        _state(state),
        _recording(settings.recording, state),
        _robot_packages(),
        _serial_ports(),
        _compile_cache(settings.policies),
        _hub_cache(settings.policies),
    ]


def _python() -> Finding:
    found = f"{sys.version.split()[0]}, {os.cpu_count()} cores"
    if (os.cpu_count() or 1) < 2:
        return Finding("Python", "warn", found, "one core is shared by control and inference; use a machine with two")
    return Finding("Python", "ok", found)


def _packages() -> Finding:
    found, missing = [], []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", "pip install robojax")
    return Finding("packages", "ok", ", ".join(found))


def _devices() -> Finding:
    # A new process runs this, because a broken driver can crash it.
    error, output = _run(_DEVICES, {})
    if error is not None:
        return Finding("JAX devices", "fail", error, "pip install --force-reinstall jax; on a GPU the extra cuda")
    devices: list[str] = json.loads(output.splitlines()[-1])
    found = ", ".join(devices)
    has_only_cpu = all(device.startswith("cpu") for device in devices)
    if has_only_cpu and (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
        return Finding("JAX devices", "warn", found, "there is an NVIDIA GPU; pip install -e '.[cuda]' to use it")
    return Finding("JAX devices", "ok", found)


def _rendering() -> Finding:
    name = "rendering (for the demo)"
    try:
        found = f"MuJoCo {version('mujoco')}"
    except PackageNotFoundError:
        return Finding(name, "warn", "MuJoCo is not installed", "only the demo needs it: pip install -e '.[sim]'")
    errors = {backend: _run(_RENDER, {"MUJOCO_GL": backend})[0] for backend in ("egl", "osmesa")}
    works = [backend for backend, error in errors.items() if error is None]
    if works:
        return Finding(name, "ok", f"{found} with {works[0]}")
    fix = "only the demo needs it: apt-get install libegl1 libgles2 libgl1-mesa-dri"
    return Finding(name, "warn", f"{found}, but neither EGL nor OSMesa: {errors['egl']}", fix)


def _codecs() -> Finding:
    try:
        from av.codec import Codec
        from av.codec.codec import UnknownCodecError
    except ImportError as error:
        return Finding("video codecs", "fail", str(error), "pip install --force-reinstall av")

    def has(name: str, mode: Literal["r", "w"]) -> bool:
        try:
            Codec(name, mode)
        except UnknownCodecError:
            return False
        return True

    codecs = {"VP8": ("vp8", "libvpx"), "H264": ("h264", "libx264")}
    missing = {name for name, (decode, encode) in codecs.items() if not (has(decode, "r") and has(encode, "w"))}
    found = ", ".join(name if name not in missing else f"no {name}" for name in codecs)
    fix = "pip install --force-reinstall av (its wheels carry both)"
    level = "fail" if "VP8" in missing else "warn" if missing else "ok"
    return Finding("video codecs", level, found, fix if missing else "")


def _port(server: ServerSettings) -> Finding:
    try:
        listen(server.host, server.port).close()
    except CannotListen as error:
        if (running := _describe_running_server(server)) is not None:
            return Finding("port", "ok", running)
        fix = "end the program that listens there, or use another port: robojax serve --port 0"
        return Finding("port", "fail", str(error), fix)
    else:
        return Finding("port", "ok", f"{server.host}:{server.port} is free")


def _describe_running_server(server: ServerSettings) -> str | None:
    """Describe the robojax server that has this port: its version and sessions; None when it is another program."""
    url = server.local_url
    key = (os.environ.get("ROBOJAX_KEY") or "").strip()
    try:
        request = urllib.request.Request(f"{url}/health", headers={"authorization": f"Bearer {key}"} if key else {})
        # The server is on this machine, so no proxy of the environment is used.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ANSWER_SECONDS) as answer:
            health = json.loads(answer.read(_MAX_ANSWER))
        # A server of rooms alone has neither field.
        count, names = int(health["active_sessions"]), ", ".join(map(str, health["session_ids"]))
        version = dict(health.get("versions", {})).get("robojax", "of unknown version: set ROBOJAX_KEY to see more")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    sessions = f"{count} session{'' if count == 1 else 's'}" + (f": {names}" if names else "")
    return f"your robojax server runs at {url} (robojax {version}; {sessions})"


def _keys(access: AccessSettings, server: ServerSettings, state: str | None) -> Finding:
    try:
        admissions = create_guard(access, host=server.host, origins=server.origins, state=state).admissions
        is_keyed = admissions.check_files()
    except (SettingsError, FileUnusable) as error:
        return Finding("keys", "fail", str(error), "docs/operate/access.md says how keys are made and kept")
    path = keys_path(access, state)
    if is_keyed:
        return Finding("keys", "ok", f"required for every request; they are in {path}")
    if is_loopback(server.host):
        return Finding("keys", "ok", "none: every user of this machine may do everything")
    found = f"none, and {server.host} is open to the network"
    fix = "robojax token new --role operator --name me, with the --port, --state or --keys-file of the server"
    return Finding("keys", "warn" if access.insecure else "fail", found, fix)


def _state(state: str | None) -> Finding:
    folder = state_folder(state)
    if folder is None:
        fix = "sessions, emergency stops and keys are not known after a restart; give --state or a port"
        return Finding("state folder", "warn", "off", fix)
    return _folder("state folder", folder, "set state to a folder that can be written", "fail")


def _recording(recording: RecordingSettings, state: str | None) -> Finding:
    missing = [name for name in ("mcap", "pyarrow") if find_spec(name) is None]
    folder = Path(recording.recordings).expanduser() if recording.recordings else state_folder(state)
    if missing:
        fix = "only recordings need it: pip install -e '.[recording]'"
        return Finding("recording", "warn", f"missing: {', '.join(missing)}", fix)
    if folder is None:
        return Finding("recording", "warn", "there is no folder for recordings", "give --recordings or --state")
    return _folder("recording", folder, "set recordings to a folder that can be written", "warn")


def _robot_packages() -> Finding:
    name, fix = "robot packages (for robojax robot)", "only robojax robot needs them: pip install -e '.[robot]'"
    missing = [module for module in _ROBOT_MODULES if find_spec(module) is None]
    # In a separate process, because a library that a package needs may be missing, too.
    error = None if missing else _run(f"import {', '.join(_ROBOT_MODULES)}", {})[0]
    if missing:
        return Finding(name, "warn", f"missing: {', '.join(missing)}", fix)
    if error is not None:
        return Finding(name, "warn", error, fix.replace("install", "install --force-reinstall"))
    return Finding(name, "ok", ", ".join(_ROBOT_MODULES))


def _serial_ports() -> Finding:
    name = "serial ports (for robojax robot)"
    ports = sorted(port for pattern in ("ttyACM*", "ttyUSB*") for port in _DEVICE_FOLDER.glob(pattern))
    if not ports:
        fix = "only a real arm needs one: connect its USB cable, and switch its power supply on"
        return Finding(name, "warn", "none: no /dev/ttyACM* and no /dev/ttyUSB*", fix)
    closed = [port for port in ports if not os.access(port, os.R_OK | os.W_OK)]
    if closed:
        found = f"{', '.join(map(str, closed))}: this user may not read and write"
        return Finding(name, "warn", found, f"sudo usermod -aG {_group_of(closed[0])} $USER, then log in again")
    return Finding(name, "ok", ", ".join(map(str, ports)))


def _group_of(path: Path) -> str:
    try:
        return path.group()
    except (KeyError, OSError):  # a container has its own list of groups
        return "dialout"


def _compile_cache(policies: PolicySettings) -> Finding:
    compiled = jaxmodels.cache_folder("xla", policies.compile_cache)
    if compiled is None:
        return Finding("compile cache", "warn", "off", "every start compiles again; unset compile_cache")
    return _folder("compile cache", compiled, "set compile_cache to a folder that can be written", "warn")


def _hub_cache(policies: PolicySettings) -> Finding:
    home = os.environ.get("HF_HOME") or jaxmodels.user_cache() / "huggingface"
    hub = policies.policy_cache or os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"
    fix = "set policy_cache to a folder that can be written; policies in local folders work without"
    return _folder("Hub cache", Path(hub), fix, "warn")


def _folder(name: str, folder: Path, fix: str, level: Level) -> Finding:
    # The nearest existing folder shows whether this folder can be created, without creating it.
    folder = folder.expanduser()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(name, level, f"{folder}: {error.strerror}", fix)
    free = shutil.disk_usage(existing).free / _GIGABYTE
    found = f"{folder}, {free:.1f} GB free"
    if free < 0.2:
        return Finding(name, "fail", found, "free some space: policies and compiled programs need it")
    if free < 2:
        return Finding(name, "warn", found, "free some space: a policy takes 0.2 GB and more")
    return Finding(name, "ok", found)


def _run(code: str, environment: dict[str, str]) -> tuple[str | None, str]:
    """Run Python code in a new process; return the last line of its error (None on success) and its output."""
    try:
        completed = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_PROBE_SECONDS:g} s", ""
    if completed.returncode == 0:
        return None, completed.stdout
    lines = completed.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {completed.returncode}"), ""
