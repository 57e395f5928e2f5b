"""Thirty-odd small faults, one changed line each, and whether the tests that are named beside them see them.

Each is put into a copy of the tree, alone, and its tests are run there. Lines are found by their text, so that a table
row outlives what moves around it; a text that is there no more, or twice, is an error and wants another row.

    python tools/faults.py                      # all of them, with the tests of this checkout
    python tools/faults.py --only ticket latch  # those whose name has one of the words
    python tools/faults.py --tree ../before     # of another checkout

Exits with 1 when a fault is not caught, or when the tests fail without one.
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
# Exit codes of pytest: some tests failed; with any other than these two nothing was shown.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Fault:
    """One changed line.

    Attributes:
        name: what goes wrong.
        path: of the file, from the root.
        old: what stands there, exactly once.
        new: what is put in its place.
        tests: arguments of pytest.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed(self, tree: Path) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: what is to be changed is not there, or more than once.
        """
        text = (tree / self.path).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.path}: {self.old!r} stands there {count} times; wanted once")
        return text.replace(self.old, self.new)


def _tests(*paths: str, k: str = "") -> tuple[str, ...]:
    return (*(f"tests/{path}" for path in paths), *(("-k", k) if k else ()))


FAULTS = (
    # Who may do what.
    Fault(
        "a ticket lets in more than once",
        "service/auth/tokens.py",
        "self._issued.pop(_digest(text), None)",
        "self._issued.get(_digest(text))",
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
        "a token may live for long when it was signed long ago",
        "service/auth/tokens.py",
        'longest = max(times["exp"] - times["iat"], times["exp"] - now)',
        'longest = times["exp"] - now',
        _tests("unit/auth", k="token"),
    ),
    Fault(
        "a session of somebody else is there",
        "service/api/context.py",
        "if not caller_of(request).sees(session.new.owner):",
        "if caller_of(request) is None:",
        _tests("unit/auth/test_auth_access.py"),
    ),
    Fault(
        "a recording of somebody else can be removed",
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
        "a session that nobody sends to has failed",
        "service/stage.py",
        "(Stage.READY, Move.EXPIRED): Stage.TIMEOUT,",
        "(Stage.READY, Move.EXPIRED): Stage.ERROR,",
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
        "a session that is started without its rooms is running",
        "service/sessions/session.py",
        "if trouble is not None:",
        "if self.robot_io is None:",
        _tests("unit/sessions/test_sessions.py", k="link"),
    ),
    Fault(
        "an instruction is not kept",
        "service/sessions/session.py",
        "self.new = replace(self.new, language_instruction=instruction)",
        "replace(self.new, language_instruction=instruction)",
        _tests("unit/sessions", "unit/streaming", k="instruct"),
    ),
    Fault(
        "what a newer version wrote down is dropped",
        "service/sessions/records.py",
        'document["new"] |= document.pop("wishes")',
        'document.pop("wishes")',
        _tests("unit/sessions/test_records.py", k="read_back"),
    ),
    # Control.
    Fault(
        "an older picture takes the place of a newer one",
        "service/control/observation_buffer.py",
        "elif newest is not None and observed_at < newest:",
        "elif newest is not None and observed_at < newest - 60:",
        _tests("unit/control/test_buffer.py"),
    ),
    Fault(
        "a hold has no end",
        "service/control/controller.py",
        "        held.repeats_left -= 1\n        self._history.clear()",
        "        self._history.clear()",
        _tests("unit/control/test_control.py"),
    ),
    Fault(
        "a robot that is held is not told where",
        "service/control/controller.py",
        "self.repeats_left, self.ramp = self._repeats, ramp",
        "self.repeats_left, self.ramp = 0, ramp",
        _tests("unit/control/test_control.py"),
    ),
    Fault(
        "joints are faster than their limit downwards",
        "service/control/guard.py",
        "np.maximum(change, least, out=change)",
        "np.maximum(change, 2 * least, out=change)",
        _tests("unit/control/test_guard.py", "unit/control/test_guarded_control.py"),
    ),
    # Transport.
    Fault(
        "a picture is given out without its last packet",
        "service/transport/webrtc/jitter_buffer.py",
        "                return index + 1",
        "                return index",
        _tests("unit/transport/test_link_jitter.py"),
    ),
    Fault(
        "a smeared picture is decoded after a loss",
        "service/transport/webrtc/jitter_buffer.py",
        "if self._needs_keyframe and not is_keyframe(frame.data):",
        "if False:",
        _tests("unit/transport/test_link_jitter.py"),
    ),
    # The edge and the routes.
    Fault(
        "an address has a connection too many",
        "service/http/limits.py",
        "self._open[who] >= self.limits.per_address",
        "self._open[who] > self.limits.per_address",
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
        "all that is wrong with a body is told",
        "service/http/bodies.py",
        "_MAX_ERRORS = 64",
        "_MAX_ERRORS = 6400",
        _tests("integration/http/test_routes_validation.py"),
    ),
    Fault(
        "what folders the server has is told",
        "service/recording/recorder.py",
        "recordings: Common[Private[str | None]]",
        "recordings: Common[str | None]",
        _tests("integration/http/test_routes_debug.py"),
    ),
    Fault(
        "bytes after the end of a message are taken",
        "service/streaming/codec.py",
        "if not reader.is_at_end:",
        "if False:",
        _tests("unit/streaming/test_packing.py", "unit/streaming/test_act.py"),
    ),
    # The engine, models, and engines elsewhere.
    Fault(
        "who gave up is answered all the same",
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
        "a forward pass too many has a place",
        "service/engines/model_server.py",
        "if self._reserved >= self.settings.max_forwards:",
        "if self._reserved > self.settings.max_forwards:",
        _tests("unit/engines/test_model_server.py"),
    ),
    Fault(
        "another engine is made while one is coming",
        "service/distributed/scaling.py",
        "if coming or not engines:",
        "if not engines:",
        _tests("unit/distributed/test_scaling.py"),
    ),
    # Updates, recordings, the page, settings and commands.
    Fault(
        "actions out of their range take over",
        "service/rollout/gates.py",
        "if outside > limits.margin:",
        "if outside > 10 * limits.margin:",
        _tests("unit/rollout/test_gates.py"),
    ),
    Fault(
        "a policy that answers NaN takes over",
        "service/rollout/gates.py",
        "    if bad:\n",
        "    if bad > 100_000:\n",
        _tests("unit/rollout/test_gates.py", "integration/rollout/test_rollout.py"),
    ),
    Fault(
        "a recording goes on when its session has failed",
        "service/recording/recordings.py",
        'elif event == "session.error":',
        'elif event == "session.failed":',
        _tests("integration/http/test_routes_recordings.py"),
    ),
    Fault(
        "a page too many looks on",
        "service/dashboard/live.py",
        "if len(self.viewers) >= self.settings.viewers and not self._evict_page(caller):",
        "if len(self.viewers) > self.settings.viewers and not self._evict_page(caller):",
        _tests("integration/dashboard/test_ui_socket.py"),
    ),
    Fault(
        "the file of settings wins over the flags",
        "service/settings.py",
        "for place, values in reversed(sources):",
        "for place, values in sources:",
        _tests("unit/service/test_settings.py"),
    ),
    Fault(
        "a command that fails says that it did not",
        "robojax/cli/app.py",
        "raise typer.Exit(code)",
        "raise typer.Exit(0)",
        _tests("unit/robojax/cli/test_cli_token.py", k="cannot_be_made"),
    ),
    # Webhooks.
    Fault(
        "an old signature is taken",
        "hooks/signatures.py",
        "return is_fresh and is_signed",
        "return is_signed",
        _tests("unit/hooks/test_signatures.py"),
    ),
    Fault(
        "a body may be longer than it may be",
        "hooks/receiver/intake.py",
        "if count > max_bytes:",
        "if count > 64 * max_bytes:",
        _tests("unit/hooks/receiver/test_receiver.py"),
    ),
    Fault(
        "an event of another repository is handled",
        "hooks/receiver/endpoint.py",
        'any(fnmatchcase(facts.repo or "", pattern) for pattern in self.repos)',
        "any(self.repos)",
        _tests("unit/hooks/receiver/test_endpoint.py"),
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
        "a file of ever so many tensors is read",
        "jaxmodels/checkpoints/files.py",
        "TENSOR_LIMIT = 10_000",
        "TENSOR_LIMIT = 10_000_000",
        _tests("unit/inference/test_loading.py", k="count"),
    ),
    Fault(
        "a flow goes the wrong way",
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
        "an executed action is not held to its plan",
        "jaxmodels/samplers/real_time_chunking.py",
        "return jnp.where(index < delay, 1.0,",
        "return jnp.where(index < delay + 1, 1.0,",
        _tests("unit/jaxmodels/samplers/test_rtc.py"),
    ),
)


def copy_of(tree: Path, folder: Path) -> Path:
    """What git knows of a checkout, as it is in its working tree."""
    listed = subprocess.run(["git", "-C", str(tree), "ls-files", "-z"], capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name, follow_symlinks=False)
    return folder


def pytest(tree: Path, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Its exit code and its last lines; it ends at the first test that fails."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, "\n".join(done.stdout.splitlines()[-3:]) or done.stderr


def main() -> int:
    """Try the faults that were asked for."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--only", nargs="+", metavar="WORD", help="faults whose name has one of these words")
    options.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    asked = options.parse_args()
    faults = [one for one in FAULTS if not asked.only or any(word in one.name for word in asked.only)]
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="robojax-faults-") as name:
        tree = copy_of(asked.tree.resolve(), Path(name).resolve())
        clean: dict[tuple[str, ...], tuple[int, str]] = {}
        for fault in faults:
            before = (tree / fault.path).read_text()
            changed = fault.changed(tree)
            if fault.tests not in clean:
                clean[fault.tests] = pytest(tree, fault.tests)
            code, told = clean[fault.tests]
            began, verdict = time.monotonic(), "the tests fail without it"
            if code == PASSED:
                (tree / fault.path).write_text(changed)
                code, told = pytest(tree, fault.tests)
                (tree / fault.path).write_text(before)
                verdict = {FAILED: "caught", PASSED: "NOT CAUGHT"}.get(code, f"pytest ended with {code}")
            print(f"{verdict:>12}  {time.monotonic() - began:5.1f} s  {fault.name} ({fault.path})", flush=True)
            if verdict != "caught":
                wrong += 1
                print(told, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
