import pickle
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidRequest, PolicyFailed, TooLarge
from service.lerobot.pickles import (
    CLIENT_MODULES,
    EXECUTED,
    MAX_TIMESTEP,
    read_observation,
    read_policy_request,
    write_actions,
)
from tools import house

GOLDEN = Path("tests/golden/lerobot_async_grpc")
JOINTS = [
    f"{name}.pos" for name in ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
]
ROW, COLUMN, CHANNEL = np.ogrid[:48, :64, :3]
FRONT = (5 * ROW + 3 * COLUMN + 50 * CHANNEL).astype(np.uint8)
ACTIONS = (0.5 * np.arange(48).reshape(8, 6) - 4).astype(np.float32)


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str = "cpu"


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict
    must_go: bool


class TimedAction:
    timestamp: float
    timestep: int
    action: np.ndarray


@pytest.fixture(params=CLIENT_MODULES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of LeRobot's client, which exists during the test and has its classes."""
    torch = ModuleType("torch")
    torch.tensor = lambda values: np.array(values, np.float32)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    helpers = ModuleType(request.param)
    monkeypatch.setitem(sys.modules, request.param, helpers)
    for each in (RemotePolicyConfig, TimedObservation, TimedAction):
        setattr(helpers, each.__name__, each)
        monkeypatch.setattr(each, "__module__", request.param)
    parts = request.param.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    return request.param


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.pkl").read_bytes()


@pytest.mark.parametrize("protocol", ["p4", "p5"])
@pytest.mark.parametrize(
    ("name", "timestamp", "timestep", "must_go", "front"),
    [
        ("timed_observation", 1760000000.125, 7, True, FRONT),
        ("timed_observation_np_scalars", 1760000000.5, 9, False, FRONT),
        ("timed_observation_noncontiguous", 1760000001.0, 12, False, FRONT[::-1, :, ::-1]),
    ],
)
def test_observations_of_lerobot_are_read(
    name: str, timestamp: float, timestep: int, must_go: bool, front: np.ndarray, protocol: str
) -> None:
    data = golden(f"{name}.{protocol}")
    observation = read_observation(data)
    assert (observation.timestamp, observation.timestep, observation.must_go) == (timestamp, timestep, must_go)
    assert observation.values == dict(zip(JOINTS, np.arange(1.25, 7), strict=True))
    assert {type(value) for value in observation.values.values()} == {float}
    assert (observation.task, observation.module) == ("pick up the red cube", CLIENT_MODULES[0])
    assert observation.images.keys() == {"front"}
    assert observation.images["front"].dtype == np.uint8
    np.testing.assert_array_equal(observation.images["front"], front)
    assert np.shares_memory(observation.images["front"], np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("protocol", ["p4", "p5"])
def test_policy_requests_of_lerobot_are_read(protocol: str) -> None:
    request = read_policy_request(golden(f"remote_policy_config.{protocol}"))
    assert request.features == {
        "observation.state": {"dtype": "float32", "shape": (6,), "names": JOINTS},
        "observation.images.front": {
            "dtype": "image",
            "shape": (48, 64, 3),
            "names": ["height", "width", "channels"],
        },
    }
    assert (request.policy_type, request.path, request.actions_per_chunk) == ("act", "robojax/golden-act", 8)
    assert request.renames == {}


DICTS: list[dict[str, Any]] = [
    {},
    {"one": 1},
    {f"joint_{index}": index / 7 for index in range(300)} | {f"again_{index}": index for index in range(300)},
    {"front": FRONT, "again": FRONT, "wrist": np.asfortranarray(FRONT), "row": FRONT[:1], "cut": FRONT[::2, 5:, :1]},
    {"depth": np.arange(600, dtype=np.uint16).reshape(20, 30, 1), "large": np.zeros((200, 300, 3), np.uint8)},
    {code: np.dtype(code).type(5) for code in ("u1", "u2", "u4", "i1", "i2", "i4", "i8", "f2", "f4", "f8")},
]


@pytest.mark.parametrize("dumps", [pickle.dumps, pickle._dumps], ids=["c", "python"])  # type: ignore[attr-defined]
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("observed", DICTS)
def test_observations_are_read_as_pickle_reads_them(observed: dict, protocol: int, dumps: Any, module: str) -> None:
    data = dumps(TimedObservation(1.5, 70_000, {**observed, "task": "stöhn 抓"}, False), protocol)
    expected, observation = pickle.loads(data), read_observation(memoryview(data))
    found: dict[str, Any] = {**observation.values, **observation.images}
    assert (observation.module, observation.task, observation.timestep) == (module, "stöhn 抓", 70_000)
    assert found.keys() == expected.observation.keys() - {"task"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected.observation[name], strict=isinstance(value, np.ndarray))


@pytest.mark.usefixtures("module")
def test_policy_requests_without_rename_map_are_read() -> None:
    config = RemotePolicyConfig("groot", "", {"a": {"shape": [1, None], "names": None}}, 300, "cuda:1")
    request = read_policy_request(pickle.dumps(config, 4))
    assert (request.features, request.renames, request.actions_per_chunk) == (config.lerobot_features, {}, 300)


def test_depth_images_without_channels_get_one(module: str) -> None:
    depth = np.arange(6, dtype=np.uint16).reshape(2, 3)
    observation = read_observation(pickle.dumps(TimedObservation(1.5, 0, {"depth": depth, "task": ""}, True), 5))
    np.testing.assert_array_equal(observation.images["depth"], depth[..., None])


def test_a_time_of_sending_is_ignored_and_another_field_is_refused(module: str) -> None:
    observation = TimedObservation(1.5, 3, {"task": ""}, True)
    observation.client_send_timestamp = 2.5  # type: ignore[attr-defined]
    assert read_observation(pickle.dumps(observation, 4)).timestep == 3
    observation.units = "radians"  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="unknown fields or lacks some: 'units'"):
        read_observation(pickle.dumps(observation, 4))


def test_names_of_numpy_1_are_accepted() -> None:
    for name, function in (("timed_observation.p4", "multiarray"), ("timed_observation.p5", "numeric")):
        old, new = f"numpy._core.{function}".encode(), f"numpy.core.{function}".encode()
        data = golden(name)
        assert bytes([len(old)]) + old in data
        data = data.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)
        np.testing.assert_array_equal(read_observation(data).images["front"], FRONT)


