"""Observations of messages: parsing, decoding and checks; all mistakes are reported together."""

import base64
import binascii
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jaxmodels import data
from jaxmodels.errors import PictureError
from jaxmodels.types import FRAME_SIDE, describe_channels
from service.control.joints import OUT_OF_RANGE_SHARE, JointTable
from service.errors import InvalidRequest, ServiceError, TooLarge
from service.http.bodies import describe_unknown_field
from service.logging import sanitize_text
from service.setting_types import CONTROL_CHARACTERS
from service.threads import WorkerThread

_MAX_PARTS = 256  # Segments, chunks or scans.
_MIN_CHUNK = 1024  # Smallest average size of a PNG's data chunks in bytes; libpng writes 8192.
_ONE_PASS = (0xC0, 0xC1)  # Markers of a JPEG file that is not progressive.
_SHORT, _CHUNK = struct.Struct(">H"), struct.Struct(">I4s")
_BASE64_PIECE = 1 << 18  # Characters of base64 that are decoded at once, in half a millisecond; a multiple of 4.


def check_image(camera: str, image: np.ndarray, max_pixels: int) -> np.ndarray:
    """Check a picture (h, w, 3) uint8.

    Raises:
        InvalidRequest, TooLarge: the picture has another type or shape, or is larger than allowed.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        wanted = "uint8 [height, width, 3]"
        if image.ndim == 2:
            wanted += ": no axis of channels; a gray picture is np.stack([image] * 3, axis=-1)"
        elif image.ndim == 3 and image.shape[2] != 3:
            wanted += (
                ": move the channels to the end" if image.shape[0] == 3 else f": {describe_channels(image.shape[2])}"
            )
        raise InvalidRequest(
            f"camera {camera!r}: the array is {image.dtype} {list(image.shape)}; wanted {wanted}",
            ("body", "images", camera),
        )
    _check_size(camera, image.shape[0], image.shape[1], max_pixels)
    return image


def decode_image(camera: str, file: bytes | memoryview | str, max_pixels: int) -> np.ndarray:
    """Decode a JPEG or PNG file, also in base64, to (h, w, 3) uint8 RGB.

    Raises:
        InvalidRequest: the file is malformed, not a colour picture, or has too long a side.
        TooLarge: the file declares more than ``max_pixels`` pixels; it is not decoded.
    """
    if isinstance(file, str):
        file = decode_base64(camera, file)
    try:
        _check_parts(file)
        return data.decode_picture(file, lambda height, width: _check_size(camera, height, width, max_pixels))
    except ServiceError:
        raise
    except PictureError as error:
        raise InvalidRequest(f"camera {camera!r}: {error}", ("body", "images", camera)) from None
    except Exception as error:
        # A decoder may raise any exception, whose message is not sent to clients.
        raise InvalidRequest(
            f"camera {camera!r}: the picture cannot be decoded ({type(error).__name__}); wanted a JPEG or PNG file, "
            "or an array",
            ("body", "images", camera),
        ) from None


def decode_base64(camera: str, text: str) -> bytes:
    """Decode a base64 file of a JSON message; raises InvalidRequest."""
    try:
        text = text.partition(",")[2] if text.startswith("data:") else text
        parts = [text[start : start + _BASE64_PIECE] for start in range(0, len(text), _BASE64_PIECE)]
        if any("=" in part for part in parts[:-1]):
            raise ValueError("it has data after its end")
        return b"".join(base64.b64decode(part, validate=True) for part in parts)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            f"camera {camera!r}: the text is not base64 of a JPEG or PNG file", ("body", "images", camera)
        ) from None


def _check_parts(file: bytes | memoryview) -> None:
    """Raise PictureError for an incomplete JPEG or too many parts, which Pillow would take seconds to read."""
    view = memoryview(file)
    if view[:2] == b"\xff\xd8":
        _walk_jpeg(view)
    elif view[:8] == b"\x89PNG\r\n\x1a\n":
        _walk_png(view)


def _walk_jpeg(view: memoryview) -> None:
    at, colours = 2, 0
    for _ in range(_MAX_PARTS):
        while view[at : at + 2] == b"\xff\xff" and at < 2 * _MAX_PARTS:
            at += 1  # Padding.
        if len(view) < at + 4 or view[at] != 0xFF:
            raise PictureError("a damaged or incomplete JPEG file; send the whole file")
        if view[at + 1] == 0xDA:
            break
        if view[at + 1] in _ONE_PASS and len(view) > at + 9:
            colours = view[at + 9]
        at += 2 + _SHORT.unpack_from(view, at + 2)[0]
    else:
        raise PictureError(f"a JPEG file of more than {_MAX_PARTS} parts; save it as a camera does")
    if len(view) > at + 4 and view[at + 4] == colours:
        return  # The first scan has all colours, and decoders refuse another scan.
    # After the first scan's start, FF DA is always the marker of a scan.
    scans = 0
    for start in range(at, len(view), _BASE64_PIECE):
        scans += bytes(view[start : start + _BASE64_PIECE + 1]).count(b"\xff\xda")
        if scans > _MAX_PARTS:
            raise PictureError(f"a JPEG file of more than {_MAX_PARTS} scans; save it as a camera does")


def _walk_png(view: memoryview) -> None:
    at, parts, data = 8, 0, 0
    while at + 8 <= len(view):
        size, kind = _CHUNK.unpack_from(view, at)
        at += 12 + size
        parts, data = parts + (kind != b"IDAT"), data + 1
        if parts > _MAX_PARTS or data > _MAX_PARTS + len(view) // _MIN_CHUNK:
            raise PictureError("a PNG file of too many parts; save it as a camera does")
        if kind == b"IEND":
            break


def _check_size(camera: str, height: int, width: int, max_pixels: int) -> None:
    """Check the size of a picture.

    Raises:
        TooLarge: it has more than ``max_pixels`` pixels, the server's limit.
        InvalidRequest: a side is longer than policies accept.
    """
    if height * width > max_pixels:
        raise TooLarge(f"camera {camera!r}: {width} x {height} is more than {max_pixels} pixels; send smaller pictures")
    if max(height, width) > FRAME_SIDE.maximum:
        raise InvalidRequest(
            f"camera {camera!r}: {width} x {height} has a side of more than {FRAME_SIDE.maximum} pixels; "
            "send smaller pictures",
            ("body", "images", camera),
        )


# One core remains for ticks while clients send many pictures. The threads have the event loop's priority. Pictures are
# decoded exactly: at half the size, libjpeg takes a fifth less time and changes the input of a 224x224 policy by up to
# 65 of 255 (benchmarks/picture_decoding.py).
DECODERS = WorkerThread("pictures", max(min((os.cpu_count() or 2) - 1, 16), 1))
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_PROMPT = 2048
_LATEST_TIMESTAMP = 1e11  # Seconds; a larger float64 cannot represent milliseconds.
_PARTS = (list, Mapping, np.ndarray, str, memoryview)  # Types of one moment's pictures and joints in a list.
# Names of the instruction in openpi, this service and LeRobot.
_PROMPT_KEYS = ("prompt", "language_instruction", "task")
OBSERVATION_FIELDS = ("images", "state", *_PROMPT_KEYS, "number", "timestamp", "extra")
_MAX_LISTED = 8  # Names that an error lists.


@dataclass(frozen=True)
class ObservationSpec:
    """Cameras, ordered joints, pixel limit and number of moments (``steps``) of a session's observations."""

    cameras: Sequence[str]
    joints: JointTable
    max_pixels: int
    steps: int = 1


