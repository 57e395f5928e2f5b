"""Checks of observations and plan prefixes, and their conversion to arrays for compiled programs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxmodels.errors import ObservationError
from jaxmodels.normalization import get_outside_name
from jaxmodels.policies import get_policy_type
from jaxmodels.policies.lerobot_folder import Checkpoint
from jaxmodels.program import Inputs
from jaxmodels.ranges import Range, is_number, shorten_value
from jaxmodels.types import (
    CHANNELS,
    FRAME_SIDE,
    IMAGES,
    PADDING_MASK,
    PREFIX_ACTIONS,
    PREFIX_DELAY,
    PREFIX_LENGTH,
    Feature,
    Observation,
    Prefix,
    camera_name,
    describe_channels,
    is_empty_camera,
)

NAMES = (PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH)


def read_prefix(observation: Mapping[str, np.ndarray], batch: int, chunk: int, action: int) -> Prefix | None:
    """Return an observation's plan prefix, None if no member has one; raises ObservationError for wrong parts."""
    present = [name for name in NAMES if name in observation]
    if not present:
        return None
    if missing := [name for name in NAMES if name not in present]:
        raise ObservationError(
            f"{', '.join(missing)} missing, but {', '.join(present)} given; a plan is all three, or none"
        )
    delay, length = (_counts(name, observation[name], batch, chunk) for name in (PREFIX_DELAY, PREFIX_LENGTH))
    if (delay > length).any():
        member = int(np.argmax(delay > length))
        raise ObservationError(
            f"{PREFIX_DELAY} is {delay[member]} for member {member}, and {PREFIX_LENGTH} {length[member]}; "
            "at most the planned actions can be executed"
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
    return Prefix(actions, delay, length) if length.any() else None


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
        text, length = config.text_encoder, config.prompt_length
        self._language: tuple[int, ...] | None = None if text is None else (text.length, text.width)
        self._short_prompts: tuple[int, ...] = ()
        if length is not None:
            self._language, self._short_prompts = (length,), config.short_prompts
        self._allows_absent: bool = config.allows_absent_cameras
        self._steps: int = config.observation_steps
        self._noise: tuple[int, int] | None = config.noise
        self._noise_steps: int = config.noise_steps
        self._outside = partial(get_outside_name, checkpoint.normalization.renames)
        features = (*self._cameras, self._state, self._environment_state)
        # A feature may have its outside name, its inside name, or (cameras) observation.images.<camera>.
        own = [feature for feature in features if feature is not None]
        self._names = {feature.name: self._aliases(feature, own) for feature in own}

    def _aliases(self, feature: Feature, own: Sequence[Feature]) -> tuple[str, ...]:
        outside = self._outside(feature.name)
        # The outside name of another feature never names this feature.
        taken = {self._outside(other.name) for other in own if other is not feature}
        names = [outside, *({feature.name} - taken)]
        if feature.type == "VISUAL":
            names.append(IMAGES + camera_name(outside))
        return tuple(dict.fromkeys(names))

    def read(
        self, observation: Mapping[str, np.ndarray], noise: Any = None, step_noise: Any = None
    ) -> tuple[Observation, Inputs]:
        """Return an observation's arrays in the policy's order without texts, and their shapes.

        Raises:
            ObservationError: a feature or noise is missing, has the wrong shape or dtype, or is not finite.
        """
        images = self._images(observation)
        masks = self._masks(observation, images)
        state = self._vector(observation, self._state)
        environment_state = self._vector(observation, self._environment_state)
        arrays = [array for array in (*images, state, environment_state, masks) if array is not None]
        batches = {array.shape[0] for array in arrays}
        if len(batches) != 1:
            sizes = {name: len(observation[name]) for name in observation if name.startswith("observation.")}
            raise ObservationError(f"features have different batch sizes: {sizes}; wanted one for all")
        frames = tuple(None if image is None else (image.shape[-3], image.shape[-2]) for image in images)
        batch = batches.pop()
        noise, step_noise = self._read_noise(batch, noise, step_noise)
        inputs = self._inputs(batch, frames)
        if noise is not None:
            inputs = replace(inputs, noise=self._noise, noise_steps=self._noise_steps)
        if masks is not None:
            inputs = replace(inputs, has_masks=True)
        prefix = None
        if self._prefix is not None:
            prefix = read_prefix(observation, batch, *self._prefix)
            if prefix is not None:
                inputs = replace(inputs, prefix=self._prefix)
        elif present := [name for name in NAMES if name in observation]:
            raise ObservationError(
                f"{', '.join(present)} in the observation of a policy that continues no plan; leave it out "
                "(its requirements have takes_prefix false)"
            )
        arrays = Observation(images, state, environment_state, prefix, noise=noise, step_noise=step_noise)
        return arrays._replace(image_masks=masks), inputs

    def _images(self, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray | None, ...]:
        """Return the frames of each camera; None for an absent camera, if the policy allows it."""
        absent = [
            camera for camera in self._cameras if not any(name in observation for name in self._names[camera.name])
        ]
        if self._allows_absent:
            known = {name for camera in self._cameras for name in self._names[camera.name]}
            known |= {f"{name}{PADDING_MASK}" for name in known}
            # Otherwise a misspelled name would count as an absent camera.
            if strange := sorted(name for name in observation if name.startswith(IMAGES) and name not in known):
                names = [self._names[camera.name][0] for camera in absent]
                missing = f", and {', '.join(names)} missing" if names else ""
                raise ObservationError(
                    f"{', '.join(strange)} {'is' if len(strange) == 1 else 'are'} no camera of this policy{missing}; "
                    f"it has {', '.join(self._names[camera.name][0] for camera in self._cameras)}"
                )
            if len(absent) == len(self._cameras):
                raise ObservationError(f"no image at all; the policy wants at least one of {sorted(known)[:64:2]}")
        left_out = absent if self._allows_absent else ()
        return tuple(
            None if camera in left_out else _frames(*self._find(observation, camera), self._steps)
            for camera in self._cameras
        )

    def _masks(self, observation: Mapping[str, np.ndarray], images: tuple[np.ndarray | None, ...]) -> np.ndarray | None:
        """Return which images count, (b, cameras); None if the observation has no masks."""
        possible = [[f"{name}{PADDING_MASK}" for name in self._names[camera.name]] for camera in self._cameras]
        names = [next((name for name in masks if name in observation), None) for masks in possible]
        if not any(names):
            return None
        if not self._allows_absent:
            raise ObservationError(f"{next(filter(None, names))} is given, but this policy needs all of its cameras")
        batch = next(image.shape[0] for image in images if image is not None)
        masks = np.ones((batch, len(images)), bool)
        for column, name in enumerate(names):
            if name is not None:
                mask = np.asarray(observation[name])
                if mask.shape != (batch,) or mask.dtype != bool:
                    raise ObservationError(f"{name} is {mask.dtype}{list(mask.shape)}; wanted bool[{batch}]")
                masks[:, column] = mask
        return masks

    def _read_noise(self, batch: int, noise: Any, step_noise: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
        if noise is None and step_noise is None:
            return None, None
        if self._noise is None:
            raise ObservationError("noise is given, but this policy takes no noise")
        expected = (batch, *self._noise)
        if not self._noise_steps and step_noise is not None:
            raise ObservationError("step_noise is given, but the policy's sampler adds no noise in its steps")
        if noise is None or (self._noise_steps and step_noise is None):
            missing = "noise" if noise is None else "step_noise"
            raise ObservationError(f"{missing} is missing; this policy takes both noise and step_noise, or none")
        of_steps = None if step_noise is None else _numbers("step_noise", step_noise, (self._noise_steps, *expected))
        return _numbers("noise", noise, expected), of_steps

    def list_variants(
        self, batch: int, cameras: Mapping[str, tuple[int, int]] | None, *, with_plan: bool
    ) -> list[Inputs]:
        """Return the shapes of all observations with frames of these sizes, the most usual first.

        Args:
            with_plan: whether to include observations with a plan to continue, if the policy can continue plans.
        """
        inputs = self.inputs(batch, cameras)
        languages = [self._language, *((length,) for length in self._short_prompts)]
        prefixes = (None, self._prefix) if with_plan and self._prefix is not None else (None,)
        return [replace(inputs, language=language, prefix=prefix) for language in languages for prefix in prefixes]

    def inputs(self, batch: int, cameras: Mapping[str, tuple[int, int]] | None, *, with_plan: bool = False) -> Inputs:
        """Return shapes of an observation with frames of these sizes; raises ObservationError for wrong cameras."""
        names = [camera_name(self._outside(camera.name)) for camera in self._cameras]
        empty = {camera_name(camera.name) for camera in self._cameras if is_empty_camera(camera.name)}
        if not is_number(batch, BATCH, integer=True):
            raise ObservationError(f"batch is {shorten_value(batch)}; wanted {BATCH.describe('an integer')}")
        if cameras is None:
            cameras = {
                name: (camera.shape[1], camera.shape[2])
                for name, camera in zip(names, self._cameras, strict=True)
                if name not in empty
            }
        if not set(names) - empty <= set(cameras) <= set(names):
            raise ObservationError(f"cameras are {sorted(cameras)}; the policy has {sorted(set(names) - empty)}")
        frames = tuple((cameras[name][0], cameras[name][1]) if name in cameras else None for name in names)
        is_right = partial(is_number, allowed=FRAME_SIDE, integer=True)
        if wrong := [name for name, size in cameras.items() if not all(map(is_right, size))]:
            sizes = shorten_value([cameras[name] for name in wrong])
            raise ObservationError(
                f"frames of {', '.join(wrong)} are {sizes}; wanted sides of {FRAME_SIDE.maximum:g} pixels at most"
            )
        return replace(self._inputs(batch, frames), prefix=self._prefix if with_plan else None)

    def _inputs(self, batch: int, frames: tuple[tuple[int, int] | None, ...]) -> Inputs:
        return Inputs(
            batch=batch,
            frames=frames,
            state=None if self._state is None else self._state.shape[0],
            environment_state=None if self._environment_state is None else self._environment_state.shape[0],
            language=self._language,
            steps=self._steps,
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
        expected = _format_axes(self._steps, feature.shape[0])
        wrong = _axis_errors(array.shape, self._steps, 1)
        if not wrong and array.shape[-1] != feature.shape[0]:
            wrong = [f"{array.shape[-1]} numbers, wanted {feature.shape[0]}"]
        if wrong:
            raise ObservationError(f"{name} has shape {array.shape}; wanted {expected}: {', '.join(wrong)}")
        if array.dtype == bool or not (
            np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)
        ):
            raise ObservationError(f"{name} is {array.dtype}; wanted {expected} float32")
        return _finite(name, array)


def _finite(name: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # A number that is too large for float32 is reported below.
        numbers = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(numbers).all():
        where = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise ObservationError(f"{name} holds {array[tuple(where)]} at {where}; wanted finite numbers of float32")
    return numbers


def _numbers(name: str, value: Any, expected: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != expected or not np.issubdtype(array.dtype, np.floating):
        raise ObservationError(f"{name} is {array.dtype}{list(array.shape)}; wanted float32{list(expected)}")
    return _finite(name, array)


def _frames(name: str, array: np.ndarray, steps: int) -> np.ndarray:
    if wrong := _frame_errors(array.shape, steps):
        expected = _format_axes(steps, "height", "width", 3)
        raise ObservationError(f"{name} has shape {array.shape}; wanted {expected}: {', '.join(wrong)}")
    if array.dtype != np.uint8:
        raise ObservationError(f"{name} is {array.dtype}; wanted uint8 pixels in 0..255, the program scales them")
    return np.ascontiguousarray(array)


def _format_axes(steps: int, *axes: int | str) -> str:
    return f"({', '.join(map(str, ('batch', *(() if steps == 1 else (steps,)), *axes)))})"


def _frame_errors(shape: tuple[int, ...], steps: int) -> list[str]:
    """Return what is wrong with the shape of frames (b, h, w, 3), or (b, t, h, w, 3); empty when it is right."""
    axes = 4 if steps == 1 else 5
    if len(shape) < axes and shape[-1:] and shape[-1] not in CHANNELS and 3 not in shape[-3:-2]:
        return ["no axis of channels, wanted 3: RGB; a gray picture is np.stack([image] * 3, axis=-1)"]
    wrong = _axis_errors(shape, steps, 3)
    if len(shape) >= 3 and shape[-1] != 3:
        wrong.append("move the channels to the end" if shape[-3] == 3 else describe_channels(shape[-1]))
    elif len(shape) == axes and 0 in shape[-3:-1]:
        wrong.append("a picture without pixels")
    return wrong


def _axis_errors(shape: tuple[int, ...], steps: int, axes: int) -> list[str]:
    """Return what is wrong with the axes of batch and time, which precede a feature's own `axes`."""
    leading = 1 if steps == 1 else 2
    if len(shape) == leading + axes - 1:
        time = "" if steps == 1 else f", or an axis of time: the policy looks at {steps} observations, oldest first"
        return [f"add a batch axis, array[None]{time}"]
    if len(shape) != leading + axes:
        return [f"{len(shape)} dimensions, wanted {leading + axes}"]
    wrong = ["an empty batch, wanted 1 or more observations"] if shape[0] == 0 else []
    if steps > 1 and shape[1] != steps:
        wrong.append(f"{shape[1]} observations on the axis of time, wanted {steps}, oldest first")
    return wrong
