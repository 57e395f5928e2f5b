"""Counters of a session's control loop, which benchmarks read before and after a run."""

from service.control.robot_io import RobotIO


def counts_of(robot_io: RobotIO) -> dict[str, int]:
    """Since it began."""
    control = robot_io.controller
    return {
        "commands": robot_io.commands_sent,
        "holds": control.holds.total,
        "starvations": control.starvations,
        "missed_ticks": control.missed_ticks,
        "late_actions": control.queue.late,
    }
