import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from typer.core import TyperGroup

from robojax.cli.app import COMMANDS, build_command
from service.setting_types import Mark
from service.settings import FIELDS
from tests.unit.robojax.cli.conftest import end

POLICY = str(Path(__file__).parents[4] / "robojax" / "sim" / "policy")

# One process runs all commands: a module that no command imports is absent at its end.
HELP_OF_EACH = """
import sys
from robojax.cli import main
for command in sys.argv[1:]:
    before = set(sys.modules)
    sys.argv = ["robojax", *command.split(), "--help"]
    try:
        main()
    except SystemExit as ended:
        print("\\nIMPORTED", command or "-", ended.code, *(set(sys.modules) - before))
"""


def test_help_imports_nothing_heavy(environment):
    script = [sys.executable, "-c", HELP_OF_EACH, "", *COMMANDS]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    result = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("IMPORTED ")]
    assert [(command, code) for command, code, *_ in result] == [(command, "0") for command in ("-", *COMMANDS)]
    found = set(result[0][2:])
    assert not found & {"jax", "numpy", "aiortc", "av", "sanic", "pydantic", "aiohttp", "mujoco"}
    for command, _, *modules in result[1:]:
        found |= set(modules)
        assert COMMANDS[command][0] in found
        assert not found & {"jax", "aiortc", "av", "sanic", "mujoco"}, command


