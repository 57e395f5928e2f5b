"""Each number of an untrusted config has a range; others are refused before any computation."""

import json
import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.policies import get_policy_type, policy_types
from jaxmodels.policies.lerobot_folder import Sidecar
from jaxmodels.policies.lerobot_processors import upgrade_config
from jaxmodels.ranges import Number, Range, is_number, list_numbers, shorten_value
from jaxmodels.samplers import FlowSchedule, MaskSchedule, NoiseSchedule
from jaxmodels.text import TextConfig
from jaxmodels.transformer2d import Transformer2DConfig
from jaxmodels.transformer2d.lora import ALPHA
from jaxmodels.types import CAMERAS, PIXELS, Feature

DOCS = Path(__file__).parents[3] / "docs" / "policies" / "policies.md"
HUGE = 10**30
ENOUGH = 1 << 20  # Bytes that the refusal of a config may allocate.
VALUES: dict[str, Any] = {
    "input_features": {
        "observation.images.front": {"type": "VISUAL", "shape": [3, 96, 96]},
        "observation.state": {"type": "STATE", "shape": [6]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [6]}},
}
TEXT = TextConfig().to_json()
PATCHES = {"in_channels": 4, "patch_size": 2, "sample_size": 32, "norm_type": "ada_norm_single"}


def read_policy(kind: str, **changes: Any) -> Any:
    return get_policy_type(kind).config({"type": kind, **VALUES, **changes})


CONFIGS = {kind: type(read_policy(kind)) for kind in policy_types()}
DECLARED: dict[str, Any] = {**CONFIGS, "text": TextConfig, "Transformer2DModel": Transformer2DConfig}
READ = [(what, name) for what, config in DECLARED.items() for name in list_numbers(config)]
each_number = pytest.mark.parametrize(("what", "name"), READ, ids=[f"{what}.{name}" for what, name in READ])


def read_config(what: str, changes: dict[str, Any]) -> Any:
    if what == "text":
        return TextConfig.from_json({**TEXT, **changes})
    if what == "Transformer2DModel":
        return Transformer2DConfig.from_json({**PATCHES, **changes})
    return read_policy(what, **changes)


def wrong_values(number: Number) -> list[Any]:
    """Return invalid values of a field: other types, and values just outside of its range."""
    assert number.range is not None
    low, high = number.range.minimum, number.range.maximum
    step = 1 if number.is_integer else max(abs(high), 1) * 1e-6
    outside = [low if number.range.above else low - step, high if number.range.below else high + step, HUGE, -HUGE]
    found: list[Any] = [*outside, True, "3", math.nan, math.inf, [], {}, [[1] * 1000] * 1000]
    if number.is_integer:
        found.append(low + 0.5)
    if not number.may_be_none:
        found.append(None)
    if number.count is not None:
        found = [*([value] * number.count for value in found if not isinstance(value, list | dict)), *found, [0.5]]
    return found


@pytest.mark.parametrize("config", [*DECLARED.values(), NoiseSchedule, FlowSchedule, MaskSchedule])
def test_each_number_declares_a_range(config: Any) -> None:
    assert [name for name, number in list_numbers(config).items() if number.range is None] == []


@each_number
def test_numbers_out_of_range_are_refused_by_name(what: str, name: str) -> None:
    read_config(what, {})  # Imports are not measured.
    for value in wrong_values(list_numbers(DECLARED[what])[name]):
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match=rf"\b{name} is ") as raised:
                read_config(what, {name: value})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < ENOUGH
        assert len(str(raised.value)) < 1000


@each_number
def test_config_built_without_a_file_has_the_same_ranges(what: str, name: str) -> None:
    made, number = read_config(what, {}), list_numbers(DECLARED[what])[name]
    wrong = [value for value in wrong_values(replace(number, count=None)) if isinstance(value, int | float)]
    integers = [value for value in wrong if isinstance(value, int)]
    values = integers if number.is_integer else [float(value) for value in wrong if value is not True]
    for value in values if number.count is None else [(value,) * number.count for value in values]:
        with pytest.raises(ConfigError, match=rf"\b{name} is "):
            replace(made, **{name: value})


@pytest.mark.parametrize("kind", policy_types())
def test_all_invalid_numbers_are_in_one_error(kind: str) -> None:
    numbers = list_numbers(CONFIGS[kind])
    with pytest.raises(ConfigError) as raised:
        read_policy(kind, **dict.fromkeys(numbers, HUGE), text_encoder=None, input_features=[1])
    assert [name for name in numbers if f"{name} is {HUGE}; wanted" not in str(raised.value)] == []
    assert "wanted an object of features" in str(raised.value)


OFF: list[Any] = [False, 0, 0.0, None, [], {}, [[], {}], {"window": None, "layers": [0, {"on": False}]}]
ON: list[Any] = [True, 1024, -1, 0.5, "", "fast", [[], 3], {"window": {"frames": 6}}]


