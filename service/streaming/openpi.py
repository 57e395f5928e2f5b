"""openpi's WebSocket protocol and key names.

Source: Physical-Intelligence/openpi, src/openpi/serving/websocket_policy_server.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from service.errors import InvalidRequest, MoveRefused, ServiceError, SessionLoading, UnknownSession
from service.http.fair_queue import measure_steps
from service.logging import sanitize_text
from service.streaming import codec, observation
from service.streaming.direct_inference import DirectInference
from service.streaming.observation import ClientObservation, ObservationSpec
from service.streaming.websocket import SocketClosed, StreamSocket

_STATE_KEYS = ("observation.state", "observation/state", "state")
# Parts of DROID's state.
_DROID_KEYS = ("observation/joint_position", "observation/gripper_position")
_PROMPT_KEYS = ("prompt", "task")
# Keys of openpi's examples, for a policy with one camera.
_IMAGE_KEYS = ("observation/image", "image", "observation/exterior_image_1_left")
# Spellings of a camera's key, the exact name first.
_CAMERA_KEYS = (
    "observation.images.{}",
    "observation/images/{}",
    "observation/{}",
    "images/{}",
    "{}",
    "observation/{}_image",
    "observation.{}",
)

# openpi's names of pictures in models to its names on robots (openpi/policies/*_policy.py).
_OPENPI_KEYS: Mapping[str, Sequence[str]] = {
    "base_0_rgb": ("observation/exterior_image_1_left", "images/cam_high", "observation/image"),
    "left_wrist_0_rgb": ("observation/wrist_image_left", "images/cam_left_wrist", "observation/wrist_image"),
    "right_wrist_0_rgb": ("images/cam_right_wrist",),
}


def rename_keys(message: Mapping[Any, Any], spec: ObservationSpec) -> dict[str, Any]:
    """Rename the keys of an observation from openpi's names to this service's; other keys are ignored, as in openpi.

    Raises:
        InvalidRequest: a key is missing or ambiguous; the message lists the received keys.
    """
    flat = _flatten(message)
    cameras, state, prompt = _find_keys(flat, spec)
    images = {camera: _check_picture(camera, flat[key]) for camera, key in cameras}
    renamed = {"images": images, "state": flat[state[0]] if len(state) == 1 else _join_state(flat, state)}
    if prompt is not None:
        renamed["prompt"] = flat[prompt]
    return renamed


def read_openpi_observation(body: memoryview, spec: ObservationSpec) -> ClientObservation:
    """Read the observation of an openpi message.

    Raises:
        InvalidRequest, TooLarge: as ``codec.unpack``, ``rename_keys`` and ``observation.read_observation``.
    """
    message = codec.unpack(body)
    if not isinstance(message, Mapping):
        raise InvalidRequest("an observation is a map")
    return observation.read_observation(rename_keys(message, spec), spec, is_complete=True)


def _find_keys(
    flat: Mapping[str, Any], spec: ObservationSpec
) -> tuple[Sequence[tuple[str, str]], Sequence[str], str | None]:
    """Find each camera with its key, the keys of the state's parts, and the key of the prompt."""
    cameras: list[tuple[str, str]] = []
    problems: list[str] = []
    for camera in spec.cameras:
        forms = (*(form.format(camera) for form in _CAMERA_KEYS), *_OPENPI_KEYS.get(camera, ()))
        found = [key for key in forms if key in flat]
        if not found and len(spec.cameras) == 1:
            found = [key for key in _IMAGE_KEYS if key in flat]
        if not found:
            form = "images/{}" if camera.startswith("cam_") else "observation/{}"
            usual = _OPENPI_KEYS.get(camera, (form.format(camera),))[0]
            problems.append(f"no picture of camera {camera!r} (send it as 'observation.images.{camera}' or {usual!r})")
            continue
        cameras.append((camera, found[0]))
    states = [key for key in _STATE_KEYS if key in flat][:1] or [key for key in _DROID_KEYS if key in flat]
    if not states or states == [_DROID_KEYS[1]]:
        problems.append(
            "no state (send it as 'observation.state' or 'observation/state'; DROID's as "
            "'observation/joint_position' and 'observation/gripper_position')"
        )
    elif states == [_DROID_KEYS[0]] and np.shape(flat[states[0]])[-1:] == (len(spec.joints) - 1,):
        problems.append(f"no {_DROID_KEYS[1]!r}, which is one state with {_DROID_KEYS[0]!r}")
    prompts = [key for key in _PROMPT_KEYS if key in flat]
    if problems:
        received = ", ".join(repr(sanitize_text(key, 48)) for key in list(flat)[:16]) or "nothing"
        raise InvalidRequest(f"{'; '.join(problems)}. Received: {received}")
    return (cameras, states, prompts[0] if prompts else None)


