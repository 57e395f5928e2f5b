"""What an openpi client calls its cameras and joints, and what the policy calls them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from service.doors.observation import Wanted
from service.errors import InvalidRequest
from service.words import printable

_STATES = ("observation.state", "observation/state", "state", "observation/joint_position")
_PROMPTS = ("prompt", "task")
# What openpi's own examples send of one camera; a policy of one camera has no other to mean.
_IMAGES = ("observation/image", "image", "observation/exterior_image_1_left")
# How the policy's camera may be written, the exact name first.
_CAMERAS = (
    "observation.images.{}",
    "observation/images/{}",
    "observation/{}",
    "images/{}",
    "{}",
    "observation/{}_image",
    "observation.{}",
)

# Camera to key, that of the state, that of the prompt.
_Keys = tuple[Sequence[tuple[str, str]], str, str | None]


class Naming:
    """What one client calls things; that is the same each time, so it is found once and then looked up."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], Sequence[str]] | None = None
        self._keys: _Keys = ((), "", None)

    def renamed(self, message: Mapping[Any, Any], wanted: Wanted) -> dict[str, Any]:
        """An observation as openpi's clients send it, in our names.

        Each camera is found by its exact feature name first, then by the ways in which that is usually written; and
        where the policy has one camera and the client sent one picture under openpi's usual name, it is that. Nothing
        else is guessed: what is left over is not looked at, as policies of openpi ignore it too.

        Raises:
            InvalidRequest: something is missing, or could be two things; says what came.
        """
        flat, now = message, (tuple(message), wanted.cameras)
        if now != self._known or dict in map(type, message.values()):
            flat = _flat(message)
            self._keys = _keys(flat, wanted)
            self._known = now if len(flat) == len(message) and flat.keys() == message.keys() else None
        cameras, state, prompt = self._keys
        images = {camera: _picture(camera, flat[key]) for camera, key in cameras}
        told = {"images": images, "state": flat[state]}
        if prompt is not None:
            told["prompt"] = flat[prompt]
        return told


def _keys(flat: Mapping[str, Any], wanted: Wanted) -> _Keys:
    """Where cameras, state and prompt are.

    Raises:
        As ``Naming.renamed``.
    """
    cameras: list[tuple[str, str]] = []
    wrong: list[str] = []
    for camera in wanted.cameras:
        found = [key for key in (form.format(camera) for form in _CAMERAS) if key in flat]
        if not found and len(wanted.cameras) == 1:
            found = [key for key in _IMAGES if key in flat]
        if not found:
            wrong.append(f"no picture of camera {camera!r} (send it as 'observation.images.{camera}')")
            continue
        cameras.append((camera, found[0]))
    states = [key for key in _STATES if key in flat]
    if not states:
        wrong.append("no state (send it as 'observation.state')")
    prompts = [key for key in _PROMPTS if key in flat]
    if wrong:
        came = ", ".join(repr(printable(key, 48)) for key in list(flat)[:16]) or "nothing"
        raise InvalidRequest(f"{'; '.join(wrong)}. What came: {came}")
    return (cameras, states[0], prompts[0] if prompts else None)


def _flat(message: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested maps ({"images": {"front": ...}}) as ``images/front``; their keys are text."""
    flat: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise InvalidRequest("the keys of an observation are text")
        if isinstance(value, Mapping):
            flat |= {f"{key}/{part}": inner for part, inner in value.items() if isinstance(part, str)}
        else:
            flat[key] = value
    return flat


def _picture(camera: str, picture: Any) -> Any:
    if not isinstance(picture, np.ndarray):
        raise InvalidRequest(f"camera {camera!r}: wanted an array")
    if picture.ndim == 4 and len(picture) == 1:
        picture = picture[0]
    if picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[2] != 3:
        # Channels first, as openpi's ALOHA examples send them.
        picture = np.ascontiguousarray(picture.transpose(1, 2, 0))
    return picture
