"""What the configs of all policies share: the features they see and give, and what is wrong with those."""

from jaxmodels.features import ACTION, MODES, TYPES, Feature, wrong_sizes
from jaxmodels.layers.resnet import RESNETS

SMALL_CNN = "small_cnn"
BACKBONES = (*RESNETS, SMALL_CNN)


class PolicyConfig:
    """A config that names features as LeRobot does; the dataclass below it says what else there is.

    Attributes:
        input_features: in the order of their tokens.
        normalization_mapping: type of a feature and mode, as `jaxmodels.features` lists both.
    """

    input_features: tuple[Feature, ...]
    output_features: tuple[Feature, ...]
    normalization_mapping: tuple[tuple[str, str], ...]

    @property
    def cameras(self) -> tuple[Feature, ...]:
        """Image features in the order of their tokens."""
        return tuple(feature for feature in self.input_features if feature.type == "VISUAL")

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each camera's frames, as the policy looks at them."""
        return tuple((camera.shape[1], camera.shape[2]) for camera in self.cameras)

    @property
    def environment_state(self) -> Feature | None:
        return next((f for f in self.input_features if f.type == "ENV"), None)

    @property
    def action(self) -> Feature:
        return next(f for f in self.output_features if f.type == "ACTION" and f.name == ACTION)

    def wrong_features(self) -> list[str]:
        """Complaints about features that no kind of policy can do with; each kind has more of its own."""
        wrong = [
            f"normalization_mapping has {kind[:40]}: {mode[:40]}; wanted types {', '.join(TYPES)} and modes "
            + ", ".join(MODES)
            for kind, mode in self.normalization_mapping
            if kind not in TYPES or mode not in MODES
        ]
        wrong += wrong_sizes(self.input_features, self.output_features)
        if not any(feature.name == ACTION and feature.type == "ACTION" for feature in self.output_features):
            wrong.append(f"output_features has no feature {ACTION!r} of type ACTION")
        return wrong
