"""One session as it is written down, by this version or by a newer one."""

import json
import time
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from service.sessions.request import NewSession
from service.sessions.standing import new_claim
from service.stage import Stage
from service.transport.base import Rooms
from service.transport.names import rooms_of

# Of one record; a record of a newer one is listed and can be deleted, and what it says is never dropped or guessed.
VERSION = 1


@dataclass(frozen=True)
class SessionRecord:
    """One session as it was last written down. Times are seconds since 1970, for showing only.

    Attributes:
        new: what was asked for, with the workspace that its rooms are in.
        stage, reason: where it stood and why.
        is_ready: whether it ever was, so that somebody was told that it is there.
        made: ids of its rooms that this server made, or was about to make.
        is_shut_down: whether its server ended in order after that.
        claim: by which the server of its rooms knows what the session itself sends, and whose they are.
        more, wishes: what a newer version wrote, of the record and of what was asked for.
    """

    new: NewSession
    stage: str = str(Stage.INITIALIZING)
    reason: str | None = None
    is_ready: bool = False
    made: tuple[str, ...] = ()
    is_shut_down: bool = False
    created_at: float = field(default_factory=time.time)
    changed_at: float = field(default_factory=time.time)
    version: int = VERSION
    claim: str = field(default_factory=new_claim, repr=False)
    more: Mapping[str, Any] = field(default_factory=dict)
    wishes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_newer(self) -> bool:
        """Whether it was written by a version that knows more than this one."""
        return self.version > VERSION or bool(self.wishes)

    def rooms(self) -> Rooms:
        """Its rooms, whoever made them; none of a session whose client comes to a door."""
        if self.new.is_direct:
            return Rooms(self.new.workspace_id or "")
        return rooms_of(self.new.session_id, self.new.camera_names, self.new.workspace_id)

    def as_json(self) -> str:
        """For the disk."""
        told = asdict(self)
        told |= told.pop("more")
        told["new"] |= told.pop("wishes")
        return json.dumps(told)


def from_json(text: str) -> SessionRecord:
    """The record that ``as_json`` gave, of whatever version.

    Raises:
        ValueError: it is none.
    """
    try:
        told = json.loads(text)
        asked = told.pop("new")
        known, more = _divide(told, SessionRecord)
        new, wishes = _divide(asked, NewSession)
        for name in ("camera_names", "joint_names"):
            if isinstance(new.get(name), list):
                new[name] = tuple(new[name])
        known["made"] = tuple(known.get("made", ()))
        return SessionRecord(new=NewSession(**new), more=more, wishes=wishes, **known)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a record that cannot be read ({type(error).__name__}: {error})") from error


def _divide(told: Mapping[str, Any], kind: type[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {one.name for one in fields(kind)} - {"more", "wishes"}
    missing = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    if absent := missing - set(told) - {"new"}:
        raise ValueError(f"no {', '.join(sorted(absent))}")
    return {name: told[name] for name in told if name in names}, {n: told[n] for n in told if n not in names}
