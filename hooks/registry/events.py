"""The bodies of events: of a policy folder in the Hub's shape, of sessions in that of Standard Webhooks."""

import math
import re
from collections.abc import Mapping
from typing import Any

from hooks.payload import WebhookPayload
from hooks.sending.queue import Message, new_id
from hooks.sending.schedule import iso

_TYPE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


def repo_message(
    name: str, new_sha: str, old_sha: str | None, *, repo_type: str = "model", ref: str = "refs/heads/main"
) -> Message:
    """The content of a repo of ours is another one."""
    repo = {
        "type": repo_type,
        "name": name,
        "id": f"{repo_type}:{name}",
        "private": True,
        "owner": {"id": name.partition("/")[0] if "/" in name else "local"},
        "headSha": new_sha,
        "tags": [],
        # It is nowhere on the web; huggingface_hub's model of the payload wants a text.
        "url": {"web": f"robojax:{repo_type}/{name}"},
    }
    body = {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": repo,
        "updatedRefs": [{"ref": ref, "oldSha": old_sha, "newSha": new_sha}],
    }
    return Message(new_id(), "repo.content", str(repo["id"]), body, is_hub=True)


def relayed_message(payload: WebhookPayload | Mapping[str, Any], event_id: str | None) -> tuple[Message, str]:
    """A verified event of the Hub, to be sent on as it is, and the webhook that it came by.

    Args:
        event_id: the delivery it came with; the same again is no new event. None: it is new.

    Raises:
        ValueError: it is no payload of the Hub.
    """
    checked = payload if isinstance(payload, WebhookPayload) else WebhookPayload.model_validate(payload)
    body = checked.model_dump(mode="json", exclude_unset=True)
    del body["webhook"]
    message_id = new_id() if event_id is None else f"relay:{checked.webhook.id}:{event_id}"
    subject = f"{checked.repo.type}:{checked.repo.id}"
    return Message(message_id, checked.event.scope, subject, body, is_hub=True), checked.webhook.id


def session_message(kind: str, data: Mapping[str, Any], now: float) -> Message:
    """Something happened to a session, or to the server.

    Args:
        kind: ``session.started``, ``session.policy.swapped``, ``server.degraded``, ...
        data: plain values; ``session_id`` in it is what the order of events is kept by.
        now: seconds since 1970.

    Raises:
        ValueError: the type is none.
    """
    if not _TYPE.fullmatch(kind):
        raise ValueError(f"event type {kind!r}: wanted words with dots between, e.g. session.started")
    plain = _plain(data)
    body = {"type": kind, "timestamp": iso(now), "data": plain}
    return Message(new_id(), kind, f"session:{plain.get('session_id', '')}", body, is_hub=False)


def _plain(value: Any) -> Any:
    """As JSON has it: a figure that is not finite is null, and what has no form of its own is its text."""
    if isinstance(value, Mapping):
        return {_text(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return _text(value)


def _text(value: object) -> str:
    """Without lone surrogates, as names of files may have and no database takes."""
    return str(value).encode("utf-8", "replace").decode()
