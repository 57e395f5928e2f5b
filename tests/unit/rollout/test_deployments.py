import asyncio
import logging
import shutil
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hooks.database import Database
from hooks.errors import StoreError
from service.errors import UpdateFailed
from service.rollout.sources import FolderSource, HubLimits, HubSource
from service.rollout.triggers import MAX_DELIVERY_IDS
from tests.testing.stub_hub import Failure
from tests.unit.rollout.world import REPO, SETTINGS, GateVerdict, Robot, World, policy, pushed, until


async def test_the_head_is_deployed_instead_of_the_commit_in_the_payload(world: World) -> None:
    older = world.hub.push(REPO, policy(1), deliver=False)
    head = world.hub.push(REPO, policy(2), deliver=False)
    await world.deliver(older)
    assert world.robots["a"].sha == head
    await world.deliver(older)
    assert world.results == ["swapped"], "a delivery without a change creates no record"


async def test_corruption_of_the_same_size_is_refused(world: World) -> None:
    running = world.robots["a"].sha
    corrupt = world.hub.script("GET .*/resolve/.*model.safetensors", "corrupt", times=None)
    bad = await world.arrive(policy(1))
    record = world.only_record(("rejected", "checksum"))
    assert "model.safetensors" in record.text
    assert (world.robots.steps, world.robots["a"].sha) == ([], running)
    assert corrupt.met == SETTINGS.transfers
    assert [entry.sha for entry in world.deployments.quarantine.list()] == [bad]
    assert world.events[-1][0] == "policy.rejected"


@pytest.mark.parametrize(("how", "times"), [("corrupt", 1), ("short", 1), ("short", None)])
async def test_a_bad_transfer_is_repeated_and_quarantines_no_commit(world: World, how: str, times: int | None) -> None:
    world.hub.script("GET .*/resolve/.*model.safetensors", how, times=times)
    sha = await world.arrive(policy(1))
    world.only_record(("failed", "transfer") if times is None else ("swapped", None))
    assert (world.robots["a"].sha == sha) == (times == 1)
    assert not world.quarantined


async def test_a_hanging_hub_times_out_and_the_next_push_is_deployed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxmodels.hub.QUIET", 1.0)
    limits = HubLimits(answer_timeout=30.0, download_timeout=60.0, min_free_bytes=0)
    hanging = HubSource(world.hub.url, cache=tmp_path / "other", limits=limits)
    world.sources = lambda repo: hanging
    await world.restart()
    hangs = world.hub.script("GET .*blobs=", "hang")
    await world.arrive(policy(1))
    assert world.deployments.list()[0].reason == "timeout"
    left_behind = [thread for thread in threading.enumerate() if thread.name == "hub-call"]
    hangs.released.set()
    await until(lambda: not any(thread.is_alive() for thread in left_behind))
    sha = await world.arrive(policy(2))
    assert world.robots["a"].sha == sha


async def test_a_commit_without_weights_or_with_a_pickle_is_refused(world: World) -> None:
    await world.arrive({"model.safetensors": None})
    await world.arrive({"pytorch_model.bin": b"cos\nsystem\n"})
    assert [record.reason for record in world.deployments.list()] == ["denied_file", "incomplete"]
    assert not [request for request in world.hub.requests if "/resolve/" in request.path]


async def test_quarantine_survives_a_restart_and_a_poll(world: World) -> None:
    world.robots["a"].verdicts["prepare"] = GateVerdict("not_finite", "joint 'wrist': NaN")
    bad = await world.arrive(policy(1))
    (record,) = world.deployments.list()
    assert (record.result, record.reason, record.sha) == ("rejected", "not_finite", bad)
    assert world.robots.of("discard") == [bad]
    await world.restart()
    world.robots["a"].verdicts.clear()
    await world.deployments.reconcile()
    await world.deliver(bad)
    assert world.robots.of("prepare") == [bad]
    assert [record.reason for record in world.deployments.list()] == ["quarantined", "not_finite"]
    assert (await world.deploy("a", bad)).reason == "quarantined"
    assert await world.deployments.quarantine.release(bad) == 1
    await world.reconcile()
    assert world.robots["a"].sha == bad