@dataclass(frozen=True)
class ClientObservation:
    """Observation of one moment, as a client sent it.

    Attributes:
        frames: camera to picture, uint8 (h, w, 3).
        files: camera to an encoded JPEG or PNG file; str is base64.
        joints: wire name to value; may be empty.
        prompt: instruction, or None.
        past: earlier observations, oldest first, if the client sent the whole window.
        timestamp: seconds of the client's clock, or None.
    """

    frames: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Mapping[str, bytes | memoryview | str] = field(default_factory=dict)
    joints: Mapping[str, float] = field(default_factory=dict)
    prompt: str | None = None
    past: Sequence["ClientObservation"] = ()
    timestamp: float | None = None

    def is_complete(self, spec: ObservationSpec) -> bool:
        """Whether it has every camera and every joint."""
        return len(self.frames) + len(self.files) == len(spec.cameras) and len(self.joints) == len(spec.joints)

    async def decode_images(self, spec: ObservationSpec) -> Mapping[str, np.ndarray]:
        """Return all pictures; files are decoded in threads.

        Raises:
            InvalidRequest, TooLarge: a picture cannot be decoded.
        """
        if not self.files:
            return self.frames
        images = await DECODERS.submit_all(
            [partial(decode_image, name, file, spec.max_pixels) for name, file in self.files.items()]
        )
        return {**self.frames, **dict(zip(self.files, images, strict=True))}

    def get_pose(self, spec: ObservationSpec) -> tuple[np.ndarray, list[str]]:
        """Return the measured pose (a,) float32, and the names of joints that are far out of range."""
        names = spec.joints.names
        pose = np.fromiter(map(self.joints.__getitem__, names), np.float32, len(names))
        low, high = spec.joints.ranges
        if ((low <= pose) & (pose <= high)).all():
            return pose, []
        far = np.maximum(low - pose, pose - high) > OUT_OF_RANGE_SHARE * (high - low)
        return pose, [name for name, is_odd in zip(names, far, strict=True) if is_odd]


