"""What the parts of a server want to be told, out of its settings."""

from service.arrays.limits import ArrayLimits
from service.models.forwards import ForwardLimits
from service.safety.limits import Asked
from service.safety.sources import read_limits
from service.safety.watchdog import Patience
from service.sessions.sessions import SessionSettings
from service.settings import Settings


def session_settings(settings: Settings) -> SessionSettings:
    """For the sessions.

    Raises:
        LimitsError: the file of limits cannot be used.
    """
    return SessionSettings(
        max_sessions=settings.max_sessions,
        max_cameras=settings.max_cameras,
        rate=settings.rate,
        max_rate=settings.max_rate,
        frame_age_limit=settings.frame_age_limit,
        starved_after=settings.starved_after,
        hold_repeats=settings.hold_repeats,
        failures_allowed=settings.failures_allowed,
        input_timeout=settings.input_timeout,
        joint_ranges=settings.joint_ranges,
        patience=_patience(settings),
        motion=Asked(
            mode=settings.safety,
            setting=settings.max_relative_target,
            file=None if settings.limits is None else read_limits(settings.limits),
        ),
        on_hold=settings.on_hold,
    )


def _patience(settings: Settings) -> Patience:
    return Patience(
        degraded_after=settings.degraded_after,
        stop_after=settings.stop_after,
        frozen_after=settings.frozen_after,
        frozen_stops=settings.frozen_stops,
        bad_inputs=settings.bad_inputs,
        action_age=settings.action_age_limit,
        slow=settings.slow_inference,
    )


def forward_limits(settings: Settings) -> ForwardLimits:
    """For the models."""
    return ForwardLimits(
        arrays=ArrayLimits(bytes=settings.max_forward_bytes),
        memory=settings.max_forward_memory,
        places=settings.max_forwards,
        seconds=settings.answer_deadline,
        beside_robots=settings.forward_beside_robots,
    )