@pytest.mark.parametrize(
    ("step", "verdict", "outcome", "is_quarantined"),
    [
        ("prepare", GateVerdict("session", "the session ended"), ("failed", "session"), False),
        ("swap", GateVerdict("session", "the robot is held"), ("failed", "session"), False),
        (
            "probation",
            GateVerdict("missed_ticks", "9 ticks", {"missed_ticks": 9}),
            ("rolled_back", "missed_ticks"),
            True,
        ),
    ],
)
async def test_a_commit_is_quarantined_only_for_its_own_faults(world, step, verdict, outcome, is_quarantined) -> None:
    running = world.robots["a"].sha
    world.robots["a"].verdicts[step] = verdict
    sha = await world.arrive(policy(1))
    await world.reconcile()
    record = world.only_record(outcome)
    assert world.robots.of("prepare") == [sha], "the commit is not prepared again at once"
    assert world.robots["a"].sha == running
    assert world.quarantined == ([sha] if is_quarantined else [])
    assert world.events[-1][0] == f"policy.{outcome[0]}"
    if step == "swap":
        assert world.robots["a"].prepared is None
    if step == "probation":
        assert record.figures["a"]["probation"] == {"missed_ticks": 9}


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_a_newer_head_supersedes_the_commit_in_preparation(world: World, is_delivered: bool) -> None:
    (older,) = await world.start_preparing(policy(1))
    newer = world.push(policy(2)) if is_delivered else world.hub.push(REPO, policy(2), deliver=False)
    if is_delivered:
        await until(lambda: world.robots.of("prepare") == [older, newer])
    world.robots.may_prepare.set()
    await world.idle()
    assert world.results == ["superseded", "swapped"]
    assert world.robots.of("swap") == [newer]
    assert world.robots.of("discard") == [older]


async def test_pushes_faster_than_a_preparation_are_still_deployed(world: World) -> None:
    await world.restart(replace(SETTINGS, superseded=1))
    made = await world.start_preparing(policy(1), policy(2))
    assert world.robots.of("prepare") == made
    made.append(world.push(policy(3)))
    await until(lambda: not world.deployments._trigger_queue.is_empty)
    await until(lambda: world.deployments._trigger_queue.is_empty)
    world.robots.may_prepare.set()
    await world.idle()
    assert world.results == ["superseded", "swapped", "swapped"]
    assert world.robots.of("swap") == made[1:]


async def test_a_delivery_of_the_commit_in_preparation_changes_nothing(world: World) -> None:
    (sha,) = await world.start_preparing(policy(1))
    world.deployments.handle_delivery(pushed(sha), "again")
    await until(lambda: "again" in world.deployments.list()[0].delivery_ids)
    for number in range(2 * MAX_DELIVERY_IDS):
        world.deployments.handle_delivery(pushed(sha), str(number))
    await until(lambda: str(2 * MAX_DELIVERY_IDS - 1) in world.deployments.list()[0].delivery_ids)
    assert len(world.deployments.list()[0].delivery_ids) == MAX_DELIVERY_IDS
    world.robots.may_prepare.set()
    await world.idle()
    assert world.robots.of("prepare") == [sha]
    assert world.results == ["swapped"]


async def test_other_sessions_follow_after_the_first_probation(world: World) -> None:
    world.robots.robots += [Robot("b"), Robot("c")]
    sha = await world.arrive(policy(1))
    order = [(step, session) for step, session, _ in world.robots.steps]
    assert order.index(("probation", "a")) < order.index(("prepare", "b")) < order.index(("prepare", "c"))
    assert {robot.sha for robot in world.robots.robots} == {sha}
    assert world.deployments.list()[0].sessions == ["a", "b", "c"]


@pytest.mark.parametrize("reason", ["busy", "gone"])
async def test_a_held_or_deleted_session_does_not_block_the_others(world: World, reason: str) -> None:
    world.robots.robots += [Robot("b"), Robot("c")]
    world.robots["a"].verdicts["prepare"] = GateVerdict(reason, "not now")
    world.robots["b"].verdicts["swap"] = GateVerdict(reason, "not now")
    sha = await world.arrive(policy(1))
    assert world.robots["c"].sha == sha
    record = world.only_record(("failed", "busy") if reason == "busy" else ("swapped", None))
    assert [record.figures[session]["result"] for session in "abc"] == ["failed", "failed", "swapped"]
    assert not world.quarantined
    world.robots["a"].verdicts.clear()
    assert (await world.deploy("a")).result == "swapped"


