"""What a client calls its pictures is found once, and anew whenever it calls them otherwise."""

import numpy as np
import pytest

from service.doors import packing
from service.doors.naming import Naming
from service.doors.observation import Wanted
from service.doors.openpi import ObservationReader
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


def sent(message: dict) -> memoryview:
    return memoryview(bytearray(packing.pack_openpi(message)))


@pytest.mark.parametrize(
    "message",
    [
        {"image": picture(7), "state": np.full(1, 0.5)},
        {"image": picture(7), "state": np.full(1, 0.5, ">f4"), "prompt": "lift"},
        {"image": picture(7)[None], "state": np.full((1, 1), 0.5)},
        {"image": np.full((3, 4, 2), 7, np.uint8), "state": [0.5]},
        {"images": {"front": picture(7)}, "state": np.full(1, 1, np.int64)},
        {"image": picture(7), "wrist": np.zeros((2, 2, 3), np.uint8), "state": np.full(1, 0.5, np.float16)},
    ],
)
def test_a_message_that_is_like_the_one_before_is_read_as_if_it_were_the_first(message: dict) -> None:
    reader = ObservationReader()
    for number in range(3):
        for value in message.values():
            if isinstance(value, np.ndarray):
                value[:] = (value != 0) * (number + 1)
        found, anew = (one.read(sent(message), WANTED) for one in (reader, ObservationReader()))
        np.testing.assert_array_equal(found.frames["front"], anew.frames["front"])
        assert (found.joints, found.prompt, found.files) == (anew.joints, anew.prompt, {})


def test_of_a_message_that_is_like_the_one_before_the_joints_are_checked() -> None:
    for bad in (np.nan, np.inf, -1e300):
        reader, errors = ObservationReader(), []
        reader.read(sent({"image": picture(0), "state": np.zeros(1)}), WANTED)
        for one in (reader, ObservationReader()):
            with pytest.raises(InvalidRequest) as refused:
                one.read(sent({"image": picture(0), "state": np.full(1, bad)}), WANTED)
            errors.append(str(refused.value))
        assert errors[0] == errors[1]


def test_a_message_that_is_like_the_one_before_is_read_anew_for_another_session_and_with_another_prompt() -> None:
    reader = ObservationReader()
    message = {"image": picture(0), "state": np.zeros(1), "prompt": "lift"}
    assert reader.read(sent(message), WANTED).prompt == "lift"
    assert reader.read(sent(message | {"prompt": "push"}), WANTED).prompt == "push"
    with pytest.raises(InvalidRequest, match="wrist"):
        reader.read(sent(message | {"prompt": "push"}), Wanted(("wrist", "top"), WANTED.joints, 1 << 20))
    with pytest.raises(InvalidRequest, match="prompt"):
        reader.read(sent(message | {"prompt": "\x07ush"}), WANTED)
