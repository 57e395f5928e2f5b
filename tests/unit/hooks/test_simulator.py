import socket

import pytest
from aiohttp import web

from hooks.errors import InvalidWebhook
from hooks.payload import ACTIONS, SAMPLE_SCOPES, WebhookPayload, sample
from hooks.payload import SCOPES as DOCUMENTED
from hooks.signatures import sign_github, sign_standard
from hooks.testing import build_deliveries, build_headers, send_deliveries

STANDARD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_there_is_a_sample_of_every_documented_kind_of_event():
    made = [WebhookPayload.model_validate(sample(name)) for name in SAMPLE_SCOPES]
    assert {payload.event.scope for payload in made} == set(DOCUMENTED)
    assert {payload.event.action for payload in made} == set(ACTIONS)
    refs = [moved for payload in made for moved in payload.updatedRefs or ()]
    assert {moved.ref.split("/")[1] for moved in refs} == {"heads", "tags", "pr"}
    assert any(moved.oldSha is None for moved in refs)
    assert any(moved.newSha is None for moved in refs)
    assert any(payload.movedTo for payload in made)
    assert any(payload.comment and payload.comment.hidden for payload in made)
    assert any(payload.discussion and payload.discussion.isPullRequest for payload in made)


@pytest.mark.parametrize("name", SAMPLE_SCOPES)
def test_a_sample_has_what_the_hub_documents_and_nothing_else(name):
    payload = WebhookPayload.model_validate(sample(name, repo="a/b", sha="c0ffee"))
    assert not payload.model_extra
    assert payload.event.scope == name.partition(":")[0]
    # The head is told with scopes of repo, and a bucket has none.
    assert (payload.repo.headSha is not None) == (payload.is_about("repo") and payload.repo.type != "bucket")
    assert (payload.updatedFiles is not None) == (payload.repo.type == "bucket")


def test_an_event_that_is_not_documented_is_refused():
    with pytest.raises(InvalidWebhook, match=r"no sample of 'repo.flight'; wanted one of repo, "):
        sample("repo.flight")


def test_copies_share_an_id_and_a_shuffle_is_the_same_every_time():
    events = [(name, sample(name)) for name in SAMPLE_SCOPES]
    sent = build_deliveries(events, copies=3, is_reordered=True, seed=1)
    assert len({delivery.id for delivery in sent}) == len(SAMPLE_SCOPES)
    assert len(sent) == 3 * len(SAMPLE_SCOPES)
    order = [delivery.kind for delivery in sent]
    assert order != sorted(order, key=SAMPLE_SCOPES.index)
    assert order == [delivery.kind for delivery in build_deliveries(events, copies=3, is_reordered=True, seed=1)]


def test_signatures_are_those_that_a_receiver_verifies():
    (delivery,) = build_deliveries([("repo", sample("repo"))])
    found = build_headers(delivery, secret="s", standard_secret=STANDARD, github_secret="g", now=1000.5)
    assert found["X-Webhook-Secret"] == "s"
    assert found["webhook-signature"] == sign_standard(STANDARD, found["Webhook-Id"], 1000, delivery.body)
    assert found["X-Hub-Signature-256"] == sign_github("g", delivery.body)


async def test_outcomes_tell_status_time_and_what_went_wrong():
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/redirect":
            raise web.HTTPFound("/elsewhere")
        return web.json_response({"id": request.headers["Webhook-Id"]}, status=201)

    app = web.Application()
    app.router.add_post("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await web.SockSite(runner, listener).start()
    sent = build_deliveries([("repo", sample("repo"))], copies=2)
    try:
        found = [one async for one in send_deliveries(f"{url}/x", sent, at_once=2)]
        assert [(one.status, one.is_accepted, sent[0].id in one.answer) for one in found] == [(201, True, True)] * 2
        assert all(0 < one.seconds < 30 for one in found)
        (moved, _) = [one async for one in send_deliveries(f"{url}/redirect", sent)]
        assert (moved.status, moved.is_accepted) == (302, False)
    finally:
        await runner.cleanup()
    (gone, _) = [one async for one in send_deliveries(f"{url}/x", sent)]
    assert (gone.status, gone.is_accepted) == (None, False)
    assert "onnect" in gone.answer
