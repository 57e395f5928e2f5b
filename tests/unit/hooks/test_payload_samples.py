import pytest

from hooks.errors import InvalidWebhook
from hooks.payload import ACTIONS, SAMPLE_SCOPES, WebhookPayload, sample
from hooks.payload import SCOPES as DOCUMENTED


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
