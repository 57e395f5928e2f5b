"""Check that tests detect small faults in the source. Each fault changes one line.

The tool writes one fault at a time into a copy of the tree and runs the tests of the fault there. It finds a line by
its text, so that moved code needs no change here. If the text is missing or occurs twice, the row must be corrected.

    python tools/faults.py                      # all faults, with the tests of this checkout
    python tools/faults.py --only ticket latch  # faults whose name contains one of the words
    python tools/faults.py --tree ../before     # faults in another checkout

The exit code is 1 if a fault is not caught, or if the tests fail without a fault.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Exit codes of pytest. Any other code means that the tests did not run.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Fault:
    """Fault in one line of the source.

    Attributes:
        name: Description of the wrong behaviour.
        path: Path of the file from the root.
        old: Text in the file, which must occur exactly once.
        new: Text that replaces it.
        tests: Arguments of pytest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed(self, tree: Path) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: If the old text does not occur exactly once.
        """
        text = (tree / self.path).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.path}: {self.old!r} occurs {count} times; expected exactly once")
        return text.replace(self.old, self.new)


def _tests(*paths: str, k: str = "") -> tuple[str, ...]:
    return (*(f"tests/{path}" for path in paths), *(("-k", k) if k else ()))


FAULTS = (
    # Access.
    Fault(
        "a ticket is accepted more than once",
        "service/auth/tokens.py",
        "self._issued.pop(_digest(text), (None, 0.0))",
        "self._issued.get(_digest(text), (None, 0.0))",
        _tests("unit/auth", k="ticket"),
    ),
    Fault(
        "a key never expires",
        "service/auth/keys.py",
        "return self.expires_at is not None and now >= self.expires_at",
        "return False",
        _tests("unit/auth", k="key"),
    ),
    Fault(
        "the lifetime of a token is not limited from its creation",
        "service/auth/tokens.py",
        'longest = times["exp"] - times["iat"]',
        "longest = 0.0",
        _tests("unit/auth", k="token"),
    ),
    Fault(
        "a session of another owner is visible",
        "service/api/context.py",
        "if not caller_of(request).sees(session.new.owner):",
        "if caller_of(request) is None:",
        _tests("unit/auth/test_auth_access.py"),
    ),
    Fault(
        "a recording of another owner can be deleted",
        "service/recording/recordings.py",
        "if entry is None or not can_see(entry.owner):",
        "if entry is None:",
        _tests("integration/http/test_routes_recordings.py"),
    ),
    # Sessions.
    Fault(
        "a latched session may be restarted",
        "service/stage.py",
        "STARTING_MOVES = frozenset({Move.START, Move.RESTART})",
        "STARTING_MOVES = frozenset({Move.START})",
        _tests("unit/sessions/test_stage.py"),
    ),
    Fault(
        "a session without input fails instead of timing out",
        "service/stage.py",
        "(Move.EXPIRED, Stage.TIMEOUT, (Stage.READY,",
        "(Move.EXPIRED, Stage.ERROR, (Stage.READY,",
        _tests("unit/sessions/test_sessions.py", k="without_any_input"),
    ),
    Fault(
        "a session ticks faster than the server allows",
        "service/sessions/compatibility.py",
        "rate = min(new.rate or requirements.rate or settings.control.rate, settings.control.max_rate)",
        "rate = new.rate or requirements.rate or settings.control.rate",
        _tests("unit/sessions/test_sessions.py", k="rate"),
    ),
    Fault(
        "a session that starts without its rooms counts as running",
        "service/sessions/session.py",
        "if trouble is not None:",
        "if self.robot_io is None:",
        _tests("unit/sessions/test_sessions.py", k="link"),
    ),
    Fault(
        "an instruction is not stored",
        "service/sessions/session.py",
        "self.new = replace(self.new, language_instruction=instruction)",
        "replace(self.new, language_instruction=instruction)",
        _tests("unit/sessions", "unit/streaming", k="instruct"),
    ),
    Fault(
        "unknown fields of a newer version are dropped",
        "service/sessions/records.py",
        'document["new"] |= document.pop("wishes")',
        'document.pop("wishes")',
        _tests("unit/sessions/test_records.py", k="read_back"),
    ),
    # Control.
    Fault(
        "an older frame replaces a newer frame",
        "service/control/observation_buffer.py",
        "elif newest is not None and observed_at < newest:",
        "elif newest is not None and observed_at < newest - 60:",
        _tests("unit/control/test_buffer.py"),
    ),
    Fault(
        "a hold repeats its command without end",
        "service/control/controller.py",
        "        held.repeats_left -= 1\n        self._history.clear()",
        "        self._history.clear()",
        _tests("unit/control/test_control.py"),
    ),
    Fault(
        "a hold sends no command",
        "service/control/controller.py",
        "self.repeats_left, self.ramp = self._repeats, ramp",
        "self.repeats_left, self.ramp = 0, ramp",
        _tests("unit/control/test_control.py"),
    ),
    Fault(
        "joints exceed their negative velocity limit",
        "service/control/guard.py",
        "np.maximum(change, least, out=change)",
        "np.maximum(change, 2 * least, out=change)",
        _tests("unit/control/test_guard.py", "unit/control/test_guarded_control.py"),
    ),
    # Transport.
    Fault(
        "a frame is returned without its last packet",
        "service/transport/webrtc/jitter_buffer.py",
        "                return index + 1",
        "                return index",
        _tests("unit/transport/test_link_jitter.py"),
    ),
    Fault(
        "a damaged frame is decoded after a loss",
        "service/transport/webrtc/jitter_buffer.py",
        "if self._needs_keyframe and not is_keyframe(frame.data):",
        "if False:",
        _tests("unit/transport/test_link_jitter.py"),
    ),
    # HTTP server and routes.
    Fault(
        "an address exceeds its limit of connections by one",
        "service/http/limits.py",
        "self._open[who] >= self._per_address",
        "self._open[who] > self._per_address",
        _tests("unit/http/test_limits.py"),
    ),
    Fault(
        "a bucket holds more than its burst",
        "service/http/limits.py",
        "self._left = min(self._left + (now - self._at) * self.rate, self.burst)",
        "self._left = self._left + (now - self._at) * self.rate",
        _tests("unit/http/test_limits.py"),
    ),
    Fault(
        "bodies of any type are read as JSON",
        "service/http/bodies.py",
        "if kind is not None and not _is_json(kind):",
        "if kind is None:",
        _tests("integration/http/test_routes_validation.py"),
    ),
    Fault(
        "the number of reported errors of a body is not limited",
        "service/http/bodies.py",
        "_MAX_ERRORS = 64",
        "_MAX_ERRORS = 6400",
        _tests("integration/http/test_routes_validation.py"),
    ),
    Fault(
        "the folders of the server are public",
        "service/recording/recorder.py",
        "recordings: Common[Private[str | None]]",
        "recordings: Common[str | None]",
        _tests("integration/http/test_routes_debug.py"),
    ),
    Fault(
        "bytes after the end of a message are accepted",
        "service/streaming/codec.py",
        "if not reader.is_at_end:",
        "if False:",
        _tests("unit/streaming/test_packing.py", "unit/streaming/test_act.py"),
    ),
    # Engine, models, and remote engines.
    Fault(
        "an abandoned request is still computed",
        "service/inference/batching.py",
        "queue.requests = [request for request in queue.requests if request.is_awaited]",
        "queue.requests = list(queue.requests)",
        _tests("unit/inference/test_batching.py", "unit/inference/test_batches.py"),
    ),
    Fault(
        "a batch may make another line late",
        "service/inference/batching.py",
        "return any(at_once + cost <= due < end + cost for due, cost in others)",
        "return False",
        _tests("unit/inference/test_batching.py", "unit/inference/test_batches.py"),
    ),
    Fault(
        "one forward pass more than the limit is accepted",
        "service/engines/model_server.py",
        "if self._reserved >= self.settings.max_forwards:",
        "if self._reserved > self.settings.max_forwards:",
        _tests("unit/engines/test_model_server.py"),
    ),
    Fault(
        "an engine is added while another engine starts",
        "service/distributed/scaling.py",
        "if coming or not engines:",
        "if not engines:",
        _tests("unit/distributed/test_scaling.py"),
    ),
    # Updates, recordings, dashboard, settings and commands.
    Fault(
        "a policy with actions out of range passes the gates",
        "service/rollout/gates.py",
        "if outside > limits.margin:",
        "if outside > 10 * limits.margin:",
        _tests("unit/rollout/test_gates.py"),
    ),
    Fault(
        "a policy that returns NaN passes the gates",
        "service/rollout/gates.py",
        "    if bad:\n",
        "    if bad > 100_000:\n",
        _tests("unit/rollout/test_gates.py", "integration/rollout/test_rollout.py"),
    ),
    Fault(
        "a recording continues after its session failed",
        "service/recording/recordings.py",
        'elif event == "session.error":',
        'elif event == "session.failed":',
        _tests("integration/http/test_routes_recordings.py"),
    ),
    Fault(
        "the dashboard exceeds its limit of viewers by one",
        "service/dashboard/live.py",
        "if len(self.viewers) >= self.settings.viewers and not self._evict_page(caller):",
        "if len(self.viewers) > self.settings.viewers and not self._evict_page(caller):",
        _tests("integration/dashboard/test_ui_socket.py"),
    ),
    Fault(
        "the settings file overrides the flags",
        "service/settings.py",
        "for place, values in reversed(sources):",
        "for place, values in sources:",
        _tests("unit/service/test_settings.py"),
    ),
    Fault(
        "a failed command returns exit code 0",
        "robojax/cli/app.py",
        "raise typer.Exit(code)",
        "raise typer.Exit(0)",
        _tests("unit/robojax/cli/test_cli_token.py", k="cannot_be_made"),
    ),
    # Webhooks.
    Fault(
        "a body may exceed its size limit",
        "hooks/receiver/receiver.py",
        "if len(body) > max_bytes:",
        "if len(body) > 64 * max_bytes:",
        _tests("unit/hooks/receiver/test_receiver.py"),
    ),
    # Models.
    Fault(
        "weights that are not finite are loaded",
        "jaxmodels/policies/lerobot_folder.py",
        "if wrong := not_finite(weights):",
        "if wrong := not_finite({}):",
        _tests("unit/jaxmodels", k="checkpoints and (finite or nan or NaN or infinity)"),
    ),
    Fault(
        "a file with too many tensors is read",
        "jaxmodels/checkpoints/files.py",
        "TENSOR_LIMIT = 10_000",
        "TENSOR_LIMIT = 10_000_000",
        _tests("unit/inference/test_loading.py", k="count"),
    ),
    Fault(
        "a flow sampler steps in the wrong direction",
        "jaxmodels/samplers/flow.py",
        "return x + (row.next_sigma - row.sigma) * velocity",
        "return x - (row.next_sigma - row.sigma) * velocity",
        _tests("parity/test_samplers_diffusers.py"),
    ),
    Fault(
        "a step of DDIM adds too much noise",
        "jaxmodels/samplers/diffusion.py",
        "deviation = eta * jnp.sqrt(variance)",
        "deviation = eta * variance",
        _tests("parity/test_samplers_diffusers.py", k="ddim or diffusers"),
    ),
    Fault(
        "real-time chunking constrains one action too many",
        "jaxmodels/samplers/real_time_chunking.py",
        "return jnp.where(index < delay, 1.0,",
        "return jnp.where(index < delay + 1, 1.0,",
        _tests("unit/jaxmodels/samplers/test_rtc.py"),
    ),
)


def copy_of(tree: Path, folder: Path) -> Path:
    """Copy the files of a checkout that git tracks, as they are in its working tree."""
    listed = subprocess.run(["git", "-C", str(tree), "ls-files", "-z"], capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name, follow_symlinks=False)
    return folder


def pytest(tree: Path, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run pytest until the first failure; return its exit code and its last lines."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return process.returncode, "\n".join(process.stdout.splitlines()[-3:]) or process.stderr


def main() -> int:
    """Run the selected faults and return the exit code."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument(
        "--only", nargs="+", metavar="WORD", help="run only faults whose name contains one of these words"
    )
    options.add_argument("--tree", type=Path, default=ROOT, help="checkout to test. Defaults to this checkout.")
    arguments = options.parse_args()
    faults = [fault for fault in FAULTS if not arguments.only or any(word in fault.name for word in arguments.only)]
    problems = 0
    with tempfile.TemporaryDirectory(prefix="robojax-faults-") as name:
        tree = copy_of(arguments.tree.resolve(), Path(name).resolve())
        clean: dict[tuple[str, ...], tuple[int, str]] = {}
        for fault in faults:
            before = (tree / fault.path).read_text()
            changed = fault.changed(tree)
            if fault.tests not in clean:
                clean[fault.tests] = pytest(tree, fault.tests)
            code, output = clean[fault.tests]
            began, verdict = time.monotonic(), "the tests fail without it"
            if code == PASSED:
                (tree / fault.path).write_text(changed)
                code, output = pytest(tree, fault.tests)
                (tree / fault.path).write_text(before)
                verdict = {FAILED: "caught", PASSED: "NOT CAUGHT"}.get(code, f"pytest ended with {code}")
            print(f"{verdict:>12}  {time.monotonic() - began:5.1f} s  {fault.name} ({fault.path})", flush=True)
            if verdict != "caught":
                problems += 1
                print(output, flush=True)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
