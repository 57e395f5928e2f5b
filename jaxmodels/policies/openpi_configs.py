"""openpi's configs by name: robot, cameras, chunk and normalization, which openpi's checkpoints do not contain.

A checkpoint of openpi has a tree ``params`` and ``assets/ID/norm_stats.json``. ``robojax.json`` next to the tree names
a config of openpi, ``{"openpi": "pi05_droid"}``, or has an object of `OpenpiConfig`'s fields. Imports no JAX.

Sources: openpi/training/{config.py,misc}, openpi/policies/{aloha,droid,libero}_policy.py, openpi/transforms.py,
openpi/models/{model,pi0_config}.py and examples/*/main.py
(https://github.com/Physical-Intelligence/openpi, 15a9616 of June 2026).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import numpy as np

from jaxmodels.checkpoints.files import read_json
from jaxmodels.checkpoints.folder import NORM_STATS, PARAMS, Folder, PolicyFolder
from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.normalization import Normalization, Normalizer, ProcessorStep
from jaxmodels.policies.lerobot_processors import ABSOLUTE, RELATIVE, WRITE_IDENTITY, allows_identity
from jaxmodels.ranges import (
    CHUNK,
    POSITIVE,
    WIDTH,
    Range,
    find_choice_errors,
    find_number_errors,
    find_value_errors,
    list_numbers,
    shorten_value,
)
from jaxmodels.types import ACTION, ACTIONS, IMAGES, STATE, parse_features

KEY = "openpi"  # Key in robojax.json.
MODELS = ("pi0", "pi05")
PROMPTS = {"pi0": 48, "pi05": 200}  # Tokens of a prompt.
IMAGE_KEYS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
METADATA_LIMIT = 4096  # Characters of JSON.
# openpi adds this number to every spread and range, in both directions.
EPSILON = 1e-6


@dataclass(frozen=True)
class OpenpiRobot:
    """Cameras, state and actions of a robot, by the names that openpi's clients send.

    Attributes:
        cameras: pairs of the robot's camera name and openpi's key of its image.
        controls_joints: whether actions are targets of the state's joints; else velocities or displacements.
        rate: actions per second of openpi's example, if it has a rate.
    """

    cameras: tuple[tuple[str, str], ...]
    state: tuple[str, ...]
    actions: tuple[str, ...]
    controls_joints: bool = True
    rate: float | None = None


_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
_ALOHA = tuple(f"{side}_{joint}" for side in ("left", "right") for joint in _ARM)
_PANDA = (*(f"joint_{number}" for number in range(1, 8)), "gripper")
_DROID_CAMERAS = (("exterior_image_1_left", IMAGE_KEYS[0]), ("wrist_image_left", IMAGE_KEYS[1]))
_POSE = ("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z")
ROBOTS: Mapping[str, OpenpiRobot] = {
    "aloha": OpenpiRobot(
        tuple(zip(("cam_high", "cam_left_wrist", "cam_right_wrist"), IMAGE_KEYS, strict=True)),
        _ALOHA,
        _ALOHA,
        rate=50.0,
    ),
    "droid": OpenpiRobot(_DROID_CAMERAS, _PANDA, _PANDA, rate=15.0),
    "droid_velocity": OpenpiRobot(
        _DROID_CAMERAS, _PANDA, (*(f"{joint}.velocity" for joint in _PANDA[:7]), "gripper"), False, rate=15.0
    ),
    "libero": OpenpiRobot(
        (("image", IMAGE_KEYS[0]), ("wrist_image", IMAGE_KEYS[1])),
        (*_POSE, "gripper_left", "gripper_right"),
        (*(f"delta_{part}" for part in _POSE), "gripper"),
        False,
    ),
}


@dataclass(frozen=True)
class OpenpiConfig:
    """openpi's config of a checkpoint, with openpi's names of fields.

    Attributes:
        model: ``pi0`` or ``pi05``; compared with the tree.
        robot: name in `ROBOTS`, or None, which requires `cameras`, `state` and `actions`.
        action_horizon: actions of a chunk.
        cameras: pairs of the robot's camera name and openpi's key of its image; the robot's cameras when empty.
        state, actions: numbers of a state and of an action; the robot's when None.
        action_dim: width that both are padded to; compared with the tree.
        image_size: pixels of a side; compared with the tree.
        asset_id: name of the statistics; not needed if there is only one.
        use_quantile_norm: whether to normalize by quantiles; openpi's choice for the model when None.
        delta_actions: which actions are differences to the state, as in openpi's ``make_bool_mask``: ``[6, -1]`` is six
            differences and one absolute action; none when empty.
        adapt_to_pi: whether to convert ALOHA's joints and grippers to pi0's.
        discrete_state_input: whether pi0.5's prompt contains the state.
        max_token_len: tokens of a prompt; openpi's default for the model when None.
        default_prompt: openpi's default instruction, which is not used here.
        policy_metadata: metadata that openpi's server sends to its clients.
        lora_scale: factor of low-rank updates whose rank is not openpi's.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    model: str
    action_horizon: Annotated[int, Range(1, CHUNK)]
    robot: str | None = None
    cameras: tuple[tuple[str, str], ...] = ()
    state: Annotated[int | None, ACTIONS] = None
    actions: Annotated[int | None, ACTIONS] = None
    action_dim: Annotated[int, Range(1, WIDTH)] = 32
    image_size: Annotated[int, Range(1, 1024)] = 224
    asset_id: str | None = None
    use_quantile_norm: bool | None = None
    delta_actions: tuple[int, ...] = ()
    adapt_to_pi: bool = False
    discrete_state_input: bool | None = None
    max_token_len: Annotated[int | None, Range(1, 4096)] = None
    default_prompt: str | None = None
    policy_metadata: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    lora_scale: Annotated[float | None, POSITIVE] = None

    def __post_init__(self) -> None:
        wrong = find_number_errors(self)
        wrong += find_choice_errors(self, {"model": MODELS} | ({} if self.robot is None else {"robot": ROBOTS}))
        if not wrong:
            wrong = self._describe_robot()
        if wrong:
            raise ConfigError(f"robojax.json: {KEY}: " + "; ".join(wrong))

    def _describe_robot(self) -> list[str]:
        wrong = []
        if self.robot is None:
            example = {"cameras": '{"front": "base_0_rgb"}', "state": "7", "actions": "7"}
            missing = [f'"{name}": {text}' for name, text in example.items() if not getattr(self, name)]
            if missing:
                return [f"has no robot ({', '.join(ROBOTS)}); write one, or lines like {', '.join(missing)}"]
        keys = [key for _, key in self.views]
        if not all(key in IMAGE_KEYS for key in keys) or len(set(keys)) < len(keys):
            wrong.append(f"cameras give {', '.join(keys)}; wanted each of {', '.join(IMAGE_KEYS)} once at most")
        elif IMAGE_KEYS[0] not in keys:
            wrong.append(f"no camera gives {IMAGE_KEYS[0]}, which openpi's policies always see")
        state, actions, deltas = len(self.state_names), len(self.action_names), self.delta_mask
        if max(state, actions) > self.action_dim:
            wrong.append(f"{state} numbers of a state and {actions} of an action; action_dim is {self.action_dim}")
        if any(deltas) and (len(deltas) > actions or len(deltas) > state):
            wrong.append(f"delta_actions are of {len(deltas)} numbers; a state has {state} and an action {actions}")
        if self.adapt_to_pi and (state, actions) != (len(_ALOHA), len(_ALOHA)):
            wrong.append(f"adapt_to_pi is true; only ALOHA's {len(_ALOHA)} joints can be, found {state} and {actions}")
        return wrong

    @property
    def views(self) -> tuple[tuple[str, str], ...]:
        """Pairs of the robot's camera name and openpi's key of its image, in openpi's order."""
        cameras = self.cameras or ROBOTS[self.robot or ""].cameras
        return tuple(sorted(cameras, key=lambda camera: IMAGE_KEYS.index(camera[1]) if camera[1] in IMAGE_KEYS else 9))

    @property
    def renames(self) -> dict[str, str]:
        """Robot's name to policy's name of each image feature."""
        return {f"{IMAGES}{camera}": f"{IMAGES}{key}" for camera, key in self.views}

    @property
    def state_names(self) -> tuple[str, ...]:
        return self._name_numbers("state")

    @property
    def action_names(self) -> tuple[str, ...]:
        return self._name_numbers("actions")

    def _name_numbers(self, which: str) -> tuple[str, ...]:
        count = getattr(self, which)
        names = () if self.robot is None else getattr(ROBOTS[self.robot], which)
        if count is None or count == len(names):
            return names
        return tuple(f"joint_{number + 1}" for number in range(count))

    @property
    def joint_names(self) -> tuple[str, ...] | None:
        """Names of the numbers of an action, if the robot is known."""
        return self.action_names if self.robot and self.action_names == ROBOTS[self.robot].actions else None

    @property
    def controls_joints(self) -> bool:
        """Whether actions are targets of the numbers in the state."""
        return len(self.state_names) == len(self.action_names) and (
            self.robot is None or ROBOTS[self.robot].controls_joints
        )

    @property
    def rate(self) -> float | None:
        """Actions per second of openpi's example for the robot."""
        return None if self.robot is None else ROBOTS[self.robot].rate

    @property
    def reads_state_in_prompt(self) -> bool:
        return self.model == "pi05" if self.discrete_state_input is None else self.discrete_state_input

    @property
    def delta_mask(self) -> tuple[bool, ...]:
        """Which numbers of an action are differences to the state; missing numbers at the end are not."""
        return tuple(count > 0 for count in self.delta_actions for _ in range(abs(count)))

    @property
    def reading(self) -> "OpenpiConfig":
        """The fields that a program depends on; equal results share programs."""
        return OpenpiConfig(
            self.model, 1, cameras=(("camera", IMAGE_KEYS[0]),), state=14, actions=14, adapt_to_pi=self.adapt_to_pi
        )

    def build_values(self) -> dict[str, Any]:
        """Return the fields of LeRobot's ``config.json`` for this policy."""
        quantiles = self.model == "pi05" if self.use_quantile_norm is None else self.use_quantile_norm
        mode, side = "QUANTILES" if quantiles else "MEAN_STD", self.image_size
        return {
            "type": self.model,
            "input_features": {
                **{f"{IMAGES}{key}": {"type": "VISUAL", "shape": [3, side, side]} for _, key in self.views},
                STATE: {"type": "STATE", "shape": [len(self.state_names)]},
            },
            "output_features": {ACTION: {"type": "ACTION", "shape": [len(self.action_names)]}},
            "chunk_size": self.action_horizon,
            "n_action_steps": self.action_horizon,
            "max_state_dim": self.action_dim,
            "max_action_dim": self.action_dim,
            "image_resolution": [side, side],
            "tokenizer_max_length": PROMPTS[self.model] if self.max_token_len is None else self.max_token_len,
            "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
            **self._build_deltas(),
        }

    def _build_deltas(self) -> dict[str, Any]:
        if not any(self.delta_mask):
            return {}
        mask = (*self.delta_mask, *[False] * (len(self.action_names) - len(self.delta_mask)))
        names = [f"{'delta' if is_delta else 'absolute'}_{number}" for number, is_delta in enumerate(mask)]
        return {"use_relative_actions": True, "relative_exclude_joints": ["absolute"], "action_feature_names": names}