async def test_a_session_that_stops_following_gets_no_deployment(world: World) -> None:
    world.robots.robots += [Robot("b"), Robot("c")]
    (sha,) = await world.start_preparing(policy(1))
    world.robots["b"].mode = "off"
    world.robots.may_prepare.set()
    await world.idle()
    assert [world.robots[session].sha == sha for session in "abc"] == [True, False, True]


async def test_a_rollback_directly_before_a_swap_takes_precedence(world: World) -> None:
    first = world.robots["a"].sha
    await world.arrive(policy(1))
    await world.start_preparing(policy(2))
    hanging = world.hub.script("GET /api/models/.*", "hang", times=1)
    world.robots.may_prepare.set()
    await until(lambda: hanging.met == 1)
    assert (await world.deployments.rollback("a")).result == "rolled_back"
    hanging.released.set()
    await world.idle()
    assert (world.robots["a"].sha, world.deployments.list()[1].reason) == (first, "rollback")


async def test_a_rollback_supersedes_earlier_requests(world: World) -> None:
    first = world.robots["a"].sha
    await world.arrive(policy(1))
    world.hub.push(REPO, policy(2), deliver=False)
    world.robots.may_prepare.clear()
    request = await world.deployments.begin_deployment("a", None)
    await until(lambda: len(world.robots.of("prepare")) == 2)
    await world.deployments.rollback("a")
    world.robots.may_prepare.set()
    await world.idle()
    assert (request.result, request.reason) == ("superseded", "rollback")
    assert world.robots["a"].sha == first


async def test_a_request_is_not_replaced_by_a_waiting_trigger(world: World) -> None:
    first = world.robots["a"].sha
    await world.arrive(policy(1))
    second = world.hub.head(REPO)
    world.robots.may_prepare.clear()
    request = await world.deployments.begin_deployment("a", str(first))
    await until(lambda: len(world.robots.of("prepare")) == 2)
    world.notify(second)
    await asyncio.sleep(0.3)  # The trigger waits for its turn now.
    hanging = world.hub.script("GET /api/models/.*", "hang", times=1)
    world.robots.may_prepare.set()
    await until(lambda: hanging.met == 1)
    hanging.released.set()
    await world.idle()
    assert (request.result, world.robots["a"].sha) == ("swapped", first)


async def test_a_staged_commit_is_swapped_at_once_on_request(world: World) -> None:
    world.robots["a"].mode = "stage"
    sha = await world.arrive(policy(1))
    assert (world.results, world.events[-1][0]) == (["staged"], "policy.staged")
    assert world.robots["a"].prepared == sha
    await world.deployments.reconcile()
    await world.deliver(sha)
    assert world.robots.of("prepare") == [sha]
    record = await world.deploy("a", sha)
    assert record.result == "swapped"
    assert [stage.name for stage in record.stages] == ["resolving", "swapping", "probation"]
    assert world.robots.of("prepare") == [sha]


async def test_a_newer_commit_replaces_a_staged_commit(world: World) -> None:
    world.robots["a"].mode = "stage"
    older = await world.arrive(policy(1))
    newer = await world.arrive(policy(2))
    assert world.robots.of("discard") == [older]
    assert world.robots["a"].prepared == newer
    world.robots["a"].prepared = None  # The session has lost the prepared policy.
    assert (await world.deploy("a")).result == "swapped"
    assert world.robots["a"].sha == newer
    assert world.robots.of("prepare") == [older, newer, newer]


async def test_sessions_with_mode_off_are_deployed_only_on_request(world: World) -> None:
    world.robots["a"].mode = "off"
    sha = world.push(policy(1))
    await world.reconcile()
    assert world.results == []
    assert (await world.deploy("a")).result == "swapped"
    assert world.robots["a"].sha == sha
    assert (await world.deploy("a")).result == "noop"
    with pytest.raises(UpdateFailed, match="'z' runs no policy"):
        await world.deploy("z")