def _join_state(flat: Mapping[str, Any], keys: Sequence[str]) -> np.ndarray:
    """Concatenate the parts of a state, scalars included; raises InvalidRequest if a part is not a numeric array."""
    parts = [np.atleast_1d(np.asarray(flat[key])) for key in keys]
    for key, part in zip(keys, parts, strict=True):
        if part.dtype.kind not in "iuf" or part.ndim != 1:
            raise InvalidRequest(f"{key}: {part.dtype.name} {list(part.shape)}; wanted a list of numbers")
    return np.concatenate(parts)


def _flatten(message: Mapping[Any, Any]) -> dict[str, Any]:
    """Flatten nested maps ({"images": {"front": ...}}) to ``images/front``; their keys are text."""
    flat: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise InvalidRequest("the keys of an observation are text")
        if isinstance(value, Mapping):
            flat |= {f"{key}/{part}": inner for part, inner in value.items() if isinstance(part, str)}
        else:
            flat[key] = value
    return flat


def _check_picture(camera: str, picture: Any) -> Any:
    if not isinstance(picture, np.ndarray):
        raise InvalidRequest(f"camera {camera!r}: wanted an array")
    if picture.ndim == 4 and len(picture) == 1:
        picture = picture[0]
    if picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[2] != 3:
        # openpi's ALOHA examples send channels first.
        picture = np.ascontiguousarray(picture.transpose(1, 2, 0))
    return picture


log = logging.getLogger(__name__)

_LOAD_CHECK_INTERVAL = 0.1  # Seconds between checks whether the policy is loaded.
_KEY_CHECK_INTERVAL = 2.0  # Seconds between checks of the client's key, which may be revoked.


class OpenpiProtocol:
    """openpi's protocol with one client: metadata, then a chunk for each observation, or an error as text."""

    def __init__(
        self,
        socket: StreamSocket,
        inference: DirectInference,
        is_still_authorized: Callable[[], bool],
        stop: Callable[[str], Awaitable[object]],
    ):
        """Create it for a socket; ``stop`` stops the session's robot by an emergency stop."""
        self._stop = stop
        self._socket = socket
        self._inference = inference
        self._is_still_authorized = is_still_authorized
        self._key_checked_at = time.monotonic()
        self._previous_seconds: float | None = None

    async def serve(self) -> None:
        """Serve the client until its socket ends, or an error occurs."""
        self._socket.handler_seconds = 0.0
        await measure_steps(self._serve_messages(), self._add_seconds)

    def _add_seconds(self, seconds: float) -> None:
        assert self._socket.handler_seconds is not None
        self._socket.handler_seconds += seconds

    async def _serve_messages(self) -> None:
        try:
            await self._wait_loaded()
            self._socket.send(codec.pack_openpi(dict(self._inference.describe())))
            while True:
                raw = await self._socket.receive()
                began = time.monotonic()
                await self._check_key(began)
                answer = await self._answer(raw, began)
                self._socket.send(codec.pack_openpi(answer))
                self._previous_seconds = time.monotonic() - began
        except SocketClosed:
            return
        except ServiceError as error:
            self._close_with_error(f"{error.code}: {error}")
        except Exception:
            log.exception("an observation of session %s failed", self._inference.session.id)
            self._close_with_error("internal: the server's log says more")

    async def _wait_loaded(self) -> None:
        """Wait for the policy without sending, because clients expect metadata first; may raise SocketClosed."""
        while True:
            try:
                self._inference.get_link()
                return
            except SessionLoading:
                await asyncio.wait((self._socket.lost,), timeout=_LOAD_CHECK_INTERVAL)
            except MoveRefused as refusal:
                error = await self._inference.explain_refusal(refusal)
                # openpi's client shows the reason of a close, but does not read text in place of metadata.
                self._socket.close(1011, f"{error.code}: {error}")
                raise SocketClosed from error
            if self._socket.lost.done():
                raise SocketClosed
            await self._check_key(time.monotonic())

    async def _answer(self, raw: memoryview | str, began: float) -> dict[str, Any]:
        if isinstance(raw, str):
            raise InvalidRequest("observations are binary; this is text")
        trace = await self._inference.infer(read_openpi_observation(raw, self._inference.observation_spec()))
        timing = {"infer_ms": (time.monotonic() - began) * 1e3}
        if self._previous_seconds is not None:
            timing["prev_total_ms"] = self._previous_seconds * 1e3
        inference = trace.inference
        return {
            "actions": trace.actions,
            "clamped": list(trace.clamped),
            "policy_timing": {"infer_ms": (inference.to_device + inference.compute + inference.to_host) * 1e3},
            "server_timing": timing,
        }

    async def _check_key(self, now: float) -> None:
        """Close the socket if its key is no longer accepted, after an emergency stop if it has got actions."""
        if now - self._key_checked_at > _KEY_CHECK_INTERVAL:
            self._key_checked_at = now
            if not self._is_still_authorized():
                if self._previous_seconds is not None:
                    with suppress(UnknownSession):
                        await self._stop("the key of the openpi client is no longer accepted")
                self._socket.close(1008, "the key is no longer accepted")
                raise SocketClosed

    def _close_with_error(self, text: str) -> None:
        self._socket.send(text.encode(), is_text=True)
        self._socket.close(1011, "the text before says why")
