"""Conversion of request bodies into payloads."""

import huggingface_hub
import pytest
from pydantic import BaseModel

from hooks.payload import WebhookPayload
from hooks.receiver.parsing import Facts, InvalidPayload, build_payload, check_payload, parse_json, read_facts
from tests.unit.hooks.receiver.conftest import make_payload


class Strict(BaseModel):
    count: int


class Robot(WebhookPayload):
    robot: str


def test_facts_are_cut_to_512_characters() -> None:
    data = make_payload("a" * 5_000_000)
    data["webhook"]["id"] = data["event"]["scope"] = "b" * 5_000_000
    facts = read_facts(data)
    assert [len(text or "") for text in (facts.repo, facts.webhook_id, facts.scope)] == [512] * 3


def test_unknown_fields_of_the_hub_are_kept() -> None:
    data = make_payload(later={"x": 1})
    data["repo"] |= {"type": "kernel", "stars": 3}
    data["webhook"]["version"] = 4
    data["event"]["scope"] = "repo.content.lfs"
    for model in (WebhookPayload, huggingface_hub.WebhookPayload):
        payload = build_payload(model, data)
        assert isinstance(payload, WebhookPayload)
        assert (payload.repo.type, payload.webhook.version, payload.is_about("repo.content")) == ("kernel", 4, True)
        assert (payload.later, payload.repo.stars) == ({"x": 1}, 3)
    assert type(build_payload(huggingface_hub.WebhookPayload, make_payload())) is huggingface_hub.WebhookPayload


@pytest.mark.parametrize("name", ["event", "repo", "webhook"])
def test_a_missing_part_of_a_payload_is_named(name: str) -> None:
    data = make_payload()
    data[name] = {"secret-looking": "value"}
    with pytest.raises(InvalidPayload) as refused:
        build_payload(WebhookPayload, data)
    assert refused.value.fields
    assert all(field.startswith(name) for field in refused.value.fields)
    assert "secret-looking" not in repr(refused.value.fields)


def test_other_models_and_subclasses_name_missing_fields() -> None:
    assert build_payload(Strict, {"count": 3}) == Strict(count=3)
    for model, data, field in ((Strict, {"count": "many"}, "count"), (Robot, make_payload(), "robot")):
        with pytest.raises(InvalidPayload) as refused:
            build_payload(model, data)
        assert refused.value.fields == (field,)
    assert build_payload(Robot, make_payload(robot="so100", comment=3)).robot == "so100"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"a": NaN}', b"\xff\xfe", b'"\\ud800"', b"{} {}", b'{"a": 1,}']
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidPayload, match="is not JSON"):
        parse_json(body)


@pytest.mark.parametrize("data", [[], "text", 3, None])
def test_a_body_that_is_not_an_object_is_refused(data: object) -> None:
    assert read_facts(data) == Facts()
    with pytest.raises(InvalidPayload, match="not a JSON object"):
        build_payload(None, data)


def test_facts_are_read_from_any_body() -> None:
    facts = read_facts(make_payload())
    assert (facts.repo, facts.scope, facts.action) == ("robots/act", "repo.content", "update")
    facts = read_facts({"type": "session.policy.swapped", "timestamp": "2026-01-01T00:00:00Z", "data": {}})
    assert facts.scope == "session.policy.swapped"
    assert read_facts({"event": 3, "repo": {"id": 5, "name": None}, "webhook": []}) == read_facts({}) == Facts()


def test_a_payload_with_many_files_is_read_completely() -> None:
    files = [{"path": f"{number}", "action": "add", "size": number} for number in range(1234)]
    payload = build_payload(WebhookPayload, make_payload(updatedFiles=files))
    assert [file.size for file in payload.updatedFiles] == list(range(1234))
    assert payload.model_dump(by_alias=True, exclude_unset=True)["updatedFiles"] == files
    files[1000]["size"] = "huge"
    assert build_payload(WebhookPayload, make_payload(updatedFiles=files)).updatedFiles is None


def test_check_payload_reads_only_the_required_fields() -> None:
    for model in (WebhookPayload, huggingface_hub.WebhookPayload, None):
        check_payload(model, make_payload(updatedFiles=3, discussion={}))
    for model, data in ((WebhookPayload, {}), (Robot, make_payload()), (Strict, {}), (None, [])):
        with pytest.raises(InvalidPayload):
            check_payload(model, data)