def _make_configs() -> dict[str, OpenpiConfig]:
    aloha = OpenpiConfig(
        "pi0",
        50,
        "aloha",
        asset_id="trossen",
        delta_actions=(6, -1, 6, -1),
        adapt_to_pi=True,
        policy_metadata=(("reset_pose", [0, -1.5, 1.5, 0, 0, 0]),),
    )
    pen = replace(aloha, default_prompt="uncap the pen", policy_metadata=())
    velocity = OpenpiConfig("pi0", 10, "droid_velocity", asset_id="droid")
    position = OpenpiConfig("pi0", 10, "droid", asset_id="droid", delta_actions=(7, -1))
    libero = OpenpiConfig("pi0", 50, "libero", asset_id="physical-intelligence/libero", delta_actions=(6, -1))
    return {
        "pi0_aloha": aloha,
        "pi05_aloha": replace(aloha, model="pi05"),
        "pi0_aloha_towel": replace(aloha, default_prompt="fold the towel"),
        "pi0_aloha_tupperware": replace(aloha, default_prompt="open the tupperware and put the food on the plate"),
        "pi0_aloha_pen_uncap": pen,
        "pi05_aloha_pen_uncap": replace(pen, model="pi05"),
        "pi0_aloha_sim": OpenpiConfig(
            "pi0",
            50,
            "aloha",
            cameras=(("cam_high", IMAGE_KEYS[0]),),
            asset_id="lerobot/aloha_sim_transfer_cube_human",
            adapt_to_pi=True,
            default_prompt="Transfer cube",
        ),
        "pi0_droid": velocity,
        "pi05_droid": replace(velocity, model="pi05", action_horizon=15),
        "pi05_droid_finetune": replace(velocity, model="pi05", action_horizon=16),
        "pi05_full_droid_finetune": replace(position, model="pi05", action_horizon=16),
        "pi05_droid_jointpos_polaris": replace(position, model="pi05", action_horizon=15),
        "pi0_droid_jointpos_polaris": replace(position, max_token_len=100),
        "pi0_droid_jointpos_100k_polaris": replace(position, max_token_len=100),
        "pi0_libero": libero,
        "pi0_libero_low_mem_finetune": libero,
        "pi05_libero": replace(libero, model="pi05", action_horizon=10, delta_actions=(), discrete_state_input=False),
    }


