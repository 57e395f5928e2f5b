"""What the control of a session counts while it moves a robot: what benchmarks take before, and again after."""

from service.control.robot_io import RobotIO


def counts_of(drive: RobotIO) -> dict[str, int]:
    """Since it began."""
    control = drive.control
    return {
        "commands": drive.commands_sent,
        "holds": control.holds.total,
        "starvations": control.starvations,
        "missed_ticks": control.missed_ticks,
        "late_actions": control.actions.late,
    }