async def test_an_older_commit_is_deployed_only_on_request(world: World) -> None:
    first = world.robots["a"].sha
    second = await world.arrive(policy(1))
    world.hub.repo(REPO).refs["refs/heads/main"] = str(first)
    await world.deliver(str(first))
    assert (world.deployments.list()[0].result, world.deployments.list()[0].reason) == ("rejected", "older")
    assert not world.quarantined
    world.hub.repo(REPO).refs["refs/heads/main"] = second
    assert (await world.deploy("a", first)).result == "swapped"
    world.notify(second)
    await world.reconcile()
    assert world.robots["a"].sha == first
    third = await world.arrive(policy(2))
    assert world.robots["a"].sha == third


async def test_a_request_supersedes_an_automatic_preparation(world: World) -> None:
    first = world.robots["a"].sha
    second = world.hub.push(REPO, policy(1), tag="v1", deliver=False)
    world.robots["a"].sha = second
    await world.start_preparing(policy(2))
    request = await world.deployments.begin_deployment("a", str(first))
    assert request.result is None
    world.robots.may_prepare.set()
    await world.idle()
    assert world.results == ["superseded", "swapped"]
    assert (request.result, world.robots["a"].sha) == ("swapped", first)
    assert (await world.deploy("a", "v9")).reason == "unknown_revision"


async def test_a_requested_rollback_is_immediate_and_survives_polls(world: World) -> None:
    first = world.robots["a"].sha
    sha = await world.arrive(policy(1))
    record = await world.deployments.rollback("a")
    assert (record.result, record.sha, world.robots["a"].sha) == ("rolled_back", sha, first)
    await world.reconcile()
    assert world.robots["a"].sha == first
    assert (await world.deploy("a", sha, force=True)).result == "swapped"
    assert not world.quarantined


@pytest.mark.parametrize("is_requested", [True, False])
async def test_a_kill_during_a_rollback_quarantines_the_commit(world, tmp_path, monkeypatch, is_requested) -> None:
    step, killed = "rollback" if is_requested else "probation", tmp_path / "killed"
    roll_back = getattr(world.robots, step)

    async def copy_database(*arguments: str) -> GateVerdict:
        verdict = await roll_back(*arguments)
        # Copy the database as a SIGKILL would leave it directly after the old policy has taken over.
        killed.mkdir()
        for file in world.database.parent.glob(f"{world.database.name}*"):
            shutil.copy(file, killed)
        return verdict

    if not is_requested:
        world.robots["a"].verdicts["probation"] = GateVerdict("not_finite", "not a number")
    monkeypatch.setattr(world.robots, step, copy_database)
    first, sha = world.robots["a"].sha, await world.arrive(policy(1))
    if is_requested:
        await world.deployments.rollback("a")
    assert world.robots["a"].sha == first
    monkeypatch.setattr(world, "database", killed / world.database.name)
    found = world.create_deployments()
    assert [(entry.sha, entry.reason) for entry in found.quarantine.list()] == [(sha, "interrupted")]
    found.close()


async def test_a_requested_rollback_does_not_wait_for_a_hanging_disk(world: World) -> None:
    first = world.robots["a"].sha
    await world.arrive(policy(1))
    locked = sqlite3.connect(world.database, isolation_level=None)
    locked.execute("BEGIN IMMEDIATE")
    request = asyncio.create_task(world.deployments.rollback("a"))
    await until(lambda: world.robots["a"].sha == first)
    assert not request.done()
    locked.execute("ROLLBACK")
    locked.close()
    assert (await request).result == "rolled_back"


