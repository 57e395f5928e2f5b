"""Whether a policy fits robot, cameras, limits and device time."""

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
from service.inference.admission import FrameSizes
from service.inference.engine import Engine, LoadedPolicy
from service.inference.loaded_policy import check_instruction
from service.sessions.request import NewSession, SessionSettings
from service.threads import call_in_thread


def fit(requirements: Requirements, new: NewSession, settings: SessionSettings) -> tuple[JointTable, ControlConfig]:
    """The joints and the pace of a session with this policy.

    The tick rate is the request's, else the policy's own, else the default. Actions keep the rate that the
    policy was trained at when the checkpoint says so: asking for more ticks makes motion smoother, not faster.

    Raises:
        PolicyError: the policy does not fit; lists every reason.
        InvalidRequest: the request's joint names do not fit, its chunks cannot be joined or asked for like that, or the
            policy wants an instruction.
    """
    wrong = misfits(requirements, new)
    if wrong:
        raise PolicyError(f"policy {new.policy_path!r} does not fit the request: " + "; ".join(wrong))
    if (text := check_instruction(requirements, new.language_instruction)) is not None:
        raise InvalidRequest(text, ("body", "language_instruction"))
    table = create_joint_table(
        requirements.action,
        checkpoint=requirements.joint_names,
        requested=new.joint_names,
        ranges=settings.control.joint_ranges,
    )
    rate = min(new.rate or requirements.rate or settings.control.rate, settings.control.max_rate)
    action_rate = requirements.rate or rate
    overlap = _overlap(requirements, new, action_rate)
    config = ControlConfig(
        rate=rate,
        action_rate=action_rate,
        action_steps=_action_steps(requirements, new, overlap),
        chunk=requirements.chunk,
        width=requirements.action,
        overlap=overlap,
        ask_ahead=new.ask_ahead,
        samples=settings.samples,
        control=settings.control,
        safety=settings.safety,
    )
    return table, config


def _overlap(requirements: Requirements, new: NewSession, action_rate: float) -> Aggregation:
    try:
        return choose_aggregation(requirements, new.overlap, new.temporal_ensemble_coeff, action_rate=action_rate)
    except ValueError as error:
        name = "overlap" if new.temporal_ensemble_coeff is None else "temporal_ensemble_coeff"
        raise InvalidRequest(str(error), ("body", name)) from None


def _action_steps(requirements: Requirements, new: NewSession, overlap: Aggregation) -> int:
    if new.action_steps is None:
        # An ensemble is of chunks at every action, as in LeRobot.
        return 1 if overlap.name == ENSEMBLE else requirements.action_steps
    if not 1 <= new.action_steps <= requirements.chunk:
        raise InvalidRequest(
            f"action_steps is {new.action_steps}; wanted 1 to {requirements.chunk}, the length of the policy's chunks",
            ("body", "action_steps"),
        )
    return new.action_steps


def limits_of(
    table: JointTable, requirements: Requirements, new: NewSession, settings: SessionSettings
) -> MotionLimits:
    """How far and how fast the joints of a session may be commanded.

    Raises:
        InvalidRequest: the request names a joint that is not there, or the limits contradict each other.
    """
    return create_motion_limits(
        table,
        settings.safety,
        file=settings.limits_file,
        requested=new.max_relative_target,
        action_range=requirements.action_range,
    )


def misfits(requirements: Requirements, new: NewSession) -> list[str]:
    """Everything of a request that this policy cannot do with; names of joints are for ``fit``."""
    return [
        *_type_misfits(requirements, new),
        *_camera_misfits(requirements, new),
        *_width_misfits(requirements),
        *_history_misfits(requirements, new),
    ]


def _type_misfits(requirements: Requirements, new: NewSession) -> list[str]:
    if new.policy_type == requirements.policy_type:
        return []
    return [
        f"it is of type {requirements.policy_type!r}, the request says {new.policy_type!r}; "
        f"send policy_type {requirements.policy_type!r}"
    ]


def _history_misfits(requirements: Requirements, new: NewSession) -> list[str]:
    if requirements.observation_steps == 1 or not new.is_direct:
        return []
    return [
        f"it looks at {requirements.observation_steps} observations at once, and a client without rooms sends one; "
        "use a transport server"
    ]


def _camera_misfits(requirements: Requirements, new: NewSession) -> list[str]:
    wanted, sent = set(requirements.cameras), set(new.camera_names)
    if wanted == sent:
        return []
    differences = []
    if wanted - sent:
        differences.append(f"camera_names lacks {sorted(wanted - sent)}")
    if sent - wanted:
        differences.append(f"camera_names has {sorted(sent - wanted)}, which it does not know")
    return [f"{' and '.join(differences)}; send camera_names {sorted(wanted)}"]


def _width_misfits(requirements: Requirements) -> list[str]:
    misfits = []
    if requirements.environment_state is not None:
        misfits.append("it reads observation.environment_state, which no room carries; use one without it")
    if requirements.state is not None and requirements.state != requirements.action:
        misfits.append(
            f"its state has {requirements.state} values and its actions {requirements.action}; "
            "the joint room carries one value per action, so both must be equal"
        )
    if requirements.action < 1 or requirements.chunk < 1:
        misfits.append(f"its chunks are {requirements.chunk} steps of {requirements.action} values")
    return misfits


def admitted(
    engine: Engine, who: object, loaded: LoadedPolicy, config: ControlConfig, *, degrade: bool, seen: FrameSizes
) -> ControlConfig:
    """The pace that the engine has the time for, which is promised to ``who`` from here on.

    A chunk is asked for every ``action_steps`` actions; with ``degrade`` more of them are done of each chunk, as many
    as it takes.

    Args:
        seen: sizes of the frames that come, which the promise follows.

    Raises:
        Overloaded: there is no time for it; with the figure.
    """
    per_second = config.action_rate / config.action_steps
    admission = engine.admit(loaded, per_second, seen=seen, who=who)
    if not admission.fits:
        steps = math.ceil(config.action_rate / admission.per_second - 1e-9) if admission.per_second > 0 else math.inf
        if not degrade:
            raise Overloaded(
                f"the engine has no time for this session: {admission.text}; send degrade: true to be asked for less "
                "often, or delete another session"
            )
        if steps > config.chunk:
            raise Overloaded(
                f"the engine has no time for this session, not even when all {config.chunk} actions of a chunk are "
                f"done before the next: {admission.text}; delete another session"
            )
        config = replace(config, action_steps=int(steps))
    engine.claim(who, loaded, config.action_rate / config.action_steps, seen)
    return config


def promised(asked: ControlConfig, given: ControlConfig) -> dict[str, object]:
    """How often a session is inferred for, and whether that is less than it asked for; JSON-ready."""
    return {
        "inferences_per_second": round(given.action_rate / given.action_steps, 3),
        "is_degraded": given.action_steps > asked.action_steps,
    }


WHERE = ("body", "language_instruction")


async def read_ahead(loaded: LoadedPolicy, instruction: str | None) -> None:
    """Let the policy read an instruction away from the loop and the device's thread: no chunk has to wait for that.

    Raises:
        InvalidRequest: it wants one, or cannot read this one.
    """
    if (why := check_instruction(loaded.requirements, instruction)) is not None:
        raise InvalidRequest(why, WHERE)
    if instruction is None or not loaded.requirements.language:
        return
    try:
        for replica in loaded.replicas:
            await call_in_thread(partial(replica.policy.prepare_task, instruction), "instruction")
    except JaxModelsError as error:
        raise InvalidRequest(f"language_instruction: {error}", WHERE) from error
