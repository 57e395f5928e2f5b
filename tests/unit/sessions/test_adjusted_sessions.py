"""Changes of the overlap and of the request time while a robot moves, and their persistence."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH
from service.errors import InvalidRequest, MoveRefused
from service.sessions.base_session import describe_overlap
from tests.testing.doubles import ScriptedPolicy
from tests.testing.waiting import until
from tests.unit.sessions.test_interrupted import NEW as STORED
from tests.unit.sessions.test_interrupted import after_a_kill, serving
from tests.unit.sessions.test_sessions import LONG, NEW, PATIENT, rigged

pytestmark = pytest.mark.timed


@dataclass
class RecordingPolicy(ScriptedPolicy):
    """Policy that records its observations and answers."""

    calls: list[tuple[Mapping[str, np.ndarray], np.ndarray]] = field(default_factory=list)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        if PREFIX_ACTIONS in observation:
            assert self.is_compiled(with_plan=True), "a robot waits for a compilation"
        chunk = super().act(observation)
        self.calls.append((observation, chunk))
        return chunk


async def test_a_policy_with_a_prefix_gets_the_plan_at_the_next_chunk() -> None:
    async with rigged(PATIENT) as rig:
        rig.policy = policy = RecordingPolicy(
            replace(LONG, takes_prefix=True), latency=0.05, step=0.02, compile_latency=0.1
        )
        await rig.running(replace(NEW, overlap="replace", action_steps=20, record=True))
        assert not policy.is_compiled(with_plan=True)
        control = rig.sessions.get_live("s").robot_io.controller  # type: ignore[union-attr]
        assert PREFIX_ACTIONS not in policy.calls[-1][0]
        adjusted = await rig.sessions.adjust("s", {"overlap": "rtc", "action_steps": 15})
        assert describe_overlap(adjusted.require_robot_io())["overlap"] == "rtc"
        chunks = control.chunks

        def has_measured_delay() -> bool:
            # A pause of the test machine makes the delay longer, so such a chunk is skipped.
            return control.chunks > chunks + 3 and policy.calls[-1][0][PREFIX_DELAY][0] <= 15

        await until(has_measured_delay)
        observation, chunk = policy.calls[-1]
        [delay], [length] = observation[PREFIX_DELAY], observation[PREFIX_LENGTH]
        assert 4 <= delay <= 15 < length
        assert chunk[0, :delay] == pytest.approx(observation[PREFIX_ACTIONS][0, :delay])
        stats = rig.sessions.get_live("s").status().stats
        assert (stats["overlap"], stats["action_steps"], stats["ask_ahead"]) == ("rtc", 15, None)
        assert stats["latency_actions"]["p50"] > 5  # type: ignore[index]
        assert isinstance(stats["delay_actions"], int)
        assert control.starvations == 0


async def test_programs_for_plans_are_compiled_before_a_session_is_ready() -> None:
    async with rigged() as rig:
        rig.policy = policy = RecordingPolicy(replace(LONG, takes_prefix=True))
        session = await rig.sessions.create(replace(NEW, overlap="rtc"))
        assert policy.is_compiled(with_plan=True)
        assert session.require_robot_io().get_input_sizes() == policy.compiled[-1]


async def test_an_impossible_change_is_refused_and_changes_nothing() -> None:
    async with rigged() as rig:
        await rig.running()
        before, request = (
            describe_overlap(rig.sessions.get_live("s").require_robot_io()),
            rig.sessions.get_live("s").new,
        )
        for changes, name in (
            ({"overlap": "rtc"}, "overlap"),
            ({"action_steps": 21}, "action_steps"),
            ({"ask_ahead": -1.0}, "ask_ahead"),
            ({"overlap": "average", "temporal_ensemble_coeff": 0.1}, "temporal_ensemble_coeff"),
        ):
            with pytest.raises(InvalidRequest) as error:
                await rig.sessions.adjust("s", changes)
            assert error.value.loc == ("body", name)
        assert describe_overlap(rig.sessions.get_live("s").require_robot_io()) == before
        assert rig.sessions.get_live("s").new == request


async def test_a_change_of_the_overlap_removes_the_coefficient() -> None:
    async with rigged() as rig:
        await rig.sessions.create(replace(NEW, temporal_ensemble_coeff=0.2))
        session = rig.sessions.get_live("s")
        expected = {"overlap": "ensemble", "temporal_ensemble_coeff": 0.2, "ask_ahead": None, "action_steps": 1}
        assert describe_overlap(session.require_robot_io()) == expected
        await session.adjust({"overlap": "average"})
        changed = {"overlap": "average", "temporal_ensemble_coeff": None, "action_steps": 20}
        assert describe_overlap(session.require_robot_io()) == expected | changed


async def test_changes_survive_a_kill_and_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.sessions.create(replace(STORED, overlap="average", ask_ahead=0.5))
        await server.sessions.adjust("arm", {"overlap": "conservative", "ask_ahead": None, "action_steps": 7})
        await server.sessions.adjust("arm", {"language_instruction": "wave"})
        async with after_a_kill(server) as second:
            with pytest.raises(MoveRefused, match="restart it first"):
                await second.sessions.adjust("arm", {"overlap": "replace"})
            await second.sessions.restart("arm")
            assert second.sessions.get_live("arm").new.language_instruction == "wave"
            expected = {
                "overlap": "conservative",
                "temporal_ensemble_coeff": None,
                "ask_ahead": None,
                "action_steps": 7,
            }
            assert describe_overlap(second.sessions.get_live("arm").require_robot_io()) == expected
