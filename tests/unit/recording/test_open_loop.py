from dataclasses import replace

import numpy as np
import pytest

from jaxmodels import Requirements
from service.recording.library import open_source
from service.recording.replay import PolicyMismatch, replay_recording, save_plot
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy
from tests.testing.recordings import subject

NEEDS = Requirements(policy_type="act", cameras={"front": (48, 64)}, state=6, action=6, chunk=8, action_steps=4)


def test_the_error_is_the_policys_distance_at_every_tick(record):
    source = open_source(record(episodes=2, ticks=10))
    # The recording has the state n and the command n + 0.5 at tick n. The policy adds 1 per action to the state.
    report = replay_recording(source, ScriptedPolicy(NEEDS, step=1.0))
    assert report.steps == 20
    assert [episode.queried for episode in report.episodes] == [[0, 4, 8]] * 2
    assert len(report.seconds) == 6
    np.testing.assert_allclose(report.episodes[0].predicted[:, 0], range(1, 11))
    for joint in report.joint_errors():
        assert joint.mean == pytest.approx(0.5)
        assert joint.largest == pytest.approx(0.5)
        assert joint.mean_percent == pytest.approx(0.5 if joint.name == "Jaw" else 0.25)


def test_every_sets_the_requests_and_uncovered_ticks_are_skipped(record):
    report = replay_recording(open_source(record(episodes=1, ticks=10)), ScriptedPolicy(NEEDS, step=0.0), every=1)
    assert report.episodes[0].queried == list(range(10))
    # A policy that repeats the state is half a unit behind at every tick.
    assert {round(joint.largest, 3) for joint in report.joint_errors()} == {0.5}
    report = replay_recording(open_source(record("long", episodes=1, ticks=12)), ScriptedPolicy(NEEDS), every=10)
    assert report.steps == 8 + 2
    assert np.isnan(report.episodes[0].predicted[8:10]).all()


def test_mismatches_and_joints_in_another_order_are_refused(record):
    needs = Requirements(policy_type="act", cameras={"wrist": (48, 64)}, state=7, action=7, chunk=8, action_steps=4)
    with pytest.raises(PolicyMismatch) as refused:
        replay_recording(open_source(record(episodes=1)), ScriptedPolicy(needs))
    assert "7 values" in str(refused.value)
    assert "wrist" in str(refused.value)
    assert "front, top" in str(refused.value)
    source = open_source(record("again", episodes=1))
    names = tuple(f"{name}.pos" for name in SO100_REQUIREMENTS.joint_names or ())
    replay_recording(source, ScriptedPolicy(replace(NEEDS, joint_names=names)))
    with pytest.raises(PolicyMismatch, match=r"its joints are \['gripper.pos', .* the recording's \['Rotation', "):
        replay_recording(source, ScriptedPolicy(replace(NEEDS, joint_names=names[::-1])))


def test_a_language_policy_gets_the_task_of_the_recording(record):
    policy = ScriptedPolicy(replace(NEEDS, language=True))
    replay_recording(open_source(record(episodes=1)), policy)
    assert set(policy.told) == {("pick up the cube",)}
    with pytest.raises(PolicyMismatch, match="it reads an instruction, and the recording has none"):
        replay_recording(open_source(record("silent", subject(task=""), episodes=1)), policy)


@pytest.mark.parametrize(("rate", "apart"), [(None, 1), (10.0, 2)])
def test_the_second_observation_is_one_period_earlier(record, rate, apart):
    states = []

    class RecordingPolicy(ScriptedPolicy):
        def act(self, observation):
            states.append(observation["observation.state"][0, :, 0].tolist())
            return super().act(observation)

    # The recording has 20 ticks per second, and all values at tick n are n.
    policy = RecordingPolicy(replace(NEEDS, observation_steps=2, rate=rate))
    report = replay_recording(open_source(record(episodes=2, ticks=10)), policy)
    assert report.steps == 20
    assert states == 2 * [[max(at - apart, 0), at] for at in (0, 4, 8)]


def test_the_plot_is_a_png_file(record, tmp_path):
    report = replay_recording(open_source(record(episodes=2)), ScriptedPolicy(NEEDS))
    save_plot(tmp_path / "plot.png", report, "arm against a script")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
