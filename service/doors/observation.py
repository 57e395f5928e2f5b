"""What a client saw and felt, out of a message: everything that is wrong with it is said at once."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from service.doors import pictures
from service.engine.served import IMAGES
from service.engine.worker import yield_to_others
from service.errors import InvalidRequest
from service.motion.joints import ODD, JointTable
from service.words import printable

# As few as leave a core to the ticks, and below them: whoever floods a door with pictures waits, robots do not.
_DECODERS = ThreadPoolExecutor(
    max(min((os.cpu_count() or 2) - 1, 4), 1), "pictures", initializer=yield_to_others, initargs=(5,)
)
_LARGEST = float(np.finfo(np.float32).max)
_PROMPT = 2048
_NOT_FINITE = "state holds NaN, infinity or what is as good as that"
# What the instruction may be called: openpi's name, this service's, LeRobot's.
_PROMPTS = ("prompt", "language_instruction", "task")
# In records, logs and on pages, control characters do what nobody asked for, and a lone surrogate breaks all of them.
_UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Wanted:
    """What a session's observations hold.

    Attributes:
        cameras: names.
        joints: in order.
        pixels: of one picture, at most.
    """

    cameras: Sequence[str]
    joints: JointTable
    pixels: int

    @cached_property
    def features(self) -> Sequence[tuple[str, str]]:
        """Each camera, and what its picture is called in an observation of the policy."""
        return [(camera, f"{IMAGES}{camera}") for camera in self.cameras]


@dataclass(frozen=True)
class Observation:
    """Of one moment.

    Attributes:
        frames: camera to picture, uint8 (h, w, 3).
        files: camera to a JPEG or PNG file that is not decoded yet; as text in base64.
        joints: wire name to value, as it came; empty when there was none.
        prompt: what is to be done, or None.
    """

    frames: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Mapping[str, bytes | memoryview | str] = field(default_factory=dict)
    joints: Mapping[str, float] = field(default_factory=dict)
    prompt: str | None = None

    async def decoded(self, wanted: Wanted) -> Mapping[str, np.ndarray]:
        """All pictures; files are decoded in threads meanwhile.

        Raises:
            InvalidRequest, TooLarge: one of them cannot be.
        """
        if not self.files:
            return self.frames
        loop = asyncio.get_running_loop()
        images = await asyncio.gather(
            *(
                loop.run_in_executor(_DECODERS, pictures.decode, name, file, wanted.pixels)
                for name, file in self.files.items()
            )
        )
        return {**self.frames, **dict(zip(self.files, images, strict=True))}

    def pose(self, wanted: Wanted) -> tuple[np.ndarray, list[str]]:
        """(a,) float32 in the order of the joints, inside their ranges; and which came far outside of them."""
        names = wanted.joints.names
        came = np.fromiter(map(self.joints.__getitem__, names), np.float32, len(names))
        low, high = wanted.joints.ends
        pose = np.minimum(np.maximum(came, low), high)
        if pose.tobytes() == came.tobytes():
            return pose, []
        far = np.abs(came - pose) > ODD * (high - low)
        return pose, [name for name, is_odd in zip(wanted.joints.names, far, strict=True) if is_odd]


def read(message: Mapping[str, Any], wanted: Wanted, *, is_whole: bool) -> Observation:
    """The observation of a message.

    Args:
        is_whole: whether every camera and every joint has to be there.

    Raises:
        InvalidRequest: what is missing, unknown, misshaped or not finite; all of it.
        TooLarge: a picture is.
    """
    wrong: list[str] = []
    images = message.get("images", {})
    if not isinstance(images, Mapping):
        raise InvalidRequest("images: wanted a map from camera to picture", ("body", "images"))
    frames, files, known = {}, {}, set(wanted.cameras)
    for name, picture in images.items():
        if name not in known:
            wrong.append(f"camera {printable(str(name)[:64])!r} is unknown")
        elif isinstance(picture, np.ndarray):
            frames[name] = pictures.raw(name, picture, wanted.pixels)
        elif isinstance(picture, str | memoryview):
            files[name] = picture
        else:
            wrong.append(f"camera {name!r}: wanted an array, or a JPEG or PNG file")
    missing = [name for name in wanted.cameras if name not in images]
    if is_whole and missing:
        wrong.append(f"cameras {', '.join(missing)} are missing")
    joints = _joints(message.get("state"), wanted.joints, is_whole, wrong)
    prompt = _prompt(message, wrong)
    if wrong:
        raise _refusal(wrong, wanted)
    return Observation(frames, files, joints, prompt)


def _prompt(message: Mapping[str, Any], wrong: list[str]) -> str | None:
    said = {name: message[name] for name in _PROMPTS if message.get(name) is not None}
    for name, prompt in said.items():
        if not isinstance(prompt, str) or len(prompt) > _PROMPT or _UNUSUAL.search(prompt):
            wrong.append(f"{name}: wanted text of at most {_PROMPT} characters, without control characters")
            return None
    if len(set(said.values())) > 1:
        wrong.append(f"{' and '.join(said)} say different things; wanted one of them")
    return next(iter(said.values()), None)


def _joints(state: object, table: JointTable, is_whole: bool, wrong: list[str]) -> Mapping[str, float]:
    if state is None:
        if is_whole:
            wrong.append("state is missing: the measured joints, which motion is checked against")
        return {}
    if isinstance(state, Mapping):
        return _named(state, table, is_whole, wrong)
    try:
        values = np.asarray(state if isinstance(state, list | np.ndarray) else None)
    except ValueError:
        values = np.zeros((0, 0))
    if values.ndim == 2 and len(values) == 1:
        values = values[0]
    if values.dtype.kind not in "iuf" or values.shape != (len(table),):
        wrong.append(f"state: {values.dtype.name} {list(values.shape)}; wanted {len(table)} numbers")
        return {}
    found = _finite(values, table)
    if found is None:
        wrong.append(_NOT_FINITE)
        return {}
    return found


def _finite(values: np.ndarray, table: JointTable) -> Mapping[str, float] | None:
    """Joint to value, of (a,) numbers; None when one is not finite."""
    found = list(map(float, values.tolist()))
    for value in found:
        if not -_LARGEST <= value <= _LARGEST:  # false of NaN
            return None
    return dict(zip(table.names, found, strict=True))


def joints_of(state: np.ndarray, wanted: Wanted) -> Mapping[str, float]:
    """Joint to value, of an array (a,) whose shape and dtype were accepted before.

    Raises:
        InvalidRequest: a value is not finite.
    """
    found = _finite(state, wanted.joints)
    if found is None:
        raise _refusal([_NOT_FINITE], wanted)
    return found


def _refusal(wrong: Sequence[str], wanted: Wanted) -> InvalidRequest:
    return InvalidRequest(
        f"{'; '.join(wrong[:16])}; wanted cameras {list(wanted.cameras)} and joints {list(wanted.joints.names)}",
        ("body",),
    )


def _named(state: Mapping[Any, Any], table: JointTable, is_whole: bool, wrong: list[str]) -> Mapping[str, float]:
    update = table.read(state)
    if update.dropped:
        # A set: 4096 names against a list of 256 joints take 20 ms.
        strange = sorted(str(name)[:40] for name in state.keys() - set(table.names))[:4]
        known = f"; {', '.join(map(printable, strange))} is none of {', '.join(table.names)}" if strange else ""
        wrong.append("state: " + ", ".join(f"{count} x {reason}" for reason, count in update.dropped.items()) + known)
        return {}
    missing = [name for place, name in enumerate(table.names) if place not in update.values]
    if is_whole and missing:
        wrong.append(f"state lacks {', '.join(missing)}")
    # As they came: whoever looks for values in another unit has to see them.
    return {table.names[place]: update.odd.get(place, value) for place, value in update.values.items()}
