"""Jobs of the operator's file: environment, limits, output and end of their processes."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.errors import InvalidSettings
from hooks.registry.delivery import DeliveryOutcome, DeliveryRequest, Destination
from hooks.registry.jobs import MAX_VARIABLE, Job, JobDeliverer, build_environment, load_jobs, run_process
from hooks.registry.registry import Registry
from tests.testing.pauses import Pauses
from tests.testing.waiting import lives, until
from tests.unit.hooks.registry.serving import settings, until_finished

REQUEST = DeliveryRequest("msg_1", b'{"repo":{"name":"lab/act","type":"model"}}', is_hub=True)
PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
READ_FILE = """
import json, os
path = os.environ["WEBHOOK_PAYLOAD_FILE"]
data = json.load(open(path))
print(len(json.dumps(data["filler"])), oct(os.stat(path).st_mode & 0o777), "WEBHOOK_PAYLOAD" in os.environ, path)
"""


def python(code: str, tmp_path: Path, **named: Any) -> Job:
    return Job("job", (sys.executable, "-c", code), tmp_path, **named)


async def run(
    job: Job, *, request: DeliveryRequest = REQUEST, folder: Path | None = None, **destination: Any
) -> DeliveryOutcome:
    deliverer = JobDeliverer({"job": job}, folder, 1)
    try:
        return await deliverer.deliver(Destination("w", job="job", **destination), request, 0.0)
    finally:
        await deliverer.close()


async def test_a_job_gets_the_event_and_no_secret_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of-the-server")
    monkeypatch.setenv("LANG", "C.UTF-8")
    job = python(PRINT_ENVIRONMENT, tmp_path, env={"MODE": "offline"}, secrets=("TOKEN",), max_output=1 << 16)
    outcome = await run(job, secret=None, secrets={"TOKEN": "t" * 9, "LD_PRELOAD": "x"})
    assert (outcome.exit_status, outcome.error) == (0, None)
    variables = json.loads(outcome.excerpt)
    path = variables.pop("WEBHOOK_PAYLOAD_FILE")
    assert not Path(path).exists()
    variables.pop("LC_CTYPE", None)  # Python itself sets this variable.
    assert variables == {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "LANG": "C.UTF-8",
        "MODE": "offline",
        "TOKEN": "***",
        "WEBHOOK_ID": "msg_1",
        "WEBHOOK_PAYLOAD": REQUEST.body.decode(),
        "WEBHOOK_REPO_ID": "lab/act",
        "WEBHOOK_REPO_TYPE": "model",
    }


@pytest.mark.parametrize(("surplus", "fits"), [(0, True), (1, False)])
def test_a_payload_is_in_the_environment_if_linux_accepts_its_size(tmp_path: Path, surplus: int, fits: bool) -> None:
    body = b"x" * (MAX_VARIABLE - len("WEBHOOK_PAYLOAD=") - 1 + surplus)
    job = Job("job", ("true",), tmp_path)
    environment = build_environment(job, Destination("w", secret="s"), DeliveryRequest("msg_1", body), tmp_path / "p")
    assert ("WEBHOOK_PAYLOAD" in environment) is fits
    assert environment["WEBHOOK_SECRET"] == "s"
    assert "WEBHOOK_REPO_ID" not in environment
    subprocess.run(["/bin/true"], env=environment, check=True)
    if not fits:
        with pytest.raises(OSError, match="Argument list too long"):
            subprocess.run(["/bin/true"], env=environment | {"WEBHOOK_PAYLOAD": body.decode()}, check=True)


async def test_a_large_payload_is_read_from_its_file(tmp_path: Path) -> None:
    body = json.dumps({"filler": ["x" * 165] * 10_000}).encode()
    assert len(body) > 1_700_000 - 10_000
    outcome = await run(python(READ_FILE, tmp_path), request=DeliveryRequest("msg_1", body), folder=tmp_path / "aside")
    size, mode, is_in_environment, path = outcome.excerpt.split()
    assert (int(size) > 1_600_000, mode, is_in_environment) == (True, "0o600", "False")
    assert not Path(path).exists()
    assert not (tmp_path / "aside").exists()


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)", 0, "out\nerr\n"),
        ("print('x' * 5_000_000 + 'end')", 0, "x" * 96 + "end\n"),
    ],
    ids=["exit", "signal", "both outputs", "long output"],
)
async def test_output_and_exit_status_are_kept(tmp_path: Path, code: str, status: int, text: str) -> None:
    outcome = await run(python(code, tmp_path, max_output=100))
    assert (outcome.exit_status, outcome.excerpt) == (status, text)


async def test_a_missing_program_is_a_failed_attempt(tmp_path: Path) -> None:
    outcome = await run(Job("job", ("/no/such/program",), tmp_path))
    assert (outcome.exit_status, outcome.error) == (None, "the job does not start: No such file or directory")
    outcome = await JobDeliverer({}, None, 1).deliver(Destination("w", job="old"), REQUEST, 0.0)
    assert outcome.error == "job 'old' is no longer in the operator's file"


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Return a folder in which each process of ``sleepers`` creates a file named after its process id."""
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def processes_of(marks: Path) -> list[int]:
    return [int(path.name) for path in marks.iterdir()]


