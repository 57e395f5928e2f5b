"""How long things on the wire may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Times in seconds, and what follows when they are over.

    Attributes:
        join: from opening a socket to ``joined``; then the attempt has failed.
        request: one REST call, likewise.
        heartbeat: between heartbeats, and between looks at who is in the room.
        missed: heartbeats in a row without an answer that mean the link is lost.
        retry_first, retry_longest: the first and the longest wait before joining again, doubled, with full jitter.
        leave: for the closing handshake, and again for removing the rooms.
        greet: from a producer's join to its offers to consumers that were there before. The reference waits a second;
            whoever is listed has joined, and an offer that comes to nothing is made again.
        answer: for answering one offer.
        connect: from an offer or an answer to a connected peer; then a new offer is wanted.
        silence: a connected peer that sends no picture for so long is asked for a new offer.
        ask_first, ask_longest: between such requests, doubled each time until a picture comes.
    """

    join: float = 5.0
    request: float = 5.0
    heartbeat: float = 5.0
    missed: int = 2
    retry_first: float = 0.25
    retry_longest: float = 10.0
    leave: float = 1.0
    greet: float = 0.1
    answer: float = 10.0
    connect: float = 15.0
    silence: float = 10.0
    ask_first: float = 5.0
    ask_longest: float = 60.0
