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
    if table.is_odd and signal["type"] == "answer":  # the reference passes on anybody's, from other workspaces too
        role = Role.CONSUMER
    to = Role.PRODUCER if role is Role.CONSUMER else Role.CONSUMER
    target = None if role is None else signal.get(f"target_{to}")
    is_aimed = isinstance(target, str) and target != ""
    match signal["type"], to:
        case "offer", Role.CONSUMER if is_aimed:
            what, message = "Offer", messages.WebrtcOffer({"type": "offer", "sdp": _text(signal, "sdp")}, client_id)
        case "offer", _:
            return "Peer-to-peer mode - no server WebRTC processing", []
        case "answer", Role.PRODUCER if is_aimed:
            what, message = "Answer", messages.WebrtcAnswer({"type": "answer", "sdp": _text(signal, "sdp")}, client_id)
        case "ice", _ if is_aimed:
            what, message = "ICE candidate", messages.WebrtcIce(_candidate(signal), **{f"from_{role}": client_id})
        case _:
            return None, []
    seat = table.find(place, to, str(target))
    return f"{what} forwarded to {to}", [] if seat is None else [Send((seat.connection,), message)]


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
