"""Exceptions of policies and models."""


class JaxModelsError(Exception):
    """Base class of all exceptions that this package raises on purpose; their texts are safe to show to users."""


class ConfigError(JaxModelsError, ValueError):
    """A field of a config is missing, unknown or makes no sense."""


class CheckpointError(JaxModelsError, ValueError):
    """Files of a checkpoint are missing, malformed, or do not fit the config."""


class WeightsMismatch(CheckpointError):
    """Tensor names or shapes differ from the config; the text lists all of them."""


class InputError(JaxModelsError, ValueError):
    """An argument of a model's call has the wrong shape, dtype or value."""


class ObservationError(JaxModelsError, ValueError):
    """An observation lacks a feature, or a feature has the wrong shape or dtype."""


class PictureError(JaxModelsError, ValueError):
    """A PNG or JPEG file is not a colour picture: 16-bit gray, transparent, CMYK."""


class DatasetError(JaxModelsError, ValueError):
    """Demonstrations are missing, malformed, contradict themselves, or lack what a policy reads."""


class TrainingError(JaxModelsError):
    """A training cannot begin or continue: its folder holds another training, or its loss is NaN."""


class HubError(JaxModelsError):
    """A repository could not be fetched from the Hub.

    Attributes:
        code: ``bad_answer``, ``checksum``, ``denied``, ``disk``, ``incomplete``, ``limited``, ``timeout``,
            ``too_large``, ``transfer``, ``unknown_repo``, ``unknown_revision`` or ``unreachable``.
    """

    def __init__(self, message: str, code: str = "bad_answer"):
        super().__init__(message)
        self.code = code
