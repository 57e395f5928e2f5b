import json
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from service.cli.commands import COMMANDS
from service.settings import Settings

HEAVY = ("jax", "numpy", "aiortc", "av", "sanic", "pydantic", "aiohttp", "mujoco")


def imported_by(code: str, environment) -> set[str]:
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_imports_nothing_heavy(environment):
    code = "sys.argv = ['robojax', '--help']; from service.cli import main; main()"
    assert not imported_by(code, environment) & set(HEAVY)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command_does_not_import_jax(command, environment):
    code = f"sys.argv = ['robojax', '{command}', '--help']; from service.cli import main; main()"
    found = imported_by(code, environment)
    assert not found & {"jax", "aiortc", "av", "sanic", "mujoco"}
    assert COMMANDS[command][0] in found


def test_help_lists_every_command(robojax):
    told = robojax("--help")
    assert told.returncode == 0
    for name, (_, _, summary) in COMMANDS.items():
        assert f"{name} " in told.stdout
        assert summary[:30] in told.stdout


def test_serve_has_a_flag_for_every_setting(robojax):
    told = robojax("serve", "--help")
    assert told.returncode == 0
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} " in told.stdout


def test_the_version_is_told(robojax):
    told = robojax("--version")
    assert (told.returncode, told.stdout.split()[0]) == (0, "robojax")


@pytest.mark.parametrize(
    "arguments", [("fly",), ("serve", "--colour", "red"), ("check",), ("stop",), ("stop", "a", "--all")]
)
def test_wrong_usage_ends_with_2(robojax, arguments):
    told = robojax(*arguments)
    assert (told.returncode, told.stdout) == (2, "")
    assert "Traceback" not in told.stderr


def test_wrong_settings_end_with_2_and_say_what_to_do(robojax, tmp_path):
    (tmp_path / "robojax.toml").write_text("prot = 1")
    told = robojax("serve", "--rate", "fast", ROBOJAX_PORT="x")
    assert told.returncode == 2
    for text in ("rate (flag --rate)", "port (environment ROBOJAX_PORT)", "did you mean 'port'", "Do: "):
        assert text in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("after", [0.0, 0.5, 3.0], ids=["at once", "while jax is imported", "later"])
def test_a_server_starts_answers_and_ends_with_0_at_sigterm(serve, after):
    with serve() as (process, url):
        time.sleep(after)
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            assert json.load(answer)["status"] == "healthy"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5


def test_health_answers_before_jax_is_there(serve):
    with serve() as (_, url), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        told = json.load(answer)
    assert (told["device"], told["uptime"] < 2) == (None, True)


def test_a_port_that_is_taken_ends_with_2(serve, robojax):
    with serve() as (_, url):
        told = robojax("serve", "--port", url.rpartition(":")[2])
    assert told.returncode == 2
    assert "cannot listen" in told.stderr
    assert "--port 0" in told.stderr
    assert "Traceback" not in told.stderr


def test_sessions_of_a_running_server_are_listed_and_stopped(serve, robojax):
    with serve() as (_, url):
        assert "no sessions" in robojax("sessions", "--url", url).stdout
        assert json.loads(robojax("sessions", "--url", url, "--json").stdout) == []
        told = robojax("stop", "--all", "--url", url, "--json", "--reason", "drill")
        assert (told.returncode, json.loads(told.stdout)["stopped"]) == (0, [])
        told = robojax("stop", "nobody", "--emergency", "--url", url)
        assert (told.returncode, "Session nobody not found" in told.stderr) == (4, True)


def test_a_server_that_is_not_there_ends_with_4(robojax):
    for arguments in (("sessions",), ("stop", "--all"), ("stop", "arm")):
        told = robojax(*arguments, "--url", "http://127.0.0.1:9")
        assert told.returncode == 4
        assert "robojax serve" in told.stderr
        assert "Traceback" not in told.stderr
    assert robojax("sessions", "--url", "ftp://x").returncode == 2


def test_a_policy_that_is_not_there_ends_with_3(robojax):
    told = robojax("check", "/no/such/policy", HF_HUB_OFFLINE="1")
    assert (told.returncode, told.stdout) == (3, "")
    assert "neither a folder here nor a repo id" in told.stderr
    assert "Traceback" not in told.stderr
