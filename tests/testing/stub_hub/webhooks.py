"""Webhooks of the stub, the seven requests that manage them, and replay.

Source: huggingface_hub 2.4 on the wire. An update replaces exactly the sent fields, so that a test detects a client
that sends an empty ``watched`` by accident.
"""

import json
import threading
from dataclasses import dataclass
from typing import Any

from tests.testing.stub_hub.answers import Answer, Refusal, as_json

WATCHED = ("bucket", "dataset", "kernel", "model", "org", "space", "user")
DOMAINS = ("repo", "discussion")


@dataclass
class Webhook:
    """A webhook of the user; ``disabled`` is a bool, or the Hub's reason for a suspension."""

    id: str
    watched: list[dict[str, str]]
    domains: list[str]
    url: str | None = None
    job: dict[str, Any] | None = None
    secret: str | None = None
    disabled: bool | str = False

    def as_json(self, echoes_secrets: bool) -> dict[str, Any]:
        secret = {"secret": self.secret} if echoes_secrets else {"hasSecret": self.secret is not None}
        target = {"job": self.job} if self.job else {"url": self.url}
        return {
            "id": self.id,
            **target,
            "watched": self.watched,
            "domains": self.domains,
            **secret,
            "disabled": self.disabled,
        }

    def is_for(self, repo_type: str, repo: str, scope: str) -> bool:
        """Return whether an event of this scope in this repo is delivered to the webhook."""
        if self.disabled is not False or scope.split(".")[0] not in self.domains:
            return False
        owner = repo.split("/")[0]
        return any(
            item["name"] == (owner if item["type"] in ("user", "org") else repo)
            and item["type"] in ("user", "org", repo_type)
            for item in self.watched
        )


class Webhooks(dict[str, Webhook]):
    """All webhooks by id, and their requests."""

    def __init__(self, echoes_secrets: bool):
        super().__init__()
        self.echoes_secrets = echoes_secrets
        self._lock = threading.Lock()
        self._made = 0

    def answer(self, method: str, parts: list[str], body: bytes) -> Answer:
        with self._lock:
            match method, parts:
                case "GET", []:
                    return as_json([webhook.as_json(self.echoes_secrets) for webhook in self.values()])
                case "POST", []:
                    return self._one(self._create(json.loads(body)))
                case "GET", [name]:
                    return self._one(self._find(name))
                case "POST", [name]:
                    return self._one(self._update(self._find(name), json.loads(body)))
                case "DELETE", [name]:
                    del self[self._find(name).id]
                    return Answer(200)
                case "POST", [name, "enable" | "disable" as what]:
                    webhook = self._find(name)
                    webhook.disabled = what == "disable"
                    return self._one(webhook)
                case "POST", [name, "replay", log]:
                    webhook = self._find(name)
                case _:
                    raise Refusal(405, f"{method} is not allowed here")
        try:
            return as_json({"status": self._replay(webhook, log)})
        except KeyError:
            raise Refusal(404, f"No delivery {log}") from None

    def _replay(self, webhook: Webhook, log: str) -> int:
        """Return the receiver's status; the stub keeps no log of deliveries."""
        raise KeyError(log)

    def _one(self, webhook: Webhook) -> Answer:
        return as_json({"webhook": webhook.as_json(self.echoes_secrets)})

    def _find(self, name: str) -> Webhook:
        if name not in self:
            raise Refusal(404, f"Webhook {name} not found")
        return self[name]

    def _create(self, fields: dict[str, Any]) -> Webhook:
        self._made += 1
        webhook = Webhook(f"{self._made:024x}", *_checked(fields))
        self._fill(webhook, fields)
        self[webhook.id] = webhook
        return webhook

    def _update(self, webhook: Webhook, fields: dict[str, Any]) -> Webhook:
        webhook.watched, webhook.domains = _checked({"domains": webhook.domains, **fields})
        self._fill(webhook, fields)
        return webhook

    def _fill(self, webhook: Webhook, fields: dict[str, Any]) -> None:
        if "url" in fields:
            webhook.url, webhook.job = str(fields["url"]), None
        if "jobSourceId" in fields:
            command = ["echo", str(fields["jobSourceId"])]
            webhook.url, webhook.job = None, {"dockerImage": "python:3.12", "command": command, "arguments": []}
        if webhook.job is not None and "secrets" in fields:
            named = {**webhook.job.get("secrets", {}), **fields["secrets"]}
            webhook.job["secrets"] = {name: value for name, value in named.items() if value}
        if "secret" in fields:
            webhook.secret = fields["secret"] or None


def _checked(fields: dict[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
    watched, domains = fields.get("watched"), fields.get("domains", list(DOMAINS))
    if not isinstance(watched, list) or not all(
        isinstance(item, dict) and item.get("type") in WATCHED and isinstance(item.get("name"), str) for item in watched
    ):
        raise Refusal(400, f'"watched" has to be a list of a type ({", ".join(WATCHED)}) and a name each')
    return watched, domains