async def test_a_rollback_needs_no_hub(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.robots["a"].sha
    fail = world.robots.probation
    hangs: list[Failure] = []

    async def probation(session_id: str, sha: str) -> GateVerdict:
        hangs.append(world.hub.script(".*", "hang", times=None))
        world.robots["a"].verdicts["probation"] = GateVerdict("not_finite", "not a number")
        return await fail(session_id, sha)

    monkeypatch.setattr(world.robots, "probation", probation)
    bad = await world.arrive(policy(1))
    assert (world.results, world.robots["a"].sha) == (["rolled_back"], first)
    assert hangs[0].met == 0
    assert world.deployments.quarantine.get(REPO, bad) is not None
    # A push arrives while the Hub hangs.
    missed = world.push(policy(2))
    await until(lambda: hangs[0].met > 0)
    hangs[0].times = 0
    hangs[0].released.set()
    await world.idle()
    monkeypatch.setattr(world.robots, "probation", fail)
    world.robots["a"].verdicts.clear()
    good = await world.arrive(policy(3))
    assert (world.results[-1], world.robots["a"].sha) == ("swapped", good)
    assert world.deployments.quarantine.get(REPO, missed) is None


async def test_a_poll_finds_a_push_whose_webhook_was_lost(world: World) -> None:
    sha = world.hub.push(REPO, policy(1), deliver=False)
    await world.restart(replace(SETTINGS, poll=60.0))
    await until(lambda: world.results == ["swapped"])
    (record,) = world.deployments.list()
    assert (record.trigger, record.webhook_id, record.sha) == ("poll", None, sha)


async def test_an_unreachable_hub_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service.rollout")
    failing = world.hub.script("GET /api/models/", 500, times=3)
    for _ in range(5):
        await world.deployments.reconcile()
    assert failing.met == 3
    messages = [record.message for record in caplog.records if "the head of" in record.message]
    assert len(messages) == 2
    assert "500" in messages[0]
    assert "can be read again" in messages[1]


@pytest.mark.parametrize("origin", ["robot", "listener"])
async def test_a_crash_ends_one_deployment_and_nothing_else(world: World, origin: str) -> None:
    if origin == "robot":
        world.robots.crash = RuntimeError("secret detail")
    else:
        world.events = None  # type: ignore[assignment] - makes the listener crash
    await world.arrive(policy(1))
    if origin == "robot":
        assert "secret" not in world.only_record(("failed", "crash")).text
    world.robots.crash = None
    sha = await world.arrive(policy(2))
    assert world.robots["a"].sha == sha


async def test_a_preparation_that_never_ends_is_a_timeout(world: World) -> None:
    await world.restart(replace(SETTINGS, preparing=0.05))
    world.robots.may_prepare.clear()
    sha = await world.arrive(policy(1))
    world.only_record(("failed", "timeout"))
    assert world.robots.of("discard") == [sha]
    assert not world.quarantined


async def test_a_full_disk_does_not_prevent_deployments(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(self: Database, *arguments: object, **named: object) -> None:
        raise StoreError("database or disk is full")

    monkeypatch.setattr(Database, "run", full)
    for step in (1, 2):
        sha = await world.arrive(policy(step))
        assert world.robots["a"].sha == sha
    world.robots["a"].verdicts["prepare"] = GateVerdict("slow", "")
    bad = await world.arrive(policy(3))
    assert world.deployments.quarantine.get(REPO, bad) is not None


async def test_a_deleted_repo_is_an_alert_and_policies_keep_running(world: World) -> None:
    deleted = pushed(None, event={"action": "delete", "scope": "repo"}, updatedRefs=None)
    reading = world.deployments.handle_delivery(deleted, "1")
    assert reading.alert is not None
    await until(lambda: world.events)  # The event follows the record.
    assert (world.results, world.deployments.list()[0].reason) == (["alert"], "repo_deleted")
    assert (world.events[-1][0], world.robots.steps) == ("policy.alert", [])


async def test_a_folder_that_changes_during_its_copy_is_copied_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"1")
    world.robots.robots = [Robot("disk", repo=str(folder))]
    is_first = threading.Event()
    copy = FolderSource._copy

    def torn(self: FolderSource, path: Path, sha: str) -> Path:
        if not is_first.is_set():
            is_first.set()
            (folder / "model.safetensors").write_bytes(b"22")
        return copy(self, path, sha)

    monkeypatch.setattr(FolderSource, "_copy", torn)
    world.deployments.handle_change(str(folder))
    await world.idle()
    (record,) = world.deployments.list()
    assert (record.result, record.trigger) == ("swapped", "folder")
    assert (world.robots.folders[0] / "model.safetensors").read_bytes() == b"22"