def check_fields(message: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a message has no unknown fields, because a misspelt ``executed`` would change a motion.

    Raises:
        InvalidRequest: a field is unknown; the text suggests the nearest name.
    """
    if unknown := [name for name in message if name not in known]:
        names = [sanitize_text(str(name)) for name in unknown[:_MAX_LISTED]]
        raise InvalidRequest("; ".join(describe_unknown_field(name, known) for name in names), ("body", names[0]))


def read_observation(message: Mapping[str, Any], spec: ObservationSpec, *, is_complete: bool) -> ClientObservation:
    """Read the observation of a message.

    Args:
        is_complete: require every camera and joint; all may have a time axis if the policy reads several moments.

    Raises:
        InvalidRequest: the text lists all missing and invalid values.
        TooLarge: a picture exceeds the limit.
    """
    problems: list[str] = []
    images = message.get("images", {})
    if not isinstance(images, Mapping):
        raise InvalidRequest("images: wanted a map from camera to picture", ("body", "images"))
    if is_complete and spec.steps > 1 and any(map(_has_time_axis, (*images.values(), message.get("state")))):
        return _read_window(message, images, spec)
    frames, files, known = {}, {}, set(spec.cameras)
    for name, picture in images.items():
        if name not in known:
            problems.append(f"camera {sanitize_text(str(name)[:64])!r} is unknown")
        elif isinstance(picture, np.ndarray):
            frames[name] = check_image(name, picture, spec.max_pixels)
        elif isinstance(picture, str | memoryview):
            files[name] = picture
        else:
            problems.append(f"camera {name!r} is {repr(picture)[:40]}; wanted an array, or a JPEG or PNG file")
    missing = [name for name in spec.cameras if name not in images]
    if is_complete and missing:
        problems.append(f"no picture of {_list_names([f'camera {name!r}' for name in missing])}")
    is_extra_ignored = _read_extra(message, problems)
    joints = _read_joints(message.get("state"), spec.joints, is_complete, problems, is_extra_ignored)
    prompt = _read_prompt(message, problems)
    timestamp = _read_timestamp(message, problems)
    if problems:
        raise _observation_error(problems, spec)
    return ClientObservation(frames, files, joints, prompt, timestamp=timestamp)


def _has_time_axis(value: object) -> bool:
    """Whether a value has pictures of a camera, or joints, of several moments."""
    if isinstance(value, np.ndarray):
        return value.ndim == 4 or (value.ndim == 2 and len(value) > 1)
    return isinstance(value, list) and any(isinstance(part, _PARTS) for part in value)


def _read_window(message: Mapping[str, Any], images: Mapping[str, Any], spec: ObservationSpec) -> ClientObservation:
    """Read observations of all moments, oldest first; raises InvalidRequest for an invalid observation."""
    parts = {f"camera {sanitize_text(str(name)[:64])!r}": picture for name, picture in images.items()}
    counts = {
        name: len(value) if _has_time_axis(value) else 1
        for name, value in (parts | {"state": message.get("state")}).items()
        if value is not None
    }
    if wrong := [f"{name} has {count}" for name, count in counts.items() if count != spec.steps]:
        raise InvalidRequest(
            f"{'; '.join(wrong[:16])}; wanted {spec.steps} moments of every camera and of state, oldest first, or a "
            "single moment without an axis of time",
            ("body",),
        )
    read = []
    for step in range(spec.steps):
        pictures = {name: picture[step] for name, picture in images.items()}
        moment = {**message, "images": pictures}
        if "state" in counts:
            moment["state"] = message["state"][step]
        try:
            read.append(read_observation(moment, replace(spec, steps=1), is_complete=True))
        except InvalidRequest as error:
            raise InvalidRequest(f"moment {step + 1} of {spec.steps}: {error}", error.loc) from None
    return replace(read[-1], past=tuple(read[:-1]))


def check_same_sizes(frames: Mapping[str, np.ndarray], sizes: Mapping[str, tuple[int, int]]) -> None:
    """Check that pictures of a moment have the sizes of the newest moment; raises InvalidRequest."""
    wrong = {camera: frame.shape[:2] for camera, frame in frames.items() if frame.shape[:2] != sizes[camera]}
    if wrong:
        named = "; ".join(f"camera {camera!r} has {list(size)} before" for camera, size in wrong.items())
        wanted = {camera: list(size) for camera, size in sizes.items()}
        raise InvalidRequest(f"{named}; wanted pictures of one size per camera: {wanted}", ("body", "images"))


def _read_timestamp(message: Mapping[str, Any], problems: list[str]) -> float | None:
    timestamp = message.get("timestamp")
    if timestamp is None:
        return None
    is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
    if not is_number or not abs(timestamp) < _LATEST_TIMESTAMP:
        problems.append("timestamp: wanted seconds by your clock, a finite number")
        return None
    return float(timestamp)


def _read_prompt(message: Mapping[str, Any], problems: list[str]) -> str | None:
    prompts = {name: message[name] for name in _PROMPT_KEYS if message.get(name) is not None}
    for name, prompt in prompts.items():
        if not isinstance(prompt, str) or len(prompt) > _MAX_PROMPT or CONTROL_CHARACTERS.search(prompt):
            found = f"has {len(prompt)} characters" if isinstance(prompt, str) else f"is {repr(prompt)[:40]}"
            if isinstance(prompt, str) and (control := CONTROL_CHARACTERS.search(prompt)):
                found = f"has the control character {control[0]!a}"
            problems.append(
                f"{name} {found}; wanted text of at most {_MAX_PROMPT} characters, without control characters"
            )
            return None
    if len(set(prompts.values())) > 1:
        problems.append(f"{' and '.join(prompts)} differ; send only one")
    return next(iter(prompts.values()), None)


def _read_extra(message: Mapping[str, Any], problems: list[str]) -> bool:
    """Return whether unknown names in ``state`` are ignored."""
    extra = message.get("extra", "refuse")
    if not isinstance(extra, str) or extra not in ("refuse", "ignore"):
        problems.append(f"extra: got {extra!r:.40}; wanted 'refuse' or 'ignore'")
    return isinstance(extra, str) and extra == "ignore"


def _read_joints(
    state: object, table: JointTable, is_complete: bool, problems: list[str], is_extra_ignored: bool
) -> Mapping[str, float]:
    if state is None:
        if is_complete:
            problems.append("state is missing: the measured joints, which motion is checked against")
        return {}
    if isinstance(state, Mapping):
        return _read_named_joints(state, table, is_complete, problems, is_extra_ignored)
    try:
        values = np.asarray(state if isinstance(state, list | np.ndarray) else None)
    except ValueError:
        values = np.zeros((0, 0))
    if values.ndim == 2 and len(values) == 1:
        values = values[0]
    if values.dtype.kind not in "iuf" or values.shape != (len(table),):
        is_array = isinstance(state, list | np.ndarray) and values.dtype.kind in "iuf"
        found = f"{values.dtype.name} {list(values.shape)}" if is_array else f"got {state!r:.40}"
        problems.append(f"state: {found}; wanted {len(table)} numbers, in a list or by name")
        return {}
    numbers = [float(number) for number in values]
    if not all(-_FLOAT32_MAX <= number <= _FLOAT32_MAX for number in numbers):  # False for NaN.
        problems.append("state: NaN, infinity or a number beyond float32; wanted finite numbers")
        return {}
    return dict(zip(table.names, numbers, strict=True))


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _observation_error(problems: Sequence[str], spec: ObservationSpec) -> InvalidRequest:
    return InvalidRequest(
        f"{'; '.join(problems[:16])}; wanted cameras {list(spec.cameras)} and joints {list(spec.joints.names)}",
        ("body",),
    )


def _read_named_joints(
    state: Mapping[Any, Any], table: JointTable, is_complete: bool, problems: list[str], is_extra_ignored: bool
) -> Mapping[str, float]:
    known = {name: value for name, value in state.items() if table.find(name) is not None}
    if len(known) < len(state) and not is_extra_ignored:
        unknown = [repr(str(name)[:40]) for name in state if name not in known]
        problems.append(f'state has unknown names: {_list_names(unknown)}; send "extra": "ignore" to have them ignored')
    update = table.read_update(known)
    if update.dropped:
        unusable = [
            f"{name!r} is {value!r:.40}" for name, value in known.items() if table.find(name) not in update.values
        ]
        problems.append(f"state: {_list_names(unusable)} ({', '.join(update.dropped)})")
    given = set(map(table.find, known))
    missing = [name for position, name in enumerate(table.names) if position not in given]
    if is_complete and missing:
        problems.append(f"state lacks {_list_names(missing)}")
    return {table.names[place]: value for place, value in update.values.items()}
