"""Command `robot`: connects an arm and its cameras to a session."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from robojax.cli.app import RENAME_HELP, Code, fail, flatten, read_rename, show_findings
from robojax.cli.sessions import Key, Server, base_url

if TYPE_CHECKING:
    from robojax.robot.config import RobotConfig
    from robojax.robot.runner import RobotRunner

Text = str | None
robot_option = partial(typer.Option, rich_help_panel="Robot (LeRobot's names)")
session_option = partial(typer.Option, rich_help_panel="Session")
safety_option = partial(typer.Option, rich_help_panel="Safety")


@dataclass(frozen=True)
class RobotFlags:
    """Flags of the robot, by the fields of ``RobotConfig``."""

    type: Annotated[Text, robot_option("--robot.type", help="Type: so101_follower, so100_follower or simulated")] = None
    port: Annotated[Text, robot_option("--robot.port", help="Serial port, e.g. /dev/ttyACM0")] = None
    id: Annotated[Text, robot_option("--robot.id", help="Name of LeRobot's calibration file")] = None
    cameras: Annotated[
        Text,
        robot_option(
            "--robot.cameras",
            help='"{ front: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}}"; the path may be a '
            "video file; type: simulated renders the simulated arm's scene (front, top, side)",
        ),
    ] = None
    use_degrees: Annotated[
        Text,
        robot_option(
            "--robot.use_degrees",
            help="Degrees (true) or -100..100 (false), as in the policy's demonstrations; LeRobot's default was false "
            "up to 0.4.3 and is true since",
        ),
    ] = None
    calibration_dir: Annotated[
        Text, robot_option("--robot.calibration_dir", help="Folder of ID.json; default: LeRobot's folder")
    ] = None
    max_relative_target: Annotated[
        Text,
        safety_option(
            "--robot.max_relative_target",
            help="Largest distance of a target from the joint's position: a number, a map, or none; default: 20",
        ),
    ] = None
    disable_torque_on_disconnect: Annotated[
        Text,
        safety_option(
            "--robot.disable_torque_on_disconnect",
            help="Release of the arm at the end (true: it falls; false: it is held); default: false",
        ),
    ] = None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@flatten
def robot(
    *,
    context: typer.Context,
    flags: RobotFlags,
    lerobot: Annotated[
        bool, robot_option("--lerobot", help="Any type of LeRobot, also of plugins, with all of its --robot.NAME=VALUE")
    ] = False,
    limit: Annotated[
        list[str] | None, safety_option(help="With --lerobot: JOINT=LOW:HIGH, replaces the calibration's; repeatable")
    ] = None,
    watchdog_ms: Annotated[
        float, safety_option(min=20, max=10_000, help="Milliseconds without a command after which the arm is held")
    ] = 500,
    server: Server = None,
    key: Key = None,
    policy: Annotated[
        Text,
        session_option(
            "--policy.path",
            help="Policy of a new session, which is removed at the end: folder on the server's machine, or Hub repo id",
        ),
    ] = None,
    revision: Annotated[Text, session_option("--policy.revision", help="Branch, tag or commit of a repo")] = None,
    joint_names: Annotated[
        Text,
        session_option(
            "--policy.joint_names",
            help="Joints in the order of the policy's actions, for a checkpoint that does not name them, e.g. "
            "shoulder_pan,shoulder_lift,elbow_flex,wrist_flex,wrist_roll,gripper",
        ),
    ] = None,
    rename: Annotated[list[str] | None, session_option(help=RENAME_HELP)] = None,
    session: Annotated[
        Text, session_option(help="Id of the existing or (--policy.path) new session; default: --robot.id")
    ] = None,
    task: Annotated[Text, session_option(help="Instruction for policies that read language")] = None,
    transport: Annotated[
        Text,
        session_option(
            help="URL of the rooms' server, or direct; default: direct for a new session, and --server for an existing "
            "session with rooms"
        ),
    ] = None,
    fps: Annotated[float, session_option(min=1, max=200, help="Observations per second")] = 30,
    frames: Annotated[Text, session_option(help="jpeg or raw; default: raw for a server on this machine")] = None,
    start: Annotated[bool, session_option(help="Start the session at once, or wait for `robojax start`")] = True,
    dry_run: Annotated[bool, session_option(help="Create a session that computes commands and sends none")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check arm, cameras, server and policy without motion")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings of --check as JSON")] = False,
) -> None:
    """Connect an SO-100 or SO-101 arm and its cameras to a session; flags have LeRobot's names.

    The arm follows the session's commands and is held without commands, after an emergency stop (space), and at the end
    (q or Ctrl-C). --robot.type=simulated needs no hardware: MuJoCo simulates an arm that lifts cubes. --lerobot is for
    all other robots of LeRobot. docs/robots/robot.md and docs/robots/lerobot.md are the guides.

    Exit code 1 if a check fails or the arm is lost, 2 if a flag or the robot cannot be used, 4 if the server cannot.
    """
    from robojax.robot.config import join_problems, read_robot_config
    from robojax.robot.errors import RobotError
    from robojax.robot.lerobot_arm import configure_lerobot_arm, open_lerobot_arm, read_limits
    from robojax.robot.runner import RobotRunner

    if unknown := [text for text in context.args if not (lerobot and text.startswith("--robot.") and "=" in text)]:
        options = [name for parameter in context.command.params for name in parameter.opts]
        near = get_close_matches(unknown[0].partition("=")[0], options) or ["robojax robot --help"]
        what = f"unknown options: {' '.join(unknown)}"
        fail(Code.USAGE, what, "--robot.NAME=VALUE needs --lerobot", f"see {', '.join(near)}")
    config, problems = read_robot_config(**vars(flags))
    if frames not in (None, "jpeg", "raw"):
        fail(Code.USAGE, "pictures cannot be sent", f"--frames is {frames!r}", "give jpeg or raw")
    if not check and policy is None and session is None:
        fail(
            Code.USAGE,
            "there is nothing to do",
            "neither --policy.path nor --session is given",
            "--policy.path=user/act_so101 creates a session; `robojax sessions` lists existing sessions",
        )
    simulation = arm = None
    with ExitStack() as stack:
        try:
            if lerobot:
                given = [f"--robot.{name}={value}" for name, value in vars(flags).items() if value is not None]
                arm = stack.enter_context(open_lerobot_arm(given + context.args, read_limits(limit or ())))
                config, problems = configure_lerobot_arm(arm), {}
            else:
                simulation = stack.enter_context(_open_simulation(config))
        except RobotError as error:
            problems = {"robot": error} if lerobot else problems | {"simulation": error}
        if problems and (lerobot or not check):
            joined = join_problems(problems)
            fail(Code.USAGE, "the robot cannot be used", str(joined), joined.then)
        runner = RobotRunner(
            robot=config,
            lerobot=arm,
            server=base_url(server),
            key=key,
            session=session,
            policy=policy,
            revision=revision,
            joint_names=None if joint_names is None else tuple(name.strip() for name in joint_names.split(",")),
            rename=read_rename(rename),
            task=task,
            transport=transport,
            rate=fps,
            command_timeout=watchdog_ms / 1e3,
            is_started=start,
            is_dry_run=dry_run,
            is_compressed=None if frames is None else frames == "jpeg",
            simulation=simulation,
        )
        if check:
            from robojax.robot.checks import check_robot

            show_findings(list(check_robot(runner, problems)), as_json=as_json)
        else:
            _run(runner)


def _open_simulation(config: "RobotConfig") -> "AbstractContextManager[Any]":
    """Open the scene of the simulated arm; None for a real arm, and for simulated servos at a port.

    Raises:
        RobotError: the simulator is not installed.
    """
    if not config.is_simulated or config.port:
        return nullcontext()
    from robojax.robot.errors import RobotError

    try:
        from robojax.sim.servos import ServoArm
    except ModuleNotFoundError as error:
        raise RobotError(
            f"{error.name} is not installed, which simulates the arm", "pip install -e '.[sim]'"
        ) from error
    return ServoArm(config)


def _run(runner: "RobotRunner") -> None:
    import asyncio

    from robojax.client import RobojaxError
    from robojax.robot.errors import ArmLost, BusLost, CameraLost, RobotError
    from robojax.robot.runner import run

    try:
        asyncio.run(run(runner, lambda text: typer.echo(text, err=True)))
    except RobotError as error:
        is_lost = isinstance(error, ArmLost | BusLost | CameraLost)
        fail(Code.CHECK if is_lost else Code.USAGE, "the robot cannot go on", str(error), error.then)
    except RobojaxError as error:
        fail(Code.TRANSPORT, "the server cannot be used", str(error), _suggest_next(error))


def _suggest_next(error: Exception) -> str:
    code = getattr(error, "code", "")
    if code == "session_exists":
        return "--session=ID without --policy.path joins it; with --policy.path, give a new ID"
    if code == "unknown_session":
        return "robojax sessions lists the sessions"
    if "emergency stop is latched" in str(error):
        return "robojax reset ID, once it is safe; then start this program again"
    return "robojax robot --check checks everything"
