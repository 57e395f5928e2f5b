"""What an engine could not have is tried again, ever more rarely, and is spoken of until it is well."""

from service.distributed.replication import FIRST_RETRY, LONGEST_RETRY, RetryState

HANDLE = "0123456789abcdef"


def test_what_failed_is_due_after_a_while_that_doubles_up_to_an_end() -> None:
    lacking, now, pauses = RetryState(), 0.0, []
    for _ in range(10):
        lacking.failed("b", HANDLE, "out of memory", now)
        begun = now
        while not lacking.due(now):
            now += 0.5
        pauses.append(now - begun)
    assert pauses[:4] == [FIRST_RETRY, 2 * FIRST_RETRY, 4 * FIRST_RETRY, 8 * FIRST_RETRY]
    assert pauses[-2:] == [LONGEST_RETRY, LONGEST_RETRY]
    for _ in range(1100):  # four days
        lacking.failed("b", HANDLE, "out of memory", now)
    assert (lacking.due(now + LONGEST_RETRY - 1), lacking.due(now + LONGEST_RETRY)) == ([], ["b"])


def test_each_engine_is_due_once_for_all_that_it_lacks() -> None:
    lacking = RetryState()
    for engine, handle in (("b", HANDLE), ("b", "other"), ("a", HANDLE)):
        lacking.failed(engine, handle, "out of memory", 0.0)
    assert lacking.due(FIRST_RETRY - 0.1) == []
    assert lacking.due(FIRST_RETRY) == ["a", "b"]


def test_it_is_said_which_engine_lacks_what_why_and_when_it_is_tried_again() -> None:
    lacking = RetryState()
    assert lacking.words(0.0) == ""
    lacking.failed("b", HANDLE, "its disk is full", 0.0)
    lacking.failed("b", HANDLE, "out of memory", 10.0)
    assert lacking.words(12.0) == (
        "b goes without policy 0123456789ab, which others have: out of memory (tried 2 times, again in 8 s)"
    )
    assert lacking.words(30.0).endswith("(tried 2 times, and now again)")


def test_nothing_is_said_any_more_when_it_has_it_or_it_is_not_wanted() -> None:
    lacking = RetryState()
    for engine in ("a", "b", "c"):
        lacking.failed(engine, HANDLE, "out of memory", 0.0)
    lacking.has("a", HANDLE)
    lacking.has("a", "never heard of")
    lacking.keep(["a", "b"], [HANDLE])
    assert lacking.due(LONGEST_RETRY) == ["b"]
    lacking.keep(["a", "b"], ["other"])
    assert (lacking.due(LONGEST_RETRY), lacking.words(LONGEST_RETRY)) == ([], "")


def test_what_was_tried_again_without_a_word_is_not_wanted() -> None:
    lacking = RetryState()
    lacking.failed("a", HANDLE, "out of memory", 0.0)
    lacking.failed("b", HANDLE, "out of memory", 0.0)
    lacking.failed("b", "other", "out of memory", 10.0)
    lacking.forget("b", 10.0)
    assert lacking.words(10.0).count("b goes without") == 1
    assert lacking.words(10.0).count("a goes without") == 1


def test_one_that_has_it_again_begins_anew() -> None:
    lacking = RetryState()
    for _ in range(5):
        lacking.failed("b", HANDLE, "out of memory", 0.0)
    lacking.has("b", HANDLE)
    lacking.failed("b", HANDLE, "out of memory", 0.0)
    assert lacking.due(FIRST_RETRY) == ["b"]