CONFIGS: Mapping[str, OpenpiConfig] = _make_configs()


def read_openpi_config(value: Any) -> OpenpiConfig:
    """Return the config of ``openpi`` in ``robojax.json``: a name of `CONFIGS`, or fields, with a name in ``config``.

    Raises:
        ConfigError: a name or field is unknown, or a value is wrong.
    """
    where = f"robojax.json: {KEY}"
    given = dict(value) if isinstance(value, Mapping) else {"config": value}
    name, base = given.pop("config", None), {}
    if name is not None:
        if not isinstance(name, str) or name not in CONFIGS:
            fast = "; pi0-FAST is another type of policy, which is not served" if "fast" in str(name) else ""
            raise ConfigError(
                f"{where} is {shorten_value(name)}{fast}; known: {', '.join(CONFIGS)}; for a config of your own write "
                f'{{"{KEY}": {{"model": "pi05", "robot": "droid", "action_horizon": 16}}}}'
            )
        base = {entry.name: getattr(CONFIGS[name], entry.name) for entry in fields(OpenpiConfig)}
    known = [entry.name for entry in fields(OpenpiConfig)]
    if unknown := sorted(map(str, set(given) - set(known))):
        raise ConfigError(f"{where}: unknown fields {', '.join(unknown)[:400]}; known: {', '.join(known)}")
    if missing := [key for key in ("model", "action_horizon") if key not in given and key not in base]:
        raise ConfigError(f"{where}: {' and '.join(missing)} missing, which openpi's checkpoints do not contain")
    if wrong := find_value_errors(list_numbers(OpenpiConfig), given):
        raise ConfigError(f"{where}: {'; '.join(wrong)}")
    return OpenpiConfig(**(base | {key: _read_field(where, key, part) for key, part in given.items()}))


