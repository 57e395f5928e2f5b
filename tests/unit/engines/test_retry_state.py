"""What an engine could not have is tried again, ever more rarely, and is spoken of until it is well."""

from service.engines.retries import FIRST_RETRY, LONGEST_RETRY, RetryState

HANDLE = "0123456789abcdef"


def test_what_failed_is_due_after_a_while_that_doubles_up_to_an_end() -> None:
    retries, now, pauses = RetryState(), 0.0, []
    for _ in range(10):
        retries.record_failure("b", HANDLE, "out of memory", now)
        begun = now
        while not retries.due(now):
            now += 0.5
        pauses.append(now - begun)
    assert pauses[:4] == [FIRST_RETRY, 2 * FIRST_RETRY, 4 * FIRST_RETRY, 8 * FIRST_RETRY]
    assert pauses[-2:] == [LONGEST_RETRY, LONGEST_RETRY]
    for _ in range(1100):  # four days
        retries.record_failure("b", HANDLE, "out of memory", now)
    assert (retries.due(now + LONGEST_RETRY - 1), retries.due(now + LONGEST_RETRY)) == ([], ["b"])


def test_each_engine_is_due_once_for_all_that_it_lacks() -> None:
    retries = RetryState()
    for engine, handle in (("b", HANDLE), ("b", "other"), ("a", HANDLE)):
        retries.record_failure(engine, handle, "out of memory", 0.0)
    assert (retries.due(FIRST_RETRY - 0.1), retries.due(FIRST_RETRY)) == ([], ["a", "b"])


def test_it_is_said_which_engine_lacks_what_why_and_when_it_is_tried_again() -> None:
    retries = RetryState()
    assert retries.describe(0.0) == ""
    retries.record_failure("b", HANDLE, "its disk is full", 0.0)
    retries.record_failure("b", HANDLE, "out of memory", 10.0)
    assert retries.describe(12.0) == (
        "b is missing policy 0123456789ab, which others have: out of memory (tried 2 times, again in 8 s)"
    )
    assert retries.describe(30.0).endswith("(tried 2 times, and now again)")


def test_nothing_is_said_any_more_when_it_has_it_or_it_is_not_wanted() -> None:
    retries = RetryState()
    for engine in ("a", "b", "c"):
        retries.record_failure(engine, HANDLE, "out of memory", 0.0)
    retries.record_success("a", HANDLE)
    retries.record_success("a", "never heard of")
    for _ in range(3):
        retries.record_failure("d", HANDLE, "out of memory", 0.0)
    retries.record_success("d", HANDLE)
    retries.record_failure("d", HANDLE, "out of memory", 0.0)
    assert "d" in retries.due(FIRST_RETRY), "after a success it starts again with the first pause"
    retries.retain(["a", "b"], [HANDLE])
    assert retries.due(LONGEST_RETRY) == ["b"]
    retries.retain(["a", "b"], ["other"])
    assert (retries.due(LONGEST_RETRY), retries.describe(LONGEST_RETRY)) == ([], "")


def test_what_was_tried_again_without_a_word_is_not_wanted() -> None:
    retries = RetryState()
    for engine, handle, at in (("a", HANDLE, 0.0), ("b", HANDLE, 0.0), ("b", "other", 10.0)):
        retries.record_failure(engine, handle, "out of memory", at)
    retries.drop_failures("b", 10.0)
    assert [retries.describe(10.0).count(f"{engine} is missing") for engine in "ab"] == [1, 1]