def test_errors_name_the_global_and_its_position() -> None:
    data = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."
    with pytest.raises(InvalidRequest, match=r"byte 17: global 'posix' 'system' is not accepted") as caught:
        read_observation(data)
    assert (caught.value.code, caught.value.status) == ("invalid", 422)
    with pytest.raises(InvalidRequest, match=r"byte 2: opcode b'c' is not accepted"):
        read_observation(b"\x80\x04cposix\nsystem\n.")


def test_another_object_than_expected_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="TimedObservation; expected RemotePolicyConfig"):
        read_policy_request(golden("timed_observation.p4"))
    with pytest.raises(InvalidRequest, match="TimedAction"):
        read_observation(golden("timed_actions.p4"))
    with pytest.raises(TooLarge, match="at most 400"):
        read_policy_request(golden("remote_policy_config.p4"), max_bytes=400)


def test_reply_has_the_bytes_that_lerobot_executed() -> None:
    assert write_actions(ACTIONS, 7, 1760000000.125, 1 / 30, CLIENT_MODULES[0]) == golden("reply_hand_torch_tensor.p4")


@pytest.mark.parametrize("timestep", [EXECUTED, 0, 250, 65_530, MAX_TIMESTEP])
def test_pickle_reads_the_reply(timestep: int, module: str) -> None:
    timed = pickle.loads(write_actions(ACTIONS, timestep, 10.0, 0.25, module))
    assert [type(each).__name__ for each in timed] == ["TimedAction"] * 8
    assert [each.timestep for each in timed] == list(range(timestep, timestep + 8))
    assert [each.timestamp for each in timed] == [10 + 0.25 * index for index in range(8)]
    np.testing.assert_array_equal([each.action for each in timed], ACTIONS)
    assert timed[0].action.dtype == np.float32


@pytest.mark.parametrize(
    "actions",
    [
        np.zeros((0, 6), np.float32),
        np.zeros((8, 0), np.float32),
        np.zeros(6, np.float32),
        np.zeros((8, 6)),
        np.full((8, 6), np.nan, np.float32),
        np.full((8, 6), -np.inf, np.float32),
    ],
)
def test_unusable_actions_are_refused(actions: np.ndarray) -> None:
    with pytest.raises(PolicyFailed, match="expected finite float32"):
        write_actions(actions, 0, 0.0, 1 / 30, CLIENT_MODULES[0])


def test_reply_stays_below_the_clients_limit() -> None:
    assert (
        (4 << 20) - 10_000
        < len(write_actions(np.zeros((469, 980), np.float32), 0, 0.0, 1.0, CLIENT_MODULES[0]))
        < 4 << 20
    )
    with pytest.raises(PolicyFailed, match="470 actions take 4199"):
        write_actions(np.zeros((470, 980), np.float32), 0, 0.0, 1.0, CLIENT_MODULES[0])


@pytest.mark.parametrize(
    ("timestep", "module"), [(-2, CLIENT_MODULES[0]), (MAX_TIMESTEP + 1, CLIENT_MODULES[0]), (0, "os")]
)
def test_reply_needs_a_timestep_and_a_module_of_the_client(timestep: int, module: str) -> None:
    with pytest.raises(ValueError, match="a LeRobot client has"):
        write_actions(ACTIONS, timestep, 0.0, 1 / 30, module)


def test_the_product_never_unpickles() -> None:
    forbidden = re.compile(
        r"\b(import|from) (pickle|_pickle|pickletools|cloudpickle|dill|joblib|shelve|marshal)\b"
        r"|\bpickle\.loads?\b|Unpickler|allow_pickle=True"
    )
    lines = [
        f"{path}: {match[0]}" for path in house.modules().values() for match in forbidden.finditer(path.read_text())
    ]
    assert not lines
    assert forbidden.search("import pickle")