def _read_field(where: str, name: str, value: Any) -> Any:
    expected = None
    match name:
        case "cameras" | "policy_metadata":
            texts = list(value.values()) if isinstance(value, Mapping) and name == "cameras" else []
            is_object = isinstance(value, Mapping) and all(isinstance(text, str) for text in texts)
            if is_object and len(json.dumps(value)) <= METADATA_LIMIT:
                return tuple(value.items())
            expected = f"an object of at most {METADATA_LIMIT} characters, like " + (
                '{"front": "base_0_rgb"}' if name == "cameras" else '{"reset_pose": [0, -1.5, 1.5, 0, 0, 0]}'
            )
        case "delta_actions":
            if isinstance(value, list) and all(type(part) is int and 0 < abs(part) <= WIDTH for part in value):
                return tuple(value)
            expected = "a list like [6, -1]: six differences to the state, then one absolute number"
        case "use_quantile_norm" | "adapt_to_pi" | "discrete_state_input":
            if not isinstance(value, bool):
                expected = "true or false"
        case "model" | "robot" | "asset_id" | "default_prompt":
            if not isinstance(value, str):
                expected = "a text"
        case "lora_scale" if value is not None:
            return float(value)
    if expected is not None:
        raise ConfigError(f"{where}: {name} is {shorten_value(value)}; wanted {expected}")
    return value


def is_openpi(folder: Folder, sidecar: Mapping[str, Any] | None) -> bool:
    """Return whether a folder is openpi's checkpoint: it has openpi's tree or statistics, and no file of LeRobot."""
    if (folder / "config.json").exists() or (folder / "model.safetensors").exists():
        return False
    has_tree = folder.has_tree(PARAMS) if isinstance(folder, PolicyFolder) else (folder / PARAMS).is_dir()
    return has_tree or bool(_find_assets(folder)) or KEY in (sidecar or {})


def describe_missing_config(name: str) -> str:
    """Return the error text for an openpi checkpoint without the name of its config."""
    guess = f'"{name}"' if name in CONFIGS else '"NAME"'
    return (
        f"{name}: a checkpoint of openpi, whose files do not describe robot, cameras and chunk; write a file "
        f'robojax.json next to {PARAMS} with {{"{KEY}": {guess}}}: the config that you would give openpi\'s '
        f"serve_policy.py as --policy.config; known: {', '.join(CONFIGS)}"
    )


