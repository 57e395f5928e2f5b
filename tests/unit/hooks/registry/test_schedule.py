"""When a failed delivery is tried again, and what a target may ask for."""

import pytest

from hooks.registry.delivery import HOUR, MINUTE, Schedule, format_time, parse_retry_after

NOW = 1_700_000_000.0


def test_the_waits_are_those_of_standard_webhooks_and_then_there_is_none() -> None:
    waits = [Schedule().get_wait(failed, lambda: 0.5) for failed in range(8)]
    assert waits == [0, 5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, None]


def test_jitter_is_a_fifth_in_both_directions() -> None:
    assert Schedule().get_wait(1, lambda: 0.0) == pytest.approx(4.0)
    assert Schedule().get_wait(1, lambda: 1.0) == pytest.approx(6.0)


@pytest.mark.parametrize(("asked", "wait"), [(None, 5.0), (1.0, 5.0), (60.0, 60.0), (1e9, 10 * HOUR)])
def test_a_target_may_ask_for_more_time_but_not_for_ever_and_not_for_less(asked: float | None, wait: float) -> None:
    assert Schedule().get_wait(1, lambda: 0.5, asked) == wait


def test_no_attempts_are_left_however_long_a_target_asks_to_wait() -> None:
    assert Schedule(waits=(0.0,)).get_wait(1, lambda: 0.5, retry_after=3.0) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("Tue, 14 Nov 2023 22:14:20 GMT", 60.0),
        ("Tue, 14 Nov 2023 22:14:20 -0000", 60.0),
        ("Tue, 14 Nov 2000 22:14:20 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("", None),
        ("²", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, NOW) == seconds


@pytest.mark.parametrize("wrong", [{"waits": ()}, {"waits": (-1.0,)}, {"jitter": 1.0}])
def test_a_schedule_that_is_none_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="wanted"):
        Schedule(**wrong)


def test_times_are_written_as_the_hub_writes_them() -> None:
    assert format_time(NOW) == "2023-11-14T22:13:20.000Z"
    assert format_time(None) is None
