from service.auth.caller import Caller
from service.auth.roles import Role
from service.auth.tickets import MOST_OF_ONE, Tickets

ANN = Caller("ann", Role.VIEWER, "lab")


def test_a_ticket_lets_its_caller_in_once():
    tickets = Tickets()
    text = tickets.give(ANN, lambda: True, 0.0)
    assert tickets.take("rjt_another", 1.0) is None
    found = tickets.take(text, 29.9)
    assert found is not None
    assert found.caller == ANN
    assert tickets.take(text, 29.9) is None


def test_a_ticket_is_worth_nothing_after_30_s_or_when_its_key_is_revoked():
    tickets, is_in = Tickets(), [True]
    late, revoked = (tickets.give(ANN, lambda: is_in[0], 0.0) for _ in range(2))
    assert tickets.take(late, 30.0) is None
    is_in[0] = False
    assert tickets.take(revoked, 1.0) is None


def test_who_asks_for_many_tickets_loses_their_own_oldest():
    tickets = Tickets()
    others = tickets.give(Caller("bob", Role.VIEWER, "bob"), lambda: True, 0.0)
    texts = [tickets.give(ANN, lambda: True, 1.0) for _ in range(MOST_OF_ONE + 1)]
    assert tickets.take(texts[0], 2.0) is None
    assert tickets.take(texts[1], 2.0)
    assert tickets.take(others, 2.0)
