"""Compatibility of a policy with robot, cameras, limits and device time."""

import math
from dataclasses import replace
from functools import partial

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from service.control.aggregation import ENSEMBLE, Aggregation, choose_aggregation
from service.control.config import ControlConfig
from service.control.joints import JointTable, create_joint_table
from service.control.limits import MotionLimits, create_motion_limits
from service.errors import InvalidRequest, Overloaded, PolicyError
from service.inference.admission import ReadFrameSizes
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy, check_instruction
from service.sessions.request import DIRECT, NewSession, SessionSettings
from service.setting_types import NAME
from service.threads import call_in_thread


def configure_control(
    requirements: Requirements, new: NewSession, settings: SessionSettings
) -> tuple[JointTable, ControlConfig]:
    """Return the joints and the control settings of a session with this policy.

    The tick rate is the request's, else the policy's, else the default. Actions keep the rate of the policy's training
    if the checkpoint has it: more ticks make a motion smoother, not faster.

    Raises:
        PolicyError: the policy does not fit; lists every reason.
        InvalidRequest: a field of the request does not fit the policy.
    """
    mismatches = find_mismatches(requirements, new)
    if mismatches:
        raise PolicyError(f"policy {new.policy_path!r} does not fit the request: " + "; ".join(mismatches))
    if (text := check_instruction(requirements, new.language_instruction)) is not None:
        raise InvalidRequest(text, ("body", "language_instruction"))
    table = create_joint_table(
        requirements.action,
        checkpoint=requirements.joint_names,
        requested=new.joint_names,
        ranges=settings.control.joint_ranges,
        # A client without rooms takes such actions by position; in rooms, joints are looked up by name.
        is_positional=new.is_direct and (requirements.is_positional or not requirements.controls_joints),
    )
    rate = min(new.rate or requirements.rate or settings.control.rate, settings.control.max_rate)
    action_rate = requirements.rate or rate
    try:
        overlap = choose_aggregation(requirements, new.overlap, new.temporal_ensemble_coeff, action_rate=action_rate)
    except ValueError as error:
        name = "overlap" if new.temporal_ensemble_coeff is None else "temporal_ensemble_coeff"
        raise InvalidRequest(str(error), ("body", name)) from None
    config = ControlConfig(
        rate=rate,
        action_rate=action_rate,
        action_steps=_choose_action_steps(requirements, new, overlap),
        chunk=requirements.chunk,
        width=requirements.action,
        overlap=overlap,
        ask_ahead=new.ask_ahead,
        samples=settings.samples,
        control=settings.control,
        safety=settings.safety,
    )
    return table, config


def _choose_action_steps(requirements: Requirements, new: NewSession, overlap: Aggregation) -> int:
    if new.action_steps is None:
        # An ensemble is of chunks at every action, as in LeRobot.
        return 1 if overlap.name == ENSEMBLE else requirements.action_steps
    if not 1 <= new.action_steps <= requirements.chunk:
        raise InvalidRequest(
            f"action_steps is {new.action_steps}; wanted 1 to {requirements.chunk}, the length of the policy's chunks",
            ("body", "action_steps"),
        )
    return new.action_steps


def make_limits(
    table: JointTable, requirements: Requirements, new: NewSession, settings: SessionSettings
) -> MotionLimits:
    """Return the motion limits of a session.

    Raises:
        InvalidRequest: the request names an unknown joint, the limits contradict each other, or the actions cannot be
            limited, because they are not targets of the measured joints.
    """
    if new.max_relative_target is not None and not requirements.controls_joints:
        raise InvalidRequest(
            f"max_relative_target is {new.max_relative_target}, but this policy's actions are no targets of joints "
            "that its state measures, so their steps cannot be limited; leave it out and limit the motion in the "
            "robot's client",
            ("body", "max_relative_target"),
        )
    return create_motion_limits(
        table,
        settings.safety,
        file=settings.limits_file,
        requested=new.max_relative_target,
        action_range=requirements.action_range,
    )


def find_mismatches(requirements: Requirements, new: NewSession) -> list[str]:
    """List everything of a request that does not fit this policy; joint names are checked by ``configure_control``."""
    mismatches = [*_camera_mismatches(requirements, new), *_width_mismatches(requirements, new)]
    if new.policy_type == (expected := requirements.policy_type):
        return mismatches
    text = f"it is of type {expected!r}, the request says {new.policy_type!r}; send policy_type {expected!r}"
    return [text, *mismatches]


