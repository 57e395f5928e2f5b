"""What is compared of Ray Serve and our pool: ratios round by round, and when a second engine answers."""

import asyncio

import pytest

from benchmarks import ray_serve
from benchmarks.answers import ray_serve as answer
from benchmarks.ray_serve import ACTOR, AUTOSCALER, POOL, SERVE, compared
from benchmarks.ray_serve_load import Load
from tests import virtual_time


def test_ratios_are_of_rounds_so_that_a_busy_round_counts_once() -> None:
    plain, through = [[0.001] * 4, [0.001] * 4, [0.01] * 4], [[0.003] * 4, [0.004] * 4, [0.02] * 4]
    told = compared({ACTOR: plain, SERVE: through})
    assert told["ratios"] == {"p50": 3.0, "p99": 3.0}
    assert (told[ACTOR]["p50"], told[SERVE]["p50"], told[SERVE]["max"]) == (1.0, 4.0, 20.0)


def test_a_load_is_over_a_while_after_the_second_engine_answered() -> None:
    async def put_on() -> tuple[dict[str, float], float]:
        time = asyncio.get_running_loop().time

        async def ask() -> bool:
            is_second = time() > 0.29
            await asyncio.sleep(0.01 if is_second else 0.02)
            return is_second

        return await Load(3, 0.2, 0.2, 5.0).put_on(ask), time()

    told, ended = virtual_time.run(put_on())
    assert told["second_answers_after_s"] == 0.31  # 15 answers of the first one, and one of the second
    assert told["answers_per_second_of_one"] == pytest.approx(3 / 0.02, rel=0.1)
    assert told["answers_per_second_of_two"] == pytest.approx(3 / 0.01, rel=0.1)
    assert ended == pytest.approx(0.31 + 2 * 0.2, abs=0.001)


def test_a_load_that_no_second_engine_answers_says_so() -> None:
    async def ask() -> bool:
        await asyncio.sleep(0.005)
        return False

    with pytest.raises(RuntimeError, match=r"no second engine answered in 600 s"):
        virtual_time.run(Load(3, 0.05, 0.05, 600.0).put_on(ask))


def test_an_asker_that_fails_ends_the_load_at_once() -> None:
    async def ask() -> bool:
        raise ConnectionError("the engine ended")

    with pytest.raises(ConnectionError, match="the engine ended"):
        virtual_time.run(Load(3, 0.05, 0.05, 60.0).put_on(ask))


def test_what_is_missing_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ray_serve"])
    monkeypatch.setattr(ray_serve, "find_spec", lambda name: None if name == "fastapi" else object())
    monkeypatch.setattr(ray_serve, "version", lambda name: "2.60.0")
    with pytest.raises(SystemExit):
        ray_serve.main()
    told = capsys.readouterr().err
    assert "without fastapi: pip install 'ray[serve]==2.60.0'" in told
    monkeypatch.setattr(ray_serve, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        ray_serve.main()
    assert "pip install 'robojax[ray]'" in capsys.readouterr().err


def test_the_answer_is_a_sentence_with_and_without_growing() -> None:
    found = {"calls": {"nothing": {ACTOR: {"p50": 0.94}, SERVE: {"p50": 3.81}}}}
    assert answer(found) == "a call: 0.9 ms to an actor, 3.8 ms through Serve"
    found["growing"] = {side: {"second_answers_after_s": {"median": 9.5}} for side in (POOL, AUTOSCALER)}
    assert answer(found).endswith("a second engine answers after 9.5 s (our pool), 9.5 s (Serve's autoscaler)")
