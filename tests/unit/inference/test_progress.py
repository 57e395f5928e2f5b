import pytest

from jaxmodels.hub import Downloading
from service.inference.progress import MAX_SAMPLES, LoadDurations, LoadProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def prepare(clock: Clock, durations: LoadDurations, policy: str = "act", **seconds: float) -> LoadProgress:
    progress = LoadProgress(policy, durations, clock)
    for word, took in seconds.items():
        progress.report(word)
        clock.now += took
    progress.finish()
    return progress


def test_only_a_download_has_an_estimate_without_measurements(clock: Clock) -> None:
    progress = LoadProgress("act", LoadDurations(), clock)
    assert progress.estimate_remaining() is None
    progress.report("reading")
    assert (progress.stage, progress.estimate_remaining()) == ("reading", None)
    progress.report(Downloading(0, 1000))
    assert progress.percent() == 0
    clock.now += 10
    progress.report(Downloading(250, 1000))
    assert (progress.stage, progress.percent()) == ("downloading", 25)
    assert progress.estimate_remaining() == pytest.approx(30)
    progress.report("reading")
    assert progress.percent() is None


def test_the_remaining_time_covers_this_and_all_later_steps(clock: Clock) -> None:
    durations = LoadDurations()
    prepare(clock, durations, reading=1, compiling=8)
    progress = LoadProgress("act", durations, clock)
    progress.report("reading")
    clock.now += 0.25
    assert progress.estimate_remaining() == pytest.approx(8.75)
    progress.report("compiling")
    assert progress.estimate_remaining() == pytest.approx(8)
    clock.now += 20
    assert progress.estimate_remaining() == 0
    progress.finish()
    assert progress.estimate_remaining() is None


def test_the_estimate_prefers_the_median_of_the_same_policy(clock: Clock) -> None:
    durations = LoadDurations()
    prepare(clock, durations, "small", compiling=1)
    prepare(clock, durations, "large", compiling=60)
    assert durations.estimate("small", "compiling") == 1
    assert durations.estimate("other", "compiling") == 30.5
    assert durations.estimate("small", "downloading") is None
    for took in (100, 2, 2, 2, 2, 2):
        prepare(clock, durations, compiling=took)
    assert durations.estimate("act", "compiling") == 2
    assert len(durations._seconds["act"]["compiling"]) == MAX_SAMPLES


def test_measured_durations_survive_a_restart(clock: Clock, tmp_path) -> None:
    file = tmp_path / "state" / "durations.json"
    durations = LoadDurations(file)
    prepare(clock, durations, compiling=5)
    durations.save()
    assert LoadDurations(file).estimate("act", "compiling") == 5


@pytest.mark.parametrize("content", ["", "[]", '{"act": 3}', '{"act": {"compiling": "long"}}', "\x00"])
def test_a_broken_file_only_removes_the_estimate(tmp_path, content: str, caplog) -> None:
    file = tmp_path / "durations.json"
    file.write_text(content)
    assert LoadDurations(file).estimate("act", "compiling") is None
    assert "measured again" in caplog.text


def test_a_disk_that_cannot_be_written_is_only_a_warning(clock: Clock, tmp_path, caplog) -> None:
    (tmp_path / "state").write_text("a file in place of the folder")
    durations = LoadDurations(tmp_path / "state" / "durations.json")
    prepare(clock, durations, compiling=5)
    durations.save()
    assert "not remembered" in caplog.text
