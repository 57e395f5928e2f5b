"""Names on the wire: a session's rooms and its participants."""

import re
import secrets
import uuid
from collections.abc import Sequence

from service.errors import InvalidRequest
from service.transport.base import Rooms
from service.transport.messages import MAX_NAME

# Room ids travel in URL paths, and clients of this wire do not percent-encode them.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OUTPUT = "-joint-output"


def rooms_of(session_id: str, cameras: Sequence[str], workspace_id: str | None) -> Rooms:
    """The rooms of one session, all in the given workspace or in a new one.

    Raises:
        InvalidRequest: a name cannot stand in a URL, or two rooms would get the same id.
    """
    workspace = str(uuid.uuid4()) if workspace_id is None else workspace_id
    named = (("session_id", session_id), ("workspace_id", workspace), *(("camera name", name) for name in cameras))
    bad = [f"{what} {name!r}" for what, name in named if not _NAME.fullmatch(name) or set(name) == {"."}]
    if bad:
        raise InvalidRequest(
            f"{', '.join(bad)}: cannot name a room; use 1 to 64 letters, digits, '_', '.' or '-' (not only dots)"
        )
    rooms = Rooms(
        workspace_id=workspace,
        cameras={name: f"{session_id}-{name}" for name in cameras},
        joint_input=f"{session_id}-joint-input",
        joint_output=f"{session_id}{OUTPUT}",
    )
    ids = [*rooms.cameras.values(), rooms.joint_input, rooms.joint_output]
    if len(rooms.cameras) != len(cameras) or len(set(ids)) != len(ids):
        raise InvalidRequest(
            f"camera names {list(cameras)} do not give every room its own id; "
            "use each name once, and not 'joint-input' or 'joint-output'"
        )
    return rooms


def session_of(output: str) -> str | None:
    """The session whose output room has this id; None of a room that is no output room of any."""
    return output.removesuffix(OUTPUT) if output.endswith(OUTPUT) else None


def participant(who: str, role: str) -> str:
    """A participant id nobody else has.

    The reference server keys its connections by participant id across all rooms, and a refused or
    late-closing socket with the same id evicts the living one; so every connection gets a fresh suffix.
    """
    ending = f"-{role}-{secrets.token_hex(4)}"
    return who[: MAX_NAME - len(ending)] + ending
