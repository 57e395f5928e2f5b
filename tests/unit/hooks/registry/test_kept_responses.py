"""What is kept of an answer: the beginning, bounded, and never a secret."""

import pytest

from hooks.registry.delivery import MAX_EXCERPT, MAX_SECRET, Destination, Outcome, make_excerpt


@pytest.mark.parametrize(
    ("outcome", "is_delivered"),
    [
        (Outcome(status=200), True),
        (Outcome(status=204), True),
        (Outcome(status=302), False),
        (Outcome(status=404), False),
        (Outcome(error="no connection"), False),
        (Outcome(exit_status=0), True),
        (Outcome(exit_status=3), False),
        (Outcome(exit_status=0, error="ended after its 5 s"), False),
    ],
)
def test_what_counts_as_delivered(outcome: Outcome, is_delivered: bool) -> None:
    assert outcome.is_delivered is is_delivered


def test_repeated_secret_is_masked_also_where_reading_ended() -> None:
    secret = "s3cret-" * 8
    assert make_excerpt(f"you sent {secret}!".encode(), (secret, None)) == "you sent ***!"
    for begin in range(MAX_EXCERPT - 80, MAX_EXCERPT + MAX_SECRET):
        data = (b"x" * begin + secret.encode() + b"y" * 2000)[: MAX_EXCERPT + MAX_SECRET]
        assert "s3c" not in make_excerpt(data, (secret,))
        assert "ret-" not in make_excerpt(data[::-1], (secret[::-1],), is_end=True)[::-1]


def test_an_excerpt_is_bounded_text_whatever_the_bytes_are() -> None:
    assert len(make_excerpt(bytes(range(256)) * 6).encode()) <= MAX_EXCERPT
    assert "\0" not in make_excerpt(b"a\0b")
    assert make_excerpt(b"begin" + b"." * 100 + b"end", is_end=True, max_bytes=10) == ".......end"


def test_secrets_are_not_in_a_destinations_repr() -> None:
    assert "hidden" not in repr(Destination("1", "http://x", secret="hidden", secrets={"A": "hidden"}))
