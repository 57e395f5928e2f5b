import pytest

from service.errors import MoveRefused
from service.stage import REQUESTABLE, TRANSITIONS, Lifecycle, Move, Stage


def at(stage: Stage, *, is_loaded: bool = True) -> Lifecycle:
    life = Lifecycle("s")
    life.stage = stage
    life.is_loaded = is_loaded
    return life


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("move", Move)
def test_every_move_follows_the_table_or_is_refused(stage: Stage, move: Move) -> None:
    life = at(stage)
    if (stage, move) in TRANSITIONS:
        assert life.move(move) is TRANSITIONS[stage, move]
    else:
        with pytest.raises(MoveRefused):
            life.move(move)
        assert life.stage is stage


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.DELETED])
def test_every_stage_can_be_deleted_and_deleted_is_final(stage: Stage) -> None:
    assert at(stage).move(Move.DELETE) is Stage.DELETED
    assert {to for (start, _), to in TRANSITIONS.items() if start is Stage.DELETED} == {Stage.DELETED}


@pytest.mark.parametrize("stage", Stage)
def test_an_emergency_stop_ends_motion_in_every_stage(stage: Stage) -> None:
    life = at(stage)
    life.move(Move.EMERGENCY_STOP, "smoke")
    assert life.latch == "smoke"
    assert life.stage not in (Stage.RUNNING, Stage.RECONNECTING, Stage.READY, Stage.TIMEOUT)


def test_a_refusal_names_the_stage_and_the_moves_that_are_allowed() -> None:
    with pytest.raises(MoveRefused, match="'s' is running and cannot start; allowed now: stop, restart"):
        at(Stage.RUNNING).move(Move.START)


@pytest.mark.parametrize(
    ("stage", "is_loaded", "move", "help"),
    [
        (Stage.INITIALIZING, False, Move.START, "wait until GET /sessions/s says that it is ready"),
        (Stage.RUNNING, True, Move.START, "it was started already: POST /sessions/s/restart"),
        (Stage.DEGRADED, True, Move.START, "it was started already: POST /sessions/s/restart"),
        (Stage.RUNNING, True, Move.RESET, "no emergency stop is latched"),
        (Stage.TIMEOUT, True, Move.START, "POST /sessions/s/restart starts it again"),
        (Stage.ERROR, True, Move.START, "POST /sessions/s/restart starts it again"),
        (Stage.ERROR, False, Move.START, "DELETE /sessions/s, then create it again"),
        (Stage.ERROR, False, Move.RESTART, "DELETE /sessions/s, then create it again"),
        (Stage.INTERRUPTED, False, Move.START, "POST /sessions/s/restart loads it again"),
        (Stage.INTERRUPTED, False, Move.STOP, "nothing moves: POST /sessions/s/restart loads it again"),
    ],
)
def test_a_refusal_names_the_request_that_helps(stage: Stage, is_loaded: bool, move: Move, help: str) -> None:
    with pytest.raises(MoveRefused, match=help):
        at(stage, is_loaded=is_loaded).move(move)


def test_only_reset_and_start_leave_a_stop_even_while_loading() -> None:
    life = at(Stage.RUNNING)
    life.move(Move.EMERGENCY_STOP, "button (from room)")
    for move in (Move.START, Move.RESTART):
        with pytest.raises(MoveRefused, match=r"button \(from room\).*POST /debug/sessions/s/reset"):
            life.move(move)
    life.move(Move.STOP)
    assert life.latch is not None
    life.move(Move.RESET)
    assert life.stage is Stage.STOPPED
    assert life.move(Move.START) is Stage.RUNNING
    life = Lifecycle("s")
    life.move(Move.EMERGENCY_STOP, "early")
    assert life.stage is Stage.INITIALIZING
    life.is_loaded = True
    assert life.move(Move.LOADED) is Stage.STOPPED
    with pytest.raises(MoveRefused):
        life.move(Move.START)


def test_the_first_reason_of_a_stop_or_error_is_kept() -> None:
    life = at(Stage.RUNNING)
    life.move(Move.EMERGENCY_STOP, "first")
    life.move(Move.EMERGENCY_STOP, "second")
    assert life.latch == "first"
    life = at(Stage.RUNNING)
    life.move(Move.FAILED, "policy raised")
    life.move(Move.EMERGENCY_STOP, "button")
    life.move(Move.RESET)
    assert (life.stage, life.reason) == (Stage.ERROR, "policy raised")


def test_every_stage_is_reachable_and_every_move_is_used() -> None:
    # A session begins as INITIALIZING, and is found as INTERRUPTED after its server was killed.
    assert set(Stage) - {Stage.INITIALIZING, Stage.INTERRUPTED} <= set(TRANSITIONS.values())
    assert {move for _, move in TRANSITIONS} == set(Move)
    assert set(REQUESTABLE) < set(Move)