def _camera_mismatches(requirements: Requirements, new: NewSession) -> list[str]:
    expected, sent = set(requirements.cameras), set(new.camera_names)
    if expected == sent:
        return []
    differences = []
    if expected - sent:
        differences.append(f"camera_names lacks {sorted(expected - sent)}")
    if sent - expected:
        differences.append(f"camera_names has {sorted(sent - expected)}, which it does not know")
    pairs = ", ".join(f'"{camera}": ...' for camera in sorted(expected - sent))
    rename = f"rename {{{pairs}}} with the robot's names"
    if not all(map(NAME.match, expected)):
        # A session cannot have a camera with this name, because names are part of room addresses.
        advice = f"send {rename} (letters, digits, '_', '.' or '-')"
    else:
        advice = f"send camera_names {sorted(expected)}"
        if new.rename is None and len(expected - sent) == len(sent - expected):
            advice += f", or {rename}"
    return [f"{' and '.join(differences)}; {advice}"]


def _width_mismatches(requirements: Requirements, new: NewSession) -> list[str]:
    mismatches = []
    if not requirements.controls_joints and not new.is_direct:
        if requirements.state in (None, requirements.action):
            what = "its actions are no targets of joints but velocities or displacements, which no room carries"
        else:
            what = (
                f"its state has {requirements.state} values and its actions {requirements.action}, so they are no "
                "targets of joints; the joint room carries one value per action, so both must be equal"
            )
        mismatches.append(
            f'{what}; use a client without rooms that knows them ("transport_server_url": "{DIRECT}"), e.g. one of '
            "openpi's"
        )
    if requirements.environment_state is not None:
        mismatches.append("it reads observation.environment_state, which no room carries; use one without it")
    if requirements.action < 1 or requirements.chunk < 1:
        mismatches.append(f"its chunks are {requirements.chunk} steps of {requirements.action} values")
    return mismatches


def reserve_rate(
    engine: Engine,
    holder: object,
    loaded: LoadedPolicy,
    config: ControlConfig,
    *,
    degrade: bool,
    read_sizes: ReadFrameSizes,
) -> ControlConfig:
    """Reserve inferences for a session; return its control settings, with more ``action_steps`` if ``degrade`` is set.

    Args:
        read_sizes: returns the sizes of the frames that the session receives.

    Raises:
        Overloaded: the engine has no time for it.
    """
    per_second = config.action_rate / config.action_steps
    admission = engine.reservations.check_admission(loaded, per_second, read_sizes=read_sizes, holder=holder)
    if not admission.fits:
        text = admission.text
        if left := engine.batch_compiler.remaining:
            text += f" (programs for larger batches that are not compiled yet: {left}; more may fit when they are)"
        steps = math.ceil(config.action_rate / admission.per_second - 1e-9) if admission.per_second > 0 else math.inf
        if not degrade:
            raise Overloaded(
                f"the engine has no time for this session: {text}; send degrade: true to run fewer "
                "inferences, or delete another session"
            )
        if steps > config.chunk:
            raise Overloaded(
                f"the engine has no time for this session, not even when all {config.chunk} actions of a chunk are "
                f"done before the next: {text}; delete another session"
            )
        config = replace(config, action_steps=int(steps))
    engine.reservations.reserve(holder, loaded, config.action_rate / config.action_steps, read_sizes)
    return config


INSTRUCTION_FIELD = ("body", "language_instruction")


async def prepare_instruction(loaded: LoadedPolicy, instruction: str | None, prompt_cut: str) -> int:
    """Let the policy encode an instruction in a thread, so that no chunk waits for it.

    Returns:
        The number of tokens of its prompt that the policy does not read.

    Raises:
        InvalidRequest: the policy requires an instruction, or cannot read this one.
    """
    if (why := check_instruction(loaded.requirements, instruction)) is not None:
        raise InvalidRequest(why, INSTRUCTION_FIELD)
    if instruction is None or not loaded.requirements.language:
        return 0
    cut = 0
    try:
        for replica in loaded.replicas:
            cut = await call_in_thread(partial(replica.policy.prepare_task, instruction, prompt_cut), "instruction")
    except JaxModelsError as error:
        raise InvalidRequest(f"language_instruction: {error}", INSTRUCTION_FIELD) from error
    return cut
