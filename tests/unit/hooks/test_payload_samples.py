import pytest

from hooks.errors import InvalidWebhook
from hooks.payload import SAMPLES, WebhookPayload, sample


@pytest.mark.parametrize("scope", SAMPLES)
def test_a_sample_has_what_the_hub_documents_and_nothing_else(scope):
    payload = WebhookPayload.model_validate(sample(scope, repo="a/b", sha="c0ffee"))
    assert not payload.model_extra
    assert payload.event.scope == scope
    assert (payload.repo.headSha == "c0ffee") == payload.is_about("repo")
    assert (payload.discussion is not None) == payload.is_about("discussion")
    assert payload.new_sha("main") == ("c0ffee" if scope == "repo.content" else None)


def test_an_event_that_is_not_documented_is_refused():
    with pytest.raises(InvalidWebhook, match=r"no sample of 'repo.flight'; wanted one of repo, "):
        sample("repo.flight")