def test_version_and_help_of_every_command_are_printed(call):
    result = call("--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "robojax")
    result = call("--help")
    assert result.returncode == 0
    for name, (_, _, summary) in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert summary[:30] in result.stdout


@pytest.mark.parametrize(("flag", "shows_all"), [("--help", False), ("--help-all", True)])
def test_serve_help_shows_common_settings_and_all_on_request(call, flag, shows_all):
    result = call("serve", flag)
    assert result.returncode == 0
    shown = {name for name in FIELDS if f"--{name.replace('_', '-')} " in result.stdout}
    common = {name for name, field in FIELDS.items() if Mark.COMMON in field.metadata}
    assert shown == (FIELDS.keys() if shows_all else common)
    assert f"Show all {len(FIELDS)} settings" in result.stdout


# A module that is None in sys.modules cannot be imported.
RUN_WITHOUT_MODULE = """
import sys
sys.modules[sys.argv[1]] = None
sys.argv = ["robojax", *sys.argv[2:]]
from robojax.cli import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("mujoco", ("demo", "--episodes", "1"), "sim"),
        ("pyarrow", ("replay", "no.mcap", "--policy", "no"), "recording"),
        ("pyarrow", ("check", POLICY, "--dtype", "int8", "--runs", "5", "--observations", POLICY), "recording"),
        ("grpc", ("serve", "--port", "0", "--lerobot-port", "0"), "lerobot"),
    ],
)
def test_command_without_its_extra_names_the_missing_packages(environment, missing, arguments, extra):
    command = [sys.executable, "-c", RUN_WITHOUT_MODULE, missing, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"pip install -e '.[{extra}]'" in done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "messages"),
    [
        *((line.split(), 2, ()) for line in ("fly", "serve --colour red", "check", "stop", "stop a --all")),
        (("sessions", "--server", "ftp://x"), 2, ()),
        (
            ("serve", "--rate", "fast"),
            2,
            ("rate (flag --rate)", "port (environment ROBOJAX_PORT)", "did you mean 'port'", "Do: "),
        ),
        (("check", "/no/such/policy"), 3, ("neither a folder here nor a repo id",)),
        *(
            ((*line.split(), "--server", "http://127.0.0.1:9"), 4, ("robojax serve",))
            for line in ("sessions", "stop --all", "stop arm")
        ),
    ],
)
def test_exit_codes(call, tmp_path, arguments, code, messages):
    (tmp_path / "robojax.toml").write_text("prot = 1")
    result = call(*arguments, ROBOJAX_PORT="x", HF_HUB_OFFLINE="1", ROBOJAX_COMPILE_CACHE="off")
    assert (result.returncode, result.stdout) == (code, "")
    assert [text for text in messages if text not in result.stderr] == []


def test_serve_for_robots_of_any_address_is_refused(robojax):
    result = robojax("serve", "--port", "0", "--host", "0.0.0.0", "--insecure", "--lerobot-port", "0")
    assert (result.returncode, result.stdout) == (2, "")
    flags = ("--lerobot-allow", "--lerobot-tls-cert", "--host 127.0.0.1")
    assert [flag for flag in flags if flag not in result.stderr] == []


@pytest.mark.parametrize("after", [0.0, 0.5], ids=["at once", "while jax is imported"])
def test_server_answers_before_jax_and_ends_with_0_at_sigterm(serve, pauses, after):
    with serve() as (process, url):
        result = health(url)
        assert (result["status"], result["device"], result["uptime"] < 2 + pauses.lost(0.0)) == ("healthy", None, True)
        time.sleep(after)
        end(process, pauses)


def test_server_with_jax_keeps_its_port_and_ends_with_0_at_sigterm(serve, robojax, call, pauses):
    with serve() as (process, url):
        began = time.monotonic()
        result = robojax("serve", "--port", url.rpartition(":")[2])
        assert result.returncode == 2
        assert "cannot listen" in result.stderr
        assert "--port 0" in result.stderr
        assert "no sessions" in call("sessions", "--server", url).stdout
        assert json.loads(call("sessions", "--server", url, "--json").stdout) == []
        result = call("stop", "--all", "--server", url, "--json", "--reason", "drill")
        assert (result.returncode, json.loads(result.stdout)["stopped"]) == (0, [])
        result = call("stop", "unknown", "--emergency", "--server", url)
        assert (result.returncode, "Session unknown not found" in result.stderr) == (4, True)
        time.sleep(max(0.0, began + 3 - time.monotonic()))
        assert health(url)["status"] == "healthy"
        end(process, pauses)


def health(url):
    return httpx2.get(f"{url}/health", timeout=30, trust_env=False).json()


def test_unanswered_stop_names_what_stops_the_robot(call):
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def accept() -> None:
            with silent.accept()[0] as connection:
                connection.recv(4096)

        hearing = threading.Thread(target=accept)
        hearing.start()
        result = call("stop", "--all", "--server", f"http://127.0.0.1:{silent.getsockname()[1]}")
        hearing.join()
    assert result.returncode != 0
    assert "does not answer" in result.stderr
    assert "robots hold by themselves after 0.5 s" in " ".join(result.stderr.split())


def _walk(command, context, path=()):
    yield path, command
    for name in command.list_commands(context) if isinstance(command, TyperGroup) else ():
        yield from _walk(command.get_command(context, name), context, (*path, name))


@pytest.fixture(scope="module")
def tree():
    """Return each command and subcommand by its words."""
    root = build_command()
    return dict(_walk(root, root.make_context("robojax", ["sessions"], resilient_parsing=True)))


def test_each_command_names_the_server_with_the_same_option(tree):
    options = {
        path: {flag: option for option in command.params for flag in option.opts} for path, command in tree.items()
    }
    # Here the option is the target address of a webhook, as in huggingface_hub.
    sends_to_an_address = {("webhooks", name) for name in ("create", "update")}
    assert {path for path, flags in options.items() if "--url" in flags} == sends_to_an_address
    with_server = {path for path, flags in options.items() if "--server" in flags}
    with_key = {path for path, flags in options.items() if "--key" in flags}
    assert with_key <= with_server
    assert with_server >= {("sessions",), ("robot",), ("deployments",), ("recordings", "list"), ("stop",)}
    for path in with_server - {("webhooks", "events", name) for name in ("list", "show", "replay")}:
        assert options[path]["--server"].envvar == "ROBOJAX_SERVER", path


def test_mistyped_command_or_option_suggests_the_nearest(tree, call):
    for path in tree:
        if path and path[-1] not in ("start", "restart"):  # These two are similar.
            *before, last = path
            found = call(*before, f"{last[:-1]}x{last[-1]}")
            assert (found.returncode, f"Did you mean {last!r}" in found.stderr) == (2, True), found.stderr
    for arguments, option in (
        (("stop", "--al"), "--all"),
        (("sessions", "--sever", "x"), "--server"),
        (("serve", "--prt", "1"), "--port"),
        (("robot", "--robot.prot", "x"), "--robot.port"),
        (("demo", "--episods", "1"), "--episodes"),
        (("train", "--policy.typ=act"), "--policy.type"),
    ):
        found = call(*arguments)
        assert (found.returncode, option in found.stderr) == (2, True), found.stderr


def test_server_of_the_flag_precedes_the_environment(call):
    def address(*arguments: str, **environment: str) -> str:
        found = call("sessions", *arguments, **environment)
        assert found.returncode == 4
        return found.stderr.splitlines()[0].removeprefix("Error: no robojax server answers at ")

    assert address("--server", "http://127.0.0.1:9", ROBOJAX_SERVER="http://127.0.0.1:7") == "http://127.0.0.1:9"
    assert address(ROBOJAX_PORT="9", ROBOJAX_HOST="0.0.0.0") == "http://127.0.0.1:9"
    found = call("sessions", ROBOJAX_SERVER="localhost:9")
    assert (found.returncode, "localhost:9" in found.stderr) == (2, True), found.stderr
