"""The console command: its table of sub-commands, errors, exit codes and printed tables."""

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import IntEnum
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.text import Text

    from robojax.robot.fit import RobotFinding
    from service.doctor import Finding


class Code(IntEnum):
    """Exit codes of the console command: a check failed, wrong usage or settings, policy, transport; 0 is success."""

    CHECK = 1
    USAGE = 2
    POLICY = 3
    TRANSPORT = 4


def fail(code: Code, what: str, why: str, then: str) -> NoReturn:
    """Print an error to standard error and end the process."""
    for style, label, text in (("bold red", "Error", what), ("bold", "Why", why), ("bold green", "Do", then)):
        lines = text.splitlines() or [""]
        typer.secho(f"{label:>5}: ", nl=False, err=True, fg=style.split()[-1] if " " in style else None, bold=True)
        typer.echo(f"\n{'':7}".join(lines), err=True)
    raise typer.Exit(code)


RENAME_HELP = "Camera's name in the policy and in the robot or recording, as camera1=front; repeatable"

LEROBOT_HELP = "LeRobot version whose format of pi0 and pi0.5 applies: 0.4 or 0.6; default: robojax.json's, else 0.6"
DTYPE_HELP = (
    "float32, bfloat16, int8, fp8, int8-weights or auto; default: bfloat16 for smolvla, pi0 and pi05 on an "
    "accelerator, else float32"
)


def read_rename(given: Sequence[str] | None) -> dict[str, str]:
    """Parse --rename: the policy's names of cameras to the robot's; ends the process for invalid or repeated names."""
    rename: dict[str, str] = {}
    for text in given or ():
        camera, _, name = text.partition("=")
        if not camera or not name:
            fail(Code.USAGE, f"--rename {text} does not name two cameras", "a name is missing", RENAME_HELP)
        if rename.setdefault(camera, name) != name:
            why = f"camera {camera} of the policy would be {rename[camera]} and {name}"
            fail(Code.USAGE, "--rename contradicts itself", why, "give only one name")
    return rename


# Name to module, its Typer app or function, and one line of help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("robojax.cli.serve", "serve", "Run the server of sessions and rooms"),
    "demo": ("robojax.cli.sim", "demo", "Watch a policy on the real server pick up cubes with a simulated arm"),
    "record-demo": ("robojax.cli.sim", "record_demo", "Record the demo's scripted expert as a LeRobotDataset"),
    "eval": ("robojax.cli.sim", "evaluate", "Measure how often a policy lifts the right cube of the simulated arm"),
    "doctor": ("robojax.cli.serve", "doctor", "Check whether this machine can run a server, and print how to fix it"),
    "check": ("robojax.cli.check", "check", "Show the requirements of a policy and its speed on this machine"),
    "export": ("robojax.cli.export", "export", "Write a policy as a bundle that a server starts faster"),
    "sessions": ("robojax.cli.sessions", "sessions", "List the sessions of a running server"),
    "stop": ("robojax.cli.sessions", "stop", "Stop a session, or all robots (--all: emergency stop, latched)"),
    "start": ("robojax.cli.sessions", "start", "Let a session move its robot"),
    "restart": ("robojax.cli.sessions", "restart", "Stop and start a session, or load an interrupted session again"),
    "adjust": ("robojax.cli.sessions", "adjust", "Change the instruction and motion of a session while it moves"),
    "reset": ("robojax.cli.sessions", "reset", "Release the latch of an emergency stop; nothing moves yet"),
    "delete": ("robojax.cli.sessions", "delete", "Remove a session and its rooms"),
    "robot": ("robojax.cli.robot", "app", "Connect an SO-100, SO-101, simulated or LeRobot's robot to a session"),
    "token": ("robojax.cli.token", "app", "Manage the keys and tokens of a server"),
    "deployments": ("robojax.cli.sessions", "deployments", "List deployments (policy updates) of running sessions"),
    "policy": ("robojax.cli.sessions", "policy", "Load another revision of a running session's policy"),
    "rollback": ("robojax.cli.sessions", "rollback", "Restore the previous policy of a session"),
    "recordings": ("robojax.cli.recordings", "app", "List, show and export recordings of a server"),
    "replay": ("robojax.cli.recordings", "replay", "Compare a policy's actions with a recording"),
    "webhooks": ("robojax.cli.webhooks", "app", "Manage webhooks of the Hub; list and replay events"),
    "train": ("robojax.cli.train", "app", "Train a policy on a LeRobotDataset, with lerobot-train's flags"),
    "transport": ("robojax.cli.serve", "transport", "Run a server of rooms without sessions"),
}

