"""WebRTC signals posted over REST and pushed to the other peer's socket; the media itself goes from peer to peer."""

from service.transport import messages
from service.transport.messages import Json, Role
from service.transport.rooms import Effects, Place, RoomTable, Send


class BrokenSignal(ValueError):
    """A signal that lacks what its type needs."""


def relay(table: RoomTable, place: Place, client_id: str, signal: Json) -> tuple[str | None, Effects]:
    """What to answer (None: only that it was processed) and whom to tell.

    A producer offers and sends candidates to ``target_consumer``, a consumer answers and sends candidates to
    ``target_producer``; a signal without its target or from another role is taken and dropped. The answer says
    "forwarded" even when nobody is there: peers come and go, and the producer offers again.

    Raises:
        UnknownRoom: there is no such room.
        BrokenSignal: no ``type``, or no ``sdp`` or ``candidate`` where one has to be passed on.
    """
    table.get(place)
    if "type" not in signal:
        raise BrokenSignal("signal without type")
    sender = table.claimed(place, client_id)
    role = None if sender is None else sender.role
    to_consumer = _target(signal, "target_consumer") if role is Role.PRODUCER else None
    to_producer = _target(signal, "target_producer") if role is Role.CONSUMER else None
    match signal["type"]:
        case "offer" if to_consumer:
            offer = messages.WebrtcOffer({"type": "offer", "sdp": _text(signal, "sdp")}, client_id)
            return "Offer forwarded to consumer", _push(table, place, Role.CONSUMER, to_consumer, offer)
        case "offer":
            return "Peer-to-peer mode - no server WebRTC processing", []
        case "answer":
            # The reference passes on anybody's answer, from other workspaces too.
            target = _target(signal, "target_producer") if table.is_odd else to_producer
            if target:
                answer = messages.WebrtcAnswer({"type": "answer", "sdp": _text(signal, "sdp")}, client_id)
                return "Answer forwarded to producer", _push(table, place, Role.PRODUCER, target, answer)
        case "ice" if to_consumer:
            ice = messages.WebrtcIce(_candidate(signal), from_producer=client_id)
            return "ICE candidate forwarded to consumer", _push(table, place, Role.CONSUMER, to_consumer, ice)
        case "ice" if to_producer:
            ice = messages.WebrtcIce(_candidate(signal), from_consumer=client_id)
            return "ICE candidate forwarded to producer", _push(table, place, Role.PRODUCER, to_producer, ice)
    return None, []


def _push(table: RoomTable, place: Place, role: Role, target: str, message: messages.Message) -> Effects:
    seat = table.find(place, role, target)
    return [] if seat is None else [Send((seat.connection,), message)]


def _target(signal: Json, key: str) -> str | None:
    value = signal.get(key)
    return value if isinstance(value, str) and value else None


def _text(signal: Json, key: str) -> str:
    value = signal.get(key)
    if not isinstance(value, str):
        raise BrokenSignal(f"{signal['type']} without {key}")
    return value


def _candidate(signal: Json) -> Json:
    value = signal.get("candidate")
    if not isinstance(value, dict):
        raise BrokenSignal("ice without candidate")
    return value