@pytest.mark.parametrize("kind", [*policy_types(), "text"])
def test_unknown_fields_that_are_off_load(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    unknown = {f"field_of_tomorrow_{number}": value for number, value in enumerate(OFF)}
    assert read_config(kind, unknown) == read_config(kind, {})
    for name in unknown:
        assert name in caplog.text


@pytest.mark.parametrize("kind", [*policy_types(), "text"])
def test_unknown_fields_that_are_on_are_refused_with_their_value(kind: str) -> None:
    for value in ON:
        with pytest.raises(ConfigError) as caught:
            read_config(kind, {"mlp_hidden_dim": value, "off": 0})
        assert f"unknown fields mlp_hidden_dim = {shorten_value(value)};" in str(caught.value)
        assert "set it to null" in str(caught.value)


@pytest.mark.parametrize("kind", policy_types())
def test_saved_configs_keep_unknown_fields(kind: str) -> None:
    unknown = {"field_of_tomorrow": False, "other": {"window": None}}
    assert read_policy(kind, **unknown).to_json() == {**read_policy(kind).to_json(), **unknown}


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([3, 100_000, 100_000], "at most 8192"),
        ([3, 96, HUGE], "at most 8192"),
        ([3, True, 96], "list of integers"),
        ([3, 96.0, 96], "list of integers"),
        ([3, 96, -1], "of 1 or more"),
        ([3] * 1000, "8 axes at most"),
    ],
)
def test_frame_of_an_impossible_size_is_refused(shape: list[Any], words: str) -> None:
    changes = {"input_features": {"observation.images.front": {"type": "VISUAL", "shape": shape}}}
    for kind in policy_types():
        with pytest.raises(ConfigError, match=words):
            read_policy(kind, **changes)


@pytest.mark.parametrize("kind", policy_types())
def test_number_and_total_size_of_frames_are_limited(kind: str) -> None:
    def cameras(count: int, side: int) -> dict[str, Any]:
        return {f"observation.images.{i}": {"type": "VISUAL", "shape": [3, side, side]} for i in range(count)}

    with pytest.raises(ConfigError, match=f"{CAMERAS.maximum + 1} cameras; wanted {CAMERAS.maximum} at most"):
        read_policy(kind, input_features=cameras(int(CAMERAS.maximum) + 1, 32))
    with pytest.raises(ConfigError, match=f"wanted {PIXELS} at most"):
        read_policy(kind, input_features=cameras(3, 4096))


def test_vectors_have_a_range() -> None:
    for kind, most in (("STATE", 65_536), ("ACTION", 1024)):
        assert Feature("a", kind, (most,)).shape == (most,)
        with pytest.raises(ConfigError, match=f"at most {most}"):
            Feature("a", kind, (most + 1,))


@pytest.mark.parametrize("rate", [0, -1, True, "25", math.nan, math.inf, HUGE, 10_001, [25], {}])
def test_rate_has_a_range(rate: Any) -> None:
    with pytest.raises(CheckpointError, match="rate is "):
        Sidecar.from_json({"rate": rate}, 6)


def test_modes_tags_and_scales_of_adapters_have_types_and_ranges() -> None:
    with pytest.raises(CheckpointError, match="input_normalization_modes"):
        upgrade_config({"input_shapes": {}, "input_normalization_modes": {"observation.state": [1]}})
    with pytest.raises(ConfigError, match="tags is 5"):
        read_policy("act", tags=5)
    assert is_number(16, ALPHA)
    assert not any(is_number(alpha, ALPHA) for alpha in (True, 10**400, math.nan, "16", None, [16]))


def test_values_in_errors_are_shortened() -> None:
    for value in (10**4000, "x" * 10**6, [[0] * 1000] * 1000, {str(i): i for i in range(1000)}, -(10**4000)):
        assert len(shorten_value(value)) < 500
    assert shorten_value(10**400) == "an integer of 1329 bits"
    assert [shorten_value(value) for value in ("64", 64, 2.5, None)] == ["'64'", "64", "2.5", "None"]


def test_ranges_include_their_ends_by_default() -> None:
    closed, open_ = Range(0, 2), Range(0, 2, above=True, below=True)
    assert (0 in closed, 2 in closed, 0 in open_, 2 in open_, 1 in open_) == (True, True, False, False, True)
    assert math.nan not in closed


def render_table(configs: Mapping[str, type[Any]]) -> list[str]:
    """Return rows of a Markdown table of all numbers of some configs: name, configs, range."""
    fields_by_range: dict[tuple[str, str], list[str]] = {}
    for kind, config in configs.items():
        for name, number in list_numbers(config).items():
            fields_by_range.setdefault((name, number.describe()), []).append(kind)
    return [f"| `{name}` | {', '.join(kinds)} | {words} |" for (name, words), kinds in fields_by_range.items()]


def test_docs_list_each_range() -> None:
    rows = DOCS.read_text().splitlines()
    expected = render_table({**CONFIGS, "text_encoder": TextConfig})
    assert [row for row in expected if row not in rows] == []
    assert [row for row in rows[rows.index("| field | of | range |") + 2 :] if row.startswith("|")] == expected


def test_json_config_in_range_is_read(tmp_path: Path) -> None:
    values = json.loads(json.dumps(read_policy("diffusion2d", optimizer_lr=1).to_json()))
    assert read_policy("diffusion2d", **{**values, "optimizer_betas": [0, 0.5]}).optimizer_lr == 1.0
