"""What benchmarks share: pictures that tell their time, poses that tell a number, spreads, bare loops."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import glass_to_action
from benchmarks.measured import beat, percentiles
from benchmarks.timed_pictures import BASE, BITS, number_of, picture, pose_of, stamp, stamp_of, taken_at


@given(st.floats(0, 1e6))
def test_a_picture_tells_when_it_was_taken(now: float) -> None:
    assert stamp_of(picture((8, 96), now)) == stamp(now)
    assert taken_at(picture((8, 96), now), now + 0.25) == pytest.approx(now, abs=0.002)


@given(st.integers(0, (1 << BITS) - 1))
def test_a_pose_tells_the_number_of_its_picture(number: int) -> None:
    assert number_of(pose_of(number)) == number


def test_a_pose_that_nobody_made_of_a_number_tells_none() -> None:
    assert number_of(BASE + np.float32(0.025)) is None
    assert number_of(BASE - 1) is None


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([0.001, 0.002, 0.003]) == {"p50": 2.0, "p99": 2.98, "p99.9": 2.998, "max": 3.0}
    assert percentiles([]) == {}


async def test_bare_loops_do_every_beat_of_a_round() -> None:
    late: list[float] = []
    done: list[None] = []
    await asyncio.wait_for(beat(1000, lambda: done.append(None), late.append, seconds=0.02), 5)
    assert len(late) == len(done) == 20
    assert min(late) >= 0


def test_a_picture_is_followed_from_light_to_motion() -> None:
    robot = glass_to_action.Robot()
    robot.taken = {1: 10.0, 2: 10.1, 3: 10.2}
    robot.heard = [(10.08, 1), (10.12, 1), (10.28, 3), (10.32, 3)]
    stages = ("seen", "asked", "began", "ended", "planned", "sent")
    notes: dict[int, dict[str, float]] = {
        number: dict(zip(stages, at + np.arange(1, 7) / 100, strict=True)) for number, at in robot.taken.items()
    }
    found = glass_to_action.figures(robot, notes)
    assert {name: spread["p50"] for name, spread in found["stages_ms"].items()} == {
        "video": 10, "waiting to be asked about": 10, "queue": 10, "inference": 10, "back": 10,
        "waiting for its tick": 10, "wire": 20,
    }  # fmt: skip
    assert found["light_to_motion_ms"]["max"] == 80
    assert found["pictures_used"] == 2
    # Whatever happens after picture 1 was taken is first known to the command of picture 3.
    assert found["event_to_motion_ms"]["max"] == pytest.approx(280, abs=1)
