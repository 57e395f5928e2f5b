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


def test_four_commits_are_one_trigger_after_the_last() -> None:
    queue = Queue()
    for number, at in enumerate((0.0, 5.0, 12.0, 30.0)):
        queue.add(webhook(MAIN, str(number)), at)
        assert queue.due(at) == []
    assert (queue.next_at(), queue.due(49.9)) == (50.0, [])
    assert queue.due(50.0) == [webhook(MAIN, "0", "1", "2", "3")]
    assert (queue.next_at(), queue.due(1000.0)) == (None, [])


def test_endless_pushes_are_triggered_after_the_longest_wait() -> None:
    queue = Queue()
    for at in range(0, 300, 10):
        queue.add(webhook(MAIN, str(at)), at)
        assert queue.due(at) == []
    assert len(queue.due(300.0)) == 1


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
def test_deliveries_of_one_push_are_one_trigger(
    added: dict[float, Trigger], due_at: float, next_at: float | None
) -> None:
    queue = Queue()
    for at, trigger in added.items():
        queue.add(trigger, at)
    assert queue.due(due_at) == [webhook(MAIN, "0")]
    assert queue.next_at() == next_at


def test_only_the_newest_delivery_ids_are_kept() -> None:
    queue = Queue()
    ids = [str(number) for number in range(3 * MAX_DELIVERY_IDS)]
    for number in ids:
        queue.add(webhook(MAIN, number), 0.0)
    queue.add(webhook(MAIN, ids[-1]), 19.0)
    (trigger,) = queue.due(20.0)
    assert trigger == webhook(MAIN, *ids[-MAX_DELIVERY_IDS:])
    # A forgotten delivery that arrives again counts as a new push, with the same longest wait.
    queue.add(trigger, 30.0)
    for at in range(30, 400, 10):
        queue.add(webhook(MAIN, ids[0], str(at)), at)
    assert queue.next_at() == 330.0


def test_waits_after_failures_double_up_to_a_limit() -> None:
    retries = Retries(10.0, 35.0)
    assert retries.may_retry("a", 0.0)
    ends = []
    for _ in range(4):
        retries.record_failure("a", 0.0)
        ends.append(next(end for end in range(100) if retries.may_retry("a", end)))
    assert ends == [10, 20, 35, 35]
    assert retries.may_retry("b", 0.0)
    for _ in range(1100):  # The failures of six weeks.
        retries.record_failure("a", 0.0)
    retries.record_success("a")
    assert retries.may_retry("a", 0.0)