def sleepers(marks: Path) -> str:
    """Return the code of a job that ignores SIGTERM and has a child that ignores it too."""
    return f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
print("asleep", flush=True)
open({str(marks)!r} + "/" + str(os.getpid()), "w").close()
time.sleep(60)
"""


def test_the_time_limit_ends_the_whole_process_group(
    tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooks.registry.jobs.GRACE", 0.2)
    both_sleep_since: list[float] = []

    def monotonic() -> float:
        """Return 0 until both processes sleep, because a busy machine may start them late."""
        now = time.monotonic()
        if not both_sleep_since:
            if len(processes_of(marks)) < 2:
                return 0.0
            both_sleep_since.append(now)
        return now - both_sleep_since[0]

    monkeypatch.setattr("hooks.registry.jobs.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    job = python(sleepers(marks), tmp_path)
    ended = run_process(job.argv, tmp_path, {}, timeout=0.5, max_output=100, stop=threading.Event())
    assert (ended.error, ended.status) == ("ended after its 0.5 s", -signal.SIGKILL)
    assert b"asleep" in ended.output
    assert [lives(process) for process in processes_of(marks)] == [False, False]


def test_background_processes_of_a_job_end_with_the_job(tmp_path: Path, marks: Path, pauses: Pauses) -> None:
    code = sleepers(marks).replace("time.sleep(60)", "time.sleep(60 if child == 0 else 0.2)")
    began = time.monotonic()
    ended = run_process((sys.executable, "-c", code), tmp_path, {}, timeout=30, max_output=100, stop=threading.Event())
    assert (ended.status, ended.error) == (0, None)
    assert pauses.running(began) < 5
    assert not any(lives(process) for process in processes_of(marks))


# Tests of jobs that a registry starts.


def jobs_file(tmp_path: Path, code: str, **named: Any) -> Path:
    path = tmp_path / "jobs.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in named.items()]
    path.write_text("\n".join(["[jobs.job]", f"argv = {json.dumps([sys.executable, '-c', code])}", *lines]))
    return path


@asynccontextmanager
async def running(tmp_path: Path, code: str, **named: Any) -> AsyncIterator[tuple[Registry, str]]:
    made = settings(jobs_file=jobs_file(tmp_path, code, **named), database=tmp_path / "registry.sqlite3")
    async with Registry(made).running() as registry:
        webhooks = await registry.list_webhooks()
        body = {"jobSourceId": "job", "watched": [], "domains": ["session"], "secret": "hidden-secret"}
        webhook = webhooks[0] if webhooks else await registry.create_webhook(body)
        yield registry, webhook.id


async def test_a_failing_job_is_repeated_and_its_exit_codes_are_logged(tmp_path: Path) -> None:
    code = (
        "import os, sys; path = 'count'; done = os.path.exists(path); open(path, 'w').close(); "
        "print(os.environ['WEBHOOK_ID'], os.environ['WEBHOOK_SECRET']); sys.exit(0 if done else 7)"
    )
    async with running(tmp_path, code) as (registry, webhook):
        await registry.emit_session("session.started", {"session_id": "1"})
        entry = await until_finished(registry, webhook)
        assert [attempt["exitStatus"] for attempt in entry["attempts"]] == [7, 0]
        assert {attempt["excerpt"] for attempt in entry["attempts"]} == {f"{entry['webhookDeliveryId']} ***\n"}
        assert (await registry.replay(webhook, entry["id"])).status == 202
        assert (await until_finished(registry, webhook, attempts=3))["attempts"][2]["isReplay"] is True


async def test_jobs_end_at_a_stop_and_run_again_at_the_next_start(tmp_path: Path, marks: Path, pauses: Pauses) -> None:
    async with running(tmp_path, sleepers(marks)) as (registry, _):
        await registry.emit_session("session.started", {"session_id": "1"})
        await until(lambda: len(processes_of(marks)) == 2)
        began = time.monotonic()
    assert pauses.running(began) < 2
    assert not any(lives(process) for process in processes_of(marks))
    async with running(tmp_path, "print('again')") as (registry, webhook):
        entry = await until_finished(registry, webhook)
        assert [attempt["excerpt"] for attempt in entry["attempts"]] == ["again\n"]


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


async def test_a_job_of_a_killed_server_is_ended_at_the_next_start(
    tmp_path: Path, left_behind: "subprocess.Popen[bytes]"
) -> None:
    born = Path(f"/proc/{left_behind.pid}/stat").read_text().rpartition(")")[2].split()[19]
    for number, when in ((1, "1"), (2, born)):
        folder = tmp_path / "aside" / "msg_1-x"
        folder.mkdir(parents=True)
        (folder / "process").write_text(f"{left_behind.pid} {when}")
        await JobDeliverer({}, tmp_path / "aside", 1).close()
        # A process with the same number but another start time is not ended.
        assert (left_behind.poll() is None) is (number == 1) or left_behind.wait(30) == -signal.SIGKILL
    assert left_behind.wait(30) == -signal.SIGKILL


# Tests of the operator's jobs file.


def test_the_jobs_file_of_the_guide_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "operate" / "webhooks_registry.md").read_text()
    [block] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "jobs.toml").write_text(block)
    assert load_jobs(tmp_path / "jobs.toml")["retrain"].secrets == ("HF_TOKEN",)


def test_a_jobs_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(
        '[jobs.retrain]\nargv = ["python", "x.py"]\ncwd = "sub"\nenv = { A = "1" }\nsecrets = ["T"]\n'
        "timeout = 5\nmax_output = 99\n[jobs.other]\nargv = ['true']\n"
    )
    jobs = load_jobs(path)
    assert jobs["retrain"] == Job("retrain", ("python", "x.py"), tmp_path / "sub", {"A": "1"}, ("T",), 5.0, 99)
    assert jobs["other"].cwd == tmp_path
    assert load_jobs(None) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[jobs.a]\nargv = 'rm -rf /'", "a.argv: Input should be a valid tuple, found 'rm -rf /'"),
        ("[jobs.a]\nargv = []", "a.argv: Tuple should have at least 1 item"),
        ("[jobs.a]\nargv = ['x']\nshell = true", "a.shell: Unexpected keyword argument"),
        ("[jobs.a]\nargv = ['x']\ntimeout = 0", "a.timeout: Input should be greater than 0"),
        ("[jobs.a]\nargv = ['x']\nmax_output = 9999999", "a.max_output: Input should be less than"),
        ("[jobs.a]\nargv = ['x']\nsecrets = ['WEBHOOK_ID']", "a.secrets.0: String should match pattern"),
        ("[jobs.'a b']\nargv = ['x']", "a b.id: String should match pattern"),
        ("[job.a]\nargv = ['x']", "found job"),
        ("[jobs.a", "jobs file"),
    ],
)
def test_an_invalid_jobs_file_is_refused_with_the_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(InvalidSettings, match=reason):
        load_jobs(path)


def test_a_missing_or_world_writable_jobs_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    with pytest.raises(InvalidSettings, match="No such file"):
        load_jobs(path)
    path.write_text("[jobs.a]\nargv = ['x']")
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(InvalidSettings, match="chmod o-w"):
        load_jobs(path)