# Extra that each command needs, and the modules of the extras that may be missing.
EXTRAS = {
    "demo": "sim",
    "record-demo": "sim,recording",
    "eval": "sim",
    "recordings": "recording",
    "replay": "recording",
    "train": "training",
    "robot": "robot",
}
OPTIONAL = {"cv2", "lz4", "matplotlib", "mcap", "mujoco", "pyarrow", "scservo_sdk", "serial", "tensorboardX"}
OPTIONAL |= {"yaml", "zstandard"}


class Commands(TyperGroup):
    """Typer group whose commands are imported one at a time."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name; while help is printed, a stub with its one-line summary."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, summary = COMMANDS[cmd_name]
        if self._is_listing:
            return TyperCommand(cmd_name, help=summary)
        from service.processes import pause_garbage_collection

        with pause_garbage_collection():
            loaded = getattr(import_module(module), attribute)
        if not isinstance(loaded, typer.Typer):
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(cmd_name)(loaded)
            loaded = app
        command = typer.main.get_command(loaded)
        command.name = cmd_name
        _remove_full_stops(command)
        return command

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        """Let Typer suggest similar names for an unknown command, which it reads from ``commands``."""
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the overview without importing any command."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


def build_command() -> Any:
    """Build the console command; a sub-command is imported when it is looked up."""
    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(robojax)
    return typer.main.get_command(app)


def _remove_full_stops(command: Any) -> None:
    """Remove the full stop of a help text with one sentence, because lists of commands have none."""
    if command.help and not re.search(r"\.\s", command.help):
        command.help = command.help.removesuffix(".")
    for part in getattr(command, "commands", {}).values():
        _remove_full_stops(part)


def main() -> None:
    """Run the console command; for its exit codes see ``Code``."""
    command = build_command()
    try:
        sys.exit(command(prog_name="robojax"))
    except ModuleNotFoundError as error:
        called = next((word for word in sys.argv[1:] if word in EXTRAS), None)
        missing = (error.name or "").split(".")[0]
        if called is None or missing not in OPTIONAL:
            raise
        install = f"pip install -e '.[{EXTRAS[called]}]'"
        try:
            fail(Code.USAGE, f"robojax {called} needs an extra", f"{missing} is not installed", install)
        except typer.Exit as ended:
            sys.exit(ended.exit_code)


def robojax(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit", is_eager=True, callback=lambda it: _version(it)),
    ] = False,
) -> None:
    """A runtime for robot policies in JAX.

    Exit codes: 0 ok, 1 a check failed, 2 usage or settings, 3 policy, 4 transport.
    """


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"robojax {version('robojax')}")
        raise typer.Exit


def flatten(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for Typer, in which each dataclass parameter becomes one option per field."""
    hints = get_type_hints(function).items()
    groups: dict[str, type] = {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        function(**arguments)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        parameters += [parameter] if group is None else inspect.signature(group).parameters.values()
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return command


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable["str | Text"]],
    *,
    never_folded: Collection[str] = (),
    numbers: Collection[str] = (),
) -> None:
    """Print a heading and rows as a table.

    Args:
        never_folded: columns whose cells stay on one line.
        numbers: columns that are aligned to the right.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for column in columns:
        side = "right" if column in numbers else "left"
        table.add_column(column, justify=side, overflow="fold", no_wrap=column in never_folded)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console(highlight=False).print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print each name in bold, followed by its text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, show_edge=False, pad_edge=False)
    for name, text in facts:
        table.add_row(f"[bold]{name}[/bold]" if name else "", escape(text))
    Console(highlight=False).print(table)


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def show_findings(findings: Sequence["Finding | RobotFinding"], *, as_json: bool) -> None:
    """Print findings as a table or JSON; ends the process with 1 if a finding failed."""
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        print_table(
            ("", "what", "found", "fix"),
            (
                (Text(finding.level, _COLOURS[finding.level]), finding.name, finding.found, finding.fix)
                for finding in findings
            ),
        )
        verdict = f"{len(failed)} of {len(findings)} need repair" if failed else "fit"
        Console(highlight=False).print(verdict, style="bold")
    if failed:
        raise typer.Exit(Code.CHECK)
