"""Clients that stream to sessions without rooms: permissions and limits."""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.auth.caller import Caller
from service.errors import MoveRefused, TooManyRequests
from service.sessions.store import AnySession, Sessions
from service.stage import Stage
from service.streaming.direct_inference import DirectInference
from service.streaming.direct_transport import DirectTransport
from service.streaming.websocket import SocketLimits


@dataclass(frozen=True)
class StreamSettings:
    """Settings of all streams; times in seconds.

    Attributes:
        sockets: largest number of sockets.
        sockets_of_one: likewise, of one key's owner.
        silence: time without messages after which a client counts as gone.
        compile_patience: time that an observation of a socket waits for a compile.
        act_patience: likewise, of a single request; less than its client's timeout.
        socket: limits of one socket; ``bytes`` also limits an act's body.
    """

    sockets: int = 256
    sockets_of_one: int = 64
    silence: float = 2.0
    compile_patience: float = 60.0
    act_patience: float = 5.0
    socket: SocketLimits = field(default_factory=SocketLimits)


class StreamClients:
    """Streaming clients of one server; ``direct`` holds the links of its sessions without rooms."""

    def __init__(self, sessions: Callable[[], Sessions], settings: StreamSettings | None = None):
        """``sessions`` is called when the first client comes, not before."""
        self.settings = settings or StreamSettings()
        self.direct = DirectTransport()
        self._sessions = sessions
        self._inferences: dict[tuple[str, str], DirectInference] = {}
        self._socket_owners: list[str | None] = []

    def create_inference(self, session: AnySession, patience: float | None = None) -> DirectInference:
        """Create one client's inference; ``patience`` is how many seconds it waits for a compile."""
        sessions, patience = self._sessions(), self.settings.compile_patience if patience is None else patience
        return DirectInference(session, self.direct, sessions.engine, sessions.settings.max_frame_pixels, patience)

    def get_inference(self, session: AnySession, caller: Caller) -> DirectInference:
        """Return the inference of a caller who acts by single requests: the same one each time."""
        key = (session.id, caller.name)
        known = self._inferences.get(key)
        if known is None or known.session is not session:
            ids = {listed.id for listed in self._sessions().list()}
            self._inferences = {pair: one for pair, one in self._inferences.items() if pair[0] in ids}
            known = self._inferences[key] = self.create_inference(session, self.settings.act_patience)
        return known

    def count_socket(self, caller: Caller) -> Callable[[], None]:
        """Count a socket; the returned function removes it from the count.

        Raises:
            TooManyRequests: there are too many.
        """
        settings, owner = self.settings, caller.owner
        is_one_too_many = owner is not None and self._socket_owners.count(owner) >= settings.sockets_of_one
        if len(self._socket_owners) >= settings.sockets or is_one_too_many:
            raise TooManyRequests("too many sockets are open at the doors; close some")
        self._socket_owners.append(owner)
        return lambda: self._socket_owners.remove(owner)

    def find_only_session(self, caller: Caller) -> AnySession:
        """Return the direct session of a client whose protocol cannot name it; a loaded one takes precedence.

        Raises:
            MoveRefused: the caller has none, or several.
        """
        visible = [session for session in self._sessions().list() if caller.sees(session.new.owner)]
        found = [session for session in visible if session.id in self.direct.links] or [
            session for session in visible if session.new.is_direct and session.stage is Stage.INITIALIZING
        ]
        if len(found) == 1:
            return found[0]
        if not found:
            raise MoveRefused('there is no session for this port yet; make one with "transport_server_url": "direct"')
        raise MoveRefused(
            f"{len(found)} sessions could be meant; `robojax serve --openpi-session ID` names one, or use "
            "ws://HOST:PORT/sessions/ID/openpi"
        )
