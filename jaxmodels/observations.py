"""Checks of observations and plan prefixes, and their conversion to arrays for compiled programs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmodels.errors import ObservationError
from jaxmodels.policies import get_policy_type
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.program import Inputs
from jaxmodels.ranges import Range, is_number, shorten_value
from jaxmodels.types import (
    IMAGES,
    PREFIX_ACTIONS,
    PREFIX_DELAY,
    PREFIX_LENGTH,
    Feature,
    Observation,
    Prefix,
    camera_name,
)

NAMES = (PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH)


def refuse_prefix(observation: Mapping[str, np.ndarray]) -> None:
    """Refuse a plan prefix in the observation of a policy that continues none.

    Raises:
        ObservationError: there is a plan, and the policy would not continue it.
    """
    present = [name for name in NAMES if name in observation]
    if present:
        raise ObservationError(
            f"{', '.join(present)} in the observation of a policy that continues no plan; leave it out "
            "(its requirements have takes_prefix false)"
        )


def read_prefix(observation: Mapping[str, np.ndarray], batch: int, chunk: int, action: int) -> Prefix:
    """The plan prefix of an observation, as arrays; of length 0 when there is none.

    Raises:
        ObservationError: a part is missing, has the wrong shape or dtype, or holds what no plan can.
    """
    present = [name for name in NAMES if name in observation]
    if not present:
        none = np.zeros(batch, np.int32)
        return Prefix(np.zeros((batch, chunk, action), np.float32), none, none)
    if missing := [name for name in NAMES if name not in present]:
        raise ObservationError(
            f"{', '.join(missing)} missing beside {', '.join(present)}; a plan is all three, or none"
        )
    delay, length = (_counts(name, observation[name], batch, chunk) for name in (PREFIX_DELAY, PREFIX_LENGTH))
    if (delay > length).any():
        member = int(np.argmax(delay > length))
        raise ObservationError(
            f"{PREFIX_DELAY} is {delay[member]} for member {member}, and {PREFIX_LENGTH} {length[member]}; "
            "no more can have been executed than was planned"
        )
    actions = np.asarray(observation[PREFIX_ACTIONS])
    if actions.shape != (batch, chunk, action):
        raise ObservationError(
            f"{PREFIX_ACTIONS} has shape {actions.shape}; wanted {(batch, chunk, action)}, filled up to a whole chunk"
        )
    if not np.issubdtype(actions.dtype, np.floating):
        raise ObservationError(f"{PREFIX_ACTIONS} is {actions.dtype}; wanted float32")
    is_planned = np.arange(chunk) < length[:, None]
    actions = np.where(is_planned[..., None], actions, 0).astype(np.float32)
    if not np.isfinite(actions).all():
        where = np.argwhere(~np.isfinite(actions))[0].tolist()
        raise ObservationError(f"{PREFIX_ACTIONS} holds {actions[tuple(where)]} at {where}; wanted finite numbers")
    return Prefix(actions, delay, length)


def _counts(name: str, value: np.ndarray, batch: int, maximum: int) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != (batch,):
        raise ObservationError(f"{name} has shape {array.shape}; wanted {(batch,)}, one for each member of the batch")
    if not np.issubdtype(array.dtype, np.integer):
        raise ObservationError(f"{name} is {array.dtype}; wanted int32")
    if ((array < 0) | (array > maximum)).any():
        wrong = array[(array < 0) | (array > maximum)][0]
        raise ObservationError(f"{name} is {wrong}; wanted 0 to {maximum}, the actions of a chunk")
    return np.ascontiguousarray(array, np.int32)


BATCH = Range(1, 65_536)
SIDE = Range(1, 16_384)  # pixels; of frames as they arrive


class Reader:
    """Reads observations of a policy, whose features have fixed names and shapes."""

    def __init__(self, checkpoint: Checkpoint):
        config: Any = checkpoint.config
        self._cameras: tuple[Feature, ...] = config.cameras
        self._state: Feature | None = config.state
        self._environment_state: Feature | None = config.environment_state
        self._prefix = (
            (config.chunk_size, config.action.shape[0]) if get_policy_type(config.type).takes_prefix else None
        )
        text = config.text_encoder
        self._language = None if text is None else (text.length, text.width)
        self._outside = checkpoint.normalization.get_outside_name
        features = (*self._cameras, self._state, self._environment_state)
        # A feature may come under its name outside, its name inside, or (cameras) as observation.images.<camera>.
        self._names = {feature.name: self._aliases(feature) for feature in features if feature is not None}

    def _aliases(self, feature: Feature) -> tuple[str, ...]:
        outside = self._outside(feature.name)
        names = [outside, feature.name]
        if feature.type == "VISUAL":
            names.append(IMAGES + camera_name(outside))
        return tuple(dict.fromkeys(names))

    def read(self, observation: Mapping[str, np.ndarray]) -> tuple[Observation, Inputs]:
        """The arrays of an observation in the policy's order, and their shapes; without texts (see `Instructions`).

        Raises:
            ObservationError: a feature is missing, has the wrong shape or dtype, or is not finite.
        """
        images = tuple(_frames(*self._find(observation, camera)) for camera in self._cameras)
        state = self._vector(observation, self._state)
        environment_state = self._vector(observation, self._environment_state)
        arrays = [array for array in (*images, state, environment_state) if array is not None]
        batches = {array.shape[0] for array in arrays}
        if len(batches) != 1:
            sizes = {name: np.shape(observation[name])[:1] for name in observation if name.startswith("observation.")}
            raise ObservationError(f"features have different batch sizes: {sizes}; wanted one for all")
        frames = tuple((image.shape[1], image.shape[2]) for image in images)
        batch = batches.pop()
        if self._prefix is None:
            refuse_prefix(observation)
            return Observation(images, state, environment_state), self._inputs(batch, frames)
        prefix = read_prefix(observation, batch, *self._prefix)
        return Observation(images, state, environment_state, prefix), self._inputs(batch, frames)

    def inputs(self, batch: int, cameras: Mapping[str, tuple[int, int]] | None) -> Inputs:
        """Shapes of an observation whose frames have these sizes.

        Raises:
            ObservationError: a camera the policy does not have, or one left out.
        """
        names = [camera_name(self._outside(camera.name)) for camera in self._cameras]
        if not is_number(batch, BATCH, integer=True):
            raise ObservationError(f"batch is {shorten_value(batch)}; wanted {BATCH.describe('an integer')}")
        if cameras is None:
            return self._inputs(batch, tuple((camera.shape[1], camera.shape[2]) for camera in self._cameras))
        if set(cameras) != set(names):
            raise ObservationError(f"cameras are {sorted(cameras)}; the policy has {sorted(names)}")
        frames = tuple((cameras[name][0], cameras[name][1]) for name in names)
        if wrong := [name for name, frame in zip(names, frames, strict=True) if not all(map(_is_side, frame))]:
            sizes = shorten_value([cameras[name] for name in wrong])
            raise ObservationError(
                f"frames of {', '.join(wrong)} are {sizes}; wanted sides of {SIDE.maximum:g} pixels at most"
            )
        return self._inputs(batch, frames)

    def _inputs(self, batch: int, frames: tuple[tuple[int, int], ...]) -> Inputs:
        return Inputs(
            batch=batch,
            frames=frames,
            state=None if self._state is None else self._state.shape[0],
            environment_state=None if self._environment_state is None else self._environment_state.shape[0],
            prefix=self._prefix,
            language=self._language,
        )

    def _find(self, observation: Mapping[str, np.ndarray], feature: Feature) -> tuple[str, np.ndarray]:
        for name in self._names[feature.name]:
            if name in observation:
                return name, np.asarray(observation[name])
        expected = sorted(names[0] for names in self._names.values())
        raise ObservationError(
            f"{self._names[feature.name][0]} is missing; found {sorted(observation)}, the policy reads {expected}"
        )

    def _vector(self, observation: Mapping[str, np.ndarray], feature: Feature | None) -> np.ndarray | None:
        if feature is None:
            return None
        name, array = self._find(observation, feature)
        expected = f"(batch, {feature.shape[0]})"
        if array.ndim != 2 or array.shape[1] != feature.shape[0] or array.shape[0] < 1:
            raise ObservationError(f"{name} has shape {array.shape}; wanted {expected}{_batch_hint(array, 1)}")
        if array.dtype == bool or not (
            np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)
        ):
            raise ObservationError(f"{name} is {array.dtype}; wanted {expected} float32")
        array = np.ascontiguousarray(array, np.float32)
        if not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0].tolist()
            raise ObservationError(f"{name} holds {array[tuple(where)]} at {where}; wanted finite numbers")
        return array


def _frames(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 4 or array.shape[3] != 3 or min(array.shape) < 1:
        channels_first = array.ndim == 4 and array.shape[1] == 3
        hint = "; move the channels to the end" if channels_first else _batch_hint(array, 3)
        raise ObservationError(f"{name} has shape {array.shape}; wanted (batch, height, width, 3){hint}")
    if array.dtype != np.uint8:
        raise ObservationError(f"{name} is {array.dtype}; wanted uint8 pixels in 0..255, the program scales them")
    return np.ascontiguousarray(array)


def _is_side(pixels: Any) -> bool:
    return is_number(pixels, SIDE, integer=True)


def _batch_hint(array: np.ndarray, dimensions: int) -> str:
    return "; add a batch axis, array[None]" if array.ndim == dimensions else ""
