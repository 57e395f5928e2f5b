"""When a failed delivery is tried again, and what a target may ask for."""

import pytest

from hooks.registry.delivery import HOUR, WAITS, get_wait, parse_retry_after

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("failed", "chance", "asked", "wait"),
    [
        *((failed, 0.5, None, wait) for failed, wait in enumerate((*WAITS, None))),
        *((1, chance, None, pytest.approx(wait)) for chance, wait in ((0.0, 4.0), (1.0, 6.0))),
        *((1, 0.5, asked, wait) for asked, wait in ((1.0, 5.0), (60.0, 60.0), (1e9, 10 * HOUR))),
        (len(WAITS), 0.5, 3.0, None),
    ],
)
def test_waits_have_jitter_and_follow_retry_after(
    failed: int, chance: float, asked: float | None, wait: float | None
) -> None:
    assert get_wait(WAITS, failed, lambda: chance, asked) == wait


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        ("Tue, 14 Nov 2023 22:14:20 GMT", 60.0),
        ("Tue, 14 Nov 2023 22:14:20 -0000", 60.0),
        ("Tue, 14 Nov 2000 22:14:20 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("", None),
        ("²", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, NOW) == seconds
