import pytest

from hooks.payload import WebhookPayload
from service.rollout.triggers import TriggerTarget, interpret_delivery, matches_ref
from tests.unit.rollout.world import REPO, Robot, pushed

MAIN = TriggerTarget(REPO, "main")
SHA = "1" * 40


@pytest.mark.parametrize(
    ("followed", "moved", "matches"),
    [
        (None, "refs/heads/main", True),
        (None, "refs/heads/dev", False),
        ("main", "refs/heads/main", True),
        ("v1", "refs/tags/v1", True),
        ("v1", "refs/heads/v1", True),
        ("refs/tags/v1", "refs/tags/v1", True),
        ("refs/tags/v1", "refs/heads/v1", False),
        ("deploy-*", "refs/tags/deploy-12", True),
        ("refs/tags/deploy-*", "refs/tags/deploy-12", True),
        ("deploy-*", "refs/tags/other", False),
        ("deploy-*", "refs/heads/deploy-12", False),
    ],
)
def test_a_session_follows_matching_refs(followed: str | None, moved: str, matches: bool) -> None:
    assert matches_ref(followed or "main", moved) is matches
    reading = interpret_delivery(pushed(SHA, moved), [Robot("a", ref=followed)])
    assert reading.targets == ((TriggerTarget(REPO, followed or "main"),) if matches else ())
    assert (reading.ignored is None) is matches


def dataset_payload() -> WebhookPayload:
    payload = pushed(SHA)
    payload.repo.type = "dataset"
    return payload


@pytest.mark.parametrize(
    ("payload", "robot"),
    [
        (pushed(SHA, "refs/pr/1"), Robot("a", ref="refs/pr/1")),
        (pushed(SHA, "refs/convert/parquet"), Robot("a", ref="refs/convert/parquet")),
        (pushed(None), Robot("a")),
        (dataset_payload(), Robot("a")),
        (pushed(SHA), Robot("a", mode="off")),
    ],
    ids=["proposal", "conversion", "deleted ref", "dataset", "off"],
)
def test_deliveries_that_deploy_nothing(payload: WebhookPayload, robot: Robot) -> None:
    assert interpret_delivery(payload, [robot]).targets == ()


def test_sessions_of_one_ref_are_one_target() -> None:
    robots = [Robot("a"), Robot("b"), Robot("c", ref="main"), Robot("d", ref="dev"), Robot("e", repo="someone/leg")]
    assert interpret_delivery(pushed(SHA), robots).targets == (MAIN,)


@pytest.mark.parametrize(
    "refs", [None, "refs/heads/main", [{"ref": "refs/heads/main", "newSha": 5}], [{"ref": None}], 3]
)
def test_missing_or_unreadable_refs_count_as_all_refs(refs: object) -> None:
    body = pushed(SHA).model_dump(mode="json", exclude_unset=True) | {"updatedRefs": refs}
    payload = WebhookPayload.model_validate(body)
    assert interpret_delivery(payload, [Robot("a"), Robot("b", ref="v1")]).targets == (MAIN, TriggerTarget(REPO, "v1"))


@pytest.mark.parametrize(
    ("scope", "action", "parts", "code"),
    [
        ("repo", "delete", {}, "repo_deleted"),
        ("repo", "move", {"movedTo": {"name": "x/y", "owner": {"id": "1"}}}, "repo_moved"),
        ("repo.config", "update", {"updatedConfig": {"private": True}}, "repo_private"),
        ("repo.config", "update", {"updatedConfig": {"private": False}}, None),
        ("repo.config", "update", {}, None),
        ("repo", "update", {}, None),
        ("discussion", "create", {}, None),
        ("repo.content.later", "update", {}, "deployed"),
    ],
)
def test_events_other_than_a_push_deploy_nothing(scope: str, action: str, parts: dict, code: str | None) -> None:
    reading = interpret_delivery(pushed(SHA, event={"scope": scope, "action": action}, **parts), [Robot("a")])
    if code == "deployed":
        assert reading.targets == (MAIN,)
        return
    assert reading.targets == ()
    assert (reading.alert and reading.alert[0]) == code
    assert bool(reading.ignored) is (code is None)
