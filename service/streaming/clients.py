"""Clients that stream to sessions without rooms: permissions and limits."""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.auth.caller import Caller
from service.errors import MoveRefused, TooManyRequests
from service.sessions.store import AnySession, Session, Sessions
from service.stage import Stage
from service.streaming.direct_inference import DirectInference
from service.streaming.direct_transport import DirectTransport
from service.streaming.websocket import SocketLimits


@dataclass(frozen=True)
class StreamSettings:
    """Settings of all streams; times in seconds.

    Attributes:
        sockets, sockets_of_one: largest number of sockets, and of sockets of one owner.
        silence: time without messages after which a client counts as disconnected.
        compile_patience, act_patience: time that an observation of a socket, or of a single request, waits for a
            compile.
        socket: limits of one socket; ``bytes`` also limits an act's body.
    """

    sockets: int = 256
    sockets_of_one: int = 64
    silence: float = 2.0
    compile_patience: float = 60.0
    act_patience: float = 5.0
    socket: SocketLimits = field(default_factory=SocketLimits)


class StreamClients:
    """Streaming clients of one server; ``direct`` holds the links of its sessions without rooms.

    Args:
        on_act: receives each inference, as for `DirectInference`.
    """

    def __init__(self, sessions: Sessions, direct: DirectTransport, on_act: Callable[[Session, bool], None]):
        self.settings = StreamSettings()
        self._on_act = on_act
        self.direct = direct
        self._sessions = sessions
        self._inferences: dict[tuple[str, str], DirectInference] = {}
        self._socket_owners: list[str | None] = []

    def create_inference(self, session: AnySession, protocol: str, patience: float | None = None) -> DirectInference:
        """Create one client's inference, which waits for a compile for ``patience`` seconds."""
        sessions, patience = self._sessions, self.settings.compile_patience if patience is None else patience
        pixels = sessions.settings.max_frame_pixels
        return DirectInference(session, protocol, self.direct, sessions.engine, pixels, patience, self._on_act)

    def get_inference(self, session: AnySession, caller: Caller) -> DirectInference:
        """Return the one inference of a caller who sends single requests."""
        key = (session.id, caller.name)
        known = self._inferences.get(key)
        if known is None or known.session is not session:
            ids = {listed.id for listed in self._sessions.list()}
            self._inferences = {pair: one for pair, one in self._inferences.items() if pair[0] in ids}
            known = self._inferences[key] = self.create_inference(session, "http", self.settings.act_patience)
        return known

    def count_socket(self, caller: Caller) -> Callable[[], None]:
        """Count a socket; the returned function removes it from the count.

        Raises:
            TooManyRequests: too many sockets are open.
        """
        settings, owner = self.settings, caller.owner
        is_one_too_many = owner is not None and self._socket_owners.count(owner) >= settings.sockets_of_one
        if len(self._socket_owners) >= settings.sockets or is_one_too_many:
            raise TooManyRequests("too many stream sockets are open; close some")
        self._socket_owners.append(owner)
        return lambda: self._socket_owners.remove(owner)

    def find_only_session(self, caller: Caller) -> AnySession:
        """Return the direct session of a client whose protocol cannot name it; loaded sessions take precedence.

        Raises:
            MoveRefused: the caller has no such session, or several.
        """
        visible = [session for session in self._sessions.list() if caller.sees(session.new.owner)]
        found = [session for session in visible if session.id in self.direct.links] or [
            session for session in visible if session.new.is_direct and session.stage is Stage.INITIALIZING
        ]
        if len(found) == 1:
            return found[0]
        if not found:
            raise MoveRefused('there is no session for this port yet; make one with "transport_server_url": "direct"')
        raise MoveRefused(
            f"there are {len(found)} sessions; select one with `robojax serve --openpi-session ID`, or use "
            "ws://HOST:PORT/sessions/ID/openpi"
        )