def read_normalization(folder: Folder, config: OpenpiConfig, sidecar: Mapping[str, Any] | None) -> Normalization:
    """Read openpi's statistics for LeRobot's steps; spreads and ranges are wider by openpi's epsilon.

    Raises:
        CheckpointError: statistics are missing (unless `allows_identity`), of another robot, or malformed.
    """
    values, steps = config.build_values(), ()
    inputs, outputs = (parse_features(name, values[name]) for name in ("input_features", "output_features"))
    modes = tuple(values["normalization_mapping"].items())
    where, statistics = _read_norm_stats(folder, config, is_optional=allows_identity(sidecar))

    def widen(added: float) -> dict[str, dict[str, np.ndarray]]:
        return {
            feature: {
                key: (array + {"std": added, "q99": EPSILON}.get(key, 0.0)).astype(np.float32)
                for key, array in statistics.get(name, {}).items()
            }
            for feature, name in ((STATE, "state"), (ACTION, "actions"))
        }

    normalizer = Normalizer((*inputs, *outputs), modes, source=where)
    # LeRobot also adds an epsilon to spreads, but only when it divides by them.
    before = replace(normalizer, stats=widen(EPSILON - normalizer.epsilon))
    after = Normalizer(outputs, modes, {ACTION: widen(EPSILON)[ACTION]}, source=where)
    if "use_relative_actions" in values:
        names = {"action_names": values["action_feature_names"], "exclude_joints": values["relative_exclude_joints"]}
        steps = (
            ProcessorStep(RELATIVE, {"enabled": True, **names}, comes_after=False),
            ProcessorStep(ABSOLUTE, {"enabled": True}, comes_after=True, is_output=True),
        )
    return Normalization(before, after, config.renames, steps)


def _read_norm_stats(
    folder: Folder, config: OpenpiConfig, *, is_optional: bool
) -> tuple[str, dict[str, dict[str, np.ndarray]]]:
    """Return the file's name and its statistics of ``state`` and ``actions``, cut to the robot's widths.

    openpi may pad both to ``action_dim``. With `is_optional` the file, state or actions may be missing.
    """
    found = _find_assets(folder)
    asset = config.asset_id
    if asset is None and len(found) == 1:
        asset = found[0]
    if asset not in found:
        if is_optional and not found:
            return "assets", {}
        wanted = (
            repr(asset) if asset else f'the name of one: {{"{KEY}": {{..., "asset_id": "{(found or ["NAME"])[0]}"}}}}'
        )
        raise CheckpointError(
            f"{folder.name}: assets has {NORM_STATS} of {', '.join(found)[:400] or 'nothing'}; wanted {wanted}. "
            f"If the policy was trained without normalization, {WRITE_IDENTITY}"
        )
    where = f"assets/{asset}/{NORM_STATS}"
    values = read_json(folder / where).get("norm_stats")
    statistics: dict[str, dict[str, np.ndarray]] = {}
    for name, width in (("state", len(config.state_names)), ("actions", len(config.action_names))):
        entry = values.get(name) if isinstance(values, Mapping) else None
        if entry is None and is_optional:
            continue
        if not isinstance(entry, Mapping) or not {"mean", "std"} <= set(entry):
            raise CheckpointError(
                f"{where}: has no mean and std of {name!r}; found {', '.join(map(shorten_value, values or ()))[:200]}"
            )
        try:
            arrays = {str(key): np.asarray(array, np.float64) for key, array in entry.items() if array is not None}
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{where}: {name} is not lists of numbers") from error
        if len({array.shape for array in arrays.values()}) != 1 or arrays["mean"].ndim != 1:
            raise CheckpointError(f"{where}: statistics of {name} have several lengths; wanted one")
        if len(arrays["mean"]) < width:
            raise CheckpointError(
                f"{where}: statistics of {len(arrays['mean'])} numbers for {name}, of which this robot has {width}; "
                f"wanted statistics of the robot in robojax.json's {KEY}"
            )
        statistics[name] = {key: array[:width] for key, array in arrays.items()}
    return where, statistics


def _find_assets(folder: Folder) -> list[str]:
    if isinstance(folder, PolicyFolder):
        names = [name for name in folder.files if name.startswith("assets/") and name.endswith(f"/{NORM_STATS}")]
    else:
        names = [path.relative_to(folder).as_posix() for path in (folder / "assets").rglob(NORM_STATS)]
    return sorted(name.removeprefix("assets/").removesuffix(f"/{NORM_STATS}") for name in names)
