"""The commands by name; a command's module is imported when it is called, so that ``--help`` is quick."""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from service.cli.failure import Code, fail

# name -> (module, what in it: a Typer app or a function, one line of help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("service.cli.serve", "serve", "Run the server: sessions, and rooms unless switched off."),
    "follow": ("service.cli.follow", "follow", "Lend this machine's devices to a server on another one."),
    "demo": ("service.cli.demo", "app", "Watch a simulated arm pick up cubes, driven by the real server."),
    "record-demo": (
        "service.cli.record_demo",
        "record_demo",
        "Record demonstrations of a scripted expert as a LeRobotDataset.",
    ),
    "eval": ("service.cli.evaluate", "evaluate", "How often a policy lifts the cube it was asked for, in closed loop."),
    "doctor": ("service.cli.doctor", "doctor", "Is this machine fit? Each finding comes with its fix."),
    "check": ("service.cli.check", "check", "What a policy needs, how fast it is here, and whether it fits a rate."),
    "sessions": ("service.cli.sessions", "sessions", "List the sessions of a running server."),
    "stop": ("service.cli.sessions", "stop", "Stop a session, or with --all every robot (emergency stop, latched)."),
    "start": ("service.cli.moves", "start", "Let a session move its robot."),
    "restart": ("service.cli.moves", "restart", "Stop and start a session, or load an interrupted one again."),
    "adjust": ("service.cli.moves", "adjust", "What the policy is told and how its chunks are joined, while it moves."),
    "reset": ("service.cli.moves", "reset", "Take the latch of an emergency stop off; nothing moves by it."),
    "delete": ("service.cli.moves", "delete", "Remove a session and its rooms."),
    "robot": ("service.cli.robot", "robot", "An SO-100 or SO-101 arm, or a simulated one, tied to a session."),
    "token": ("service.cli.token", "app", "Keys and tokens: who may call a server, and as what."),
    "deployments": ("service.cli.policies", "deployments", "What became of pushes to policies of running sessions."),
    "policy": ("service.cli.policies", "policy", "Bring a revision of its policy to a running session."),
    "rollback": ("service.cli.policies", "rollback", "Bring back the policy that a session ran before."),
    "recordings": ("service.cli.recordings", "app", "What a server recorded: list, info, export to a dataset."),
    "replay": ("service.cli.replay", "replay", "A recording against a policy: how far off it would have been."),
    "webhooks": ("service.cli.webhooks", "app", "Manage webhooks of the Hub, receive them, replay what came."),
    "bench": ("service.cli.bench", "bench", "Measure this machine with the benchmarks of a checkout; writes a page."),
    "train": ("service.cli.train", "app", "Train a policy on a LeRobotDataset; flags as of lerobot-train."),
    "transport": ("service.cli.transport", "transport", "Run a rooms server alone."),
}

# What these need beside the package itself, and what of it can be missing.
EXTRAS = {
    "demo": "sim",
    "record-demo": "sim,recording",
    "eval": "sim",
    "recordings": "recording",
    "replay": "recording",
    "train": "training",
    "robot": "robot",
}
OPTIONAL = frozenset(
    (
        "cv2",
        "lz4",
        "matplotlib",
        "mcap",
        "mujoco",
        "pyarrow",
        "scservo_sdk",
        "serial",
        "tensorboardX",
        "yaml",
        "zstandard",
    )
)


class Commands(TyperGroup):
    """Commands that are imported one at a time."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; while help is written, only its one line."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, summary = COMMANDS[cmd_name]
        if self._is_listing:
            return TyperCommand(cmd_name, help=summary)
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(cmd_name)(found)
            found = app
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The overview, without importing any command."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


def main() -> None:
    """What the console command runs. Exit codes: 0 ok, 1 a check failed, 2 usage or settings, 3 policy, 4 transport."""
    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(robojax)
    command = typer.main.get_command(app)
    try:
        sys.exit(command(prog_name="robojax"))
    except ModuleNotFoundError as error:
        called, missing = (
            next((word for word in sys.argv[1:] if word in EXTRAS), None),
            (error.name or "").split(".")[0],
        )
        if called is None or missing not in OPTIONAL:
            raise
        try:
            fail(
                Code.USAGE,
                f"robojax {called} needs more than is installed",
                f"{missing} is not there",
                f"pip install 'robojax[{EXTRAS[called]}]'",
            )
        except typer.Exit as ended:
            sys.exit(ended.exit_code)


def robojax(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", is_eager=True, callback=lambda it: _version(it)),
    ] = False,
) -> None:
    """A runtime for robot policies in JAX.

    Exit codes: 0 ok, 1 a check failed, 2 usage or settings, 3 policy, 4 transport.
    """


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"robojax {version('robojax')}")
        raise typer.Exit
