"""Exceptions of robots, which say what failed and what to do."""


class RobotError(Exception):
    """A part of the robot cannot be used.

    Attributes:
        then: advice for the user.
    """

    def __init__(self, text: str, then: str):
        super().__init__(text)
        self.then = then


class BusLost(RobotError):
    """The bus, or a servo on it, no longer answers.

    Attributes:
        servos: ids of the silent servos; empty if the port is lost.
    """

    def __init__(self, text: str, then: str, servos: tuple[int, ...] = ()):
        super().__init__(text, then)
        self.servos = servos


class ArmLost(RobotError):
    """The arm's thread ended; the text says why, and which joints are held."""


class CameraLost(RobotError):
    """A camera delivers no pictures."""


class SessionTaken(RobotError):
    """Another client drives the session's robot."""
