"""openpi's WebSocket protocol and key names.

A client connects, is sent metadata, and from then on each observation that it sends is answered with a chunk. An error
is a text frame, which that client raises, and the end of the connection.
Source: Physical-Intelligence/openpi, src/openpi/serving/websocket_policy_server.py and packages/openpi-client.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.errors import InvalidRequest, ServiceError
from service.http.fair_queue import measure_steps
from service.logging import sanitize_text
from service.streaming import codec, observation
from service.streaming.direct_inference import DirectInference
from service.streaming.observation import Observation, Wanted
from service.streaming.websocket import SocketClosed, StreamSocket

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


class OpenpiKeys:
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
        As ``OpenpiKeys.renamed``.
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
        came = ", ".join(repr(sanitize_text(key, 48)) for key in list(flat)[:16]) or "nothing"
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


log = logging.getLogger(__name__)

_LOOK = 2.0  # seconds between looks at whether the client's key still counts


@dataclass(frozen=True)
class _Alike:
    """What messages of one layout have in common: all but the pixels, and the values of the joints."""

    wanted: Wanted
    frames: Sequence[tuple[str, codec.ArrayPlace]]
    state: codec.ArrayPlace
    prompt: str | None


class ObservationReader:
    """Reads the observations of one client, which are mostly alike but for the numbers in their arrays.

    Names, dtypes, shapes and the prompt are looked at once: as long as all bytes but those of arrays' data are the
    bytes of the message before, only the joints' values are checked.
    """

    def __init__(self) -> None:
        self._unpacker = codec.Unpacker()
        self._naming = OpenpiKeys()
        self._alike: _Alike | None = None

    def read(self, body: memoryview, wanted: Wanted) -> Observation:
        """The observation of a message.

        Raises:
            InvalidRequest, TooLarge: as ``packing.unpack``, ``OpenpiKeys.renamed`` and ``observation.read``.
        """
        alike = self._alike
        if alike is not None and alike.wanted is wanted and self._unpacker.is_alike(body):
            joints = observation.joints_of(alike.state.array(body), wanted)
            frames = {camera: place.array(body) for camera, place in alike.frames}
            return Observation(frames, {}, joints, alike.prompt)
        self._alike = None
        message = self._unpacker.unpack(body)
        if not isinstance(message, Mapping):
            raise InvalidRequest("an observation is a map")
        named = self._naming.renamed(message, wanted)
        seen = observation.read(named, wanted, is_whole=True)
        self._alike = self._in_common(message, named["state"], seen, wanted)
        return seen

    def _in_common(self, message: Mapping[Any, Any], state: Any, seen: Observation, wanted: Wanted) -> _Alike | None:
        """What the next message has in common with this one; None where more than its arrays has to be looked at."""
        layout = self._unpacker.layout
        if layout is None or not isinstance(state, np.ndarray) or state.ndim != 1:
            return None
        # An array that was turned or is not of the message itself is none of these.
        places = {id(value): layout[key] for key, value in message.items() if isinstance(value, np.ndarray)}
        frames = [(camera, places[id(frame)]) for camera, frame in seen.frames.items() if id(frame) in places]
        if len(frames) < len(seen.frames) or seen.files or id(state) not in places:
            return None
        return _Alike(wanted, frames, places[id(state)], seen.prompt)


class OpenpiProtocol:
    """One client."""

    def __init__(self, socket: StreamSocket, consultation: DirectInference, is_still_authorized: Callable[[], bool]):
        self._socket = socket
        self._consultation = consultation
        self._is_still_authorized = is_still_authorized
        self._looked_at = time.monotonic()
        self._before: float | None = None
        self._reader = ObservationReader()

    async def attend(self) -> None:
        """Serve it until its socket ends, or something goes wrong."""
        self._socket.spent = 0.0
        await measure_steps(self._serve(), self._count)

    def _count(self, seconds: float) -> None:
        assert self._socket.spent is not None
        self._socket.spent += seconds

    async def _serve(self) -> None:
        try:
            self._socket.send(codec.pack_openpi(dict(self._consultation.about())))
            while True:
                raw = await self._socket.receive()
                began = time.monotonic()
                self._check_key(began)
                told = await self._answer(raw, began)
                self._socket.send(codec.pack_openpi(told))
                self._before = time.monotonic() - began
        except SocketClosed:
            return
        except ServiceError as error:
            self._end(f"{error.code}: {error}")
        except Exception:
            log.exception("an observation of session %s failed", self._consultation.session.id)
            self._end("internal: the server's log says more")

    async def _answer(self, raw: memoryview | str, began: float) -> dict[str, Any]:
        if isinstance(raw, str):
            raise InvalidRequest("observations are binary; this is text")
        thought = await self._consultation.think(self._reader.read(raw, self._consultation.wanted()))
        timing = {"infer_ms": (time.monotonic() - began) * 1e3}
        if self._before is not None:
            timing["prev_total_ms"] = self._before * 1e3
        inference = thought.inference
        return {
            "actions": thought.actions,
            "clamped": list(thought.clamped),
            "policy_timing": {"infer_ms": (inference.to_device + inference.compute + inference.to_host) * 1e3},
            "server_timing": timing,
        }

    def _check_key(self, now: float) -> None:
        if now - self._looked_at > _LOOK:
            self._looked_at = now
            if not self._is_still_authorized():
                self._socket.close(1008, "the key does not count any more")
                raise SocketClosed

    def _end(self, text: str) -> None:
        self._socket.send(text.encode(), is_text=True)
        self._socket.close(1011, "the text before says why")
