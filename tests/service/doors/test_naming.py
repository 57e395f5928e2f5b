"""What a client calls its pictures is found once, and anew whenever it calls them otherwise."""

import numpy as np
import pytest

from service.doors.naming import Naming
from service.doors.observation import Wanted
from service.errors import InvalidRequest
from service.motion.joints import Joint, JointTable

WANTED = Wanted(("front",), JointTable([Joint("shoulder", 0, -1.0, 1.0)]), 1 << 20)


def picture(value: int) -> np.ndarray:
    return np.full((2, 2, 3), value, np.uint8)


def test_a_client_that_calls_its_camera_otherwise_is_understood_anew() -> None:
    naming, state = Naming(), np.zeros(1)
    for value, message in enumerate(
        (
            {"observation/image": picture(0), "state": state},
            {"observation/image": picture(1), "state": state},
            # The exact name goes before the usual one.
            {"observation/image": picture(9), "state": state, "observation.images.front": picture(2)},
            {"images": {"front": picture(3)}, "state": state, "prompt": "lift"},
            {"images": {"front": picture(4)}, "state": state, "prompt": "lift"},
            {"observation/image": picture(5), "state": state},
        )
    ):
        told = naming.renamed(message, WANTED)
        assert told["images"]["front"][0, 0, 0] == value
        assert told.get("prompt") == message.get("prompt")


def test_what_a_known_client_sends_is_looked_at_each_time() -> None:
    naming = Naming()
    naming.renamed({"image": picture(0), "state": np.zeros(1)}, WANTED)
    for message in ({"image": {"front": picture(0)}, "state": np.zeros(1)}, {"image": "x", "state": np.zeros(1)}, {}):
        with pytest.raises(InvalidRequest):
            naming.renamed(message, WANTED)
    naming.renamed({"image": picture(0), "state": np.zeros(1)}, WANTED)
