import pytest

from service.rollout.triggers import MAX_DELIVERY_IDS, Retries, Trigger, TriggerQueue, TriggerTarget

MAIN, DEV = TriggerTarget("a/b", "main"), TriggerTarget("a/b", "dev")


class Queue(TriggerQueue):
    """Trigger queue on a clock that the test sets."""

    def __init__(self) -> None:
        super().__init__(20, 300, lambda: self.at)
        self.at = 0.0

    def add(self, trigger: Trigger, at: float) -> None:
        self.at = at
        self.put(trigger)

    def due(self, at: float) -> list[Trigger]:
        self.at = at
        return self.take_due()


def webhook(target: TriggerTarget, *ids: str) -> Trigger:
    return Trigger(target, "webhook", "hook", ids)


def test_four_commits_are_one_hint_when_they_are_over() -> None:
    debounce = Queue()
    for number, at in enumerate((0.0, 5.0, 12.0, 30.0)):
        debounce.add(webhook(MAIN, str(number)), at)
        assert debounce.due(at) == []
    assert (debounce.next_at(), debounce.due(49.9)) == (50.0, [])
    assert debounce.due(50.0) == [webhook(MAIN, "0", "1", "2", "3")]
    assert (debounce.next_at(), debounce.due(1000.0)) == (None, [])


def test_pushes_that_never_end_are_not_waited_for_longer_than_the_longest() -> None:
    debounce = Queue()
    for at in range(0, 300, 10):
        debounce.add(webhook(MAIN, str(at)), at)
        assert debounce.due(at) == []
    assert len(debounce.due(300.0)) == 1


POLL = Trigger(MAIN, "poll")


@pytest.mark.parametrize(
    ("added", "due_at", "next_at"),
    [
        ({0.0: webhook(MAIN, "0"), 19.0: webhook(MAIN, "0")}, 20.0, None),
        ({0.0: POLL, 5.0: webhook(MAIN, "0"), 15.0: POLL}, 25.0, None),
        ({0.0: webhook(MAIN, "0"), 10.0: webhook(DEV, "1")}, 20.0, 30.0),
    ],
    ids=["delivered again", "polled too", "another ref"],
)
def test_deliveries_of_one_push_are_one_hint(added: dict[float, Trigger], due_at: float, next_at: float | None) -> None:
    debounce = Queue()
    for at, trigger in added.items():
        debounce.add(trigger, at)
    assert debounce.due(due_at) == [webhook(MAIN, "0")]
    assert debounce.next_at() == next_at


def test_of_any_number_of_deliveries_the_newest_are_known_by_their_ids() -> None:
    debounce = Queue()
    ids = [str(number) for number in range(3 * MAX_DELIVERY_IDS)]
    for number in ids:
        debounce.add(webhook(MAIN, number), 0.0)
    debounce.add(webhook(MAIN, ids[-1]), 19.0)
    (hint,) = debounce.due(20.0)
    assert hint == webhook(MAIN, *ids[-MAX_DELIVERY_IDS:])
    # One that was let go and comes again counts as another push, and is waited for no longer than for any.
    debounce.add(hint, 30.0)
    for at in range(30, 400, 10):
        debounce.add(webhook(MAIN, ids[0], str(at)), at)
    assert debounce.next_at() == 330.0


def test_waits_after_failures_double_up_to_the_longest() -> None:
    retries = Retries(10.0, 35.0)
    assert retries.may_retry("a", 0.0)
    ends = []
    for _ in range(4):
        retries.record_failure("a", 0.0)
        ends.append(next(end for end in range(100) if retries.may_retry("a", end)))
    assert ends == [10, 20, 35, 35]
    assert retries.may_retry("b", 0.0)
    for _ in range(1100):  # of six weeks
        retries.record_failure("a", 0.0)
    retries.record_success("a")
    assert retries.may_retry("a", 0.0)
