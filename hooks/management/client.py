"""The client: the operations, and what keeps webhooks as they are wanted."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from hooks.errors import HubTrouble
from hooks.management.arguments import (
    GOOD_SECRET,
    HUB_DOMAINS,
    Watchable,
    check_job_secrets,
    check_secret,
    check_target,
    read_domains,
    read_watched,
)
from hooks.management.matching import find_match, is_as_wanted
from hooks.management.operations import Operations, Token, body_of, not_empty
from hooks.management.retries import wait_before_retry
from hooks.management.self_test import Healing, self_test
from hooks.management.webhooks import WebhookInfo


class WebhooksClient(Operations):
    """huggingface_hub's seven operations, ``replay``, ``ensure`` and ``heal``."""

    def ensure(
        self,
        *,
        url: str | None = None,
        job_id: str | None = None,
        watched: Watchable | Iterable[Watchable],
        domains: str | Iterable[str] | None = None,
        secret: str | None = None,
        secrets: Mapping[str, str] | None = None,
        webhook_id: str | None = None,
        enable: bool = True,
        token: Token = None,
        tell: Callable[[str], None] | None = None,
    ) -> WebhookInfo:
        """Exactly one webhook like this: made if it is not there, changed if it differs, enabled if it is not.

        Twice is once. It is found by its exact address or job. A secret is sent every time: the Hub does not tell
        whether it is the same. When making one fails half-way, it is looked for before it is tried again.

        Args:
            domains: both when None and it is made, those it has when None and it is there.
            webhook_id: that it is, instead of looking for it.
            enable: False leaves one that is disabled or suspended as it is.
            tell: is told ``created``, ``updated``, ``enabled`` or ``unchanged``.

        Raises:
            HubTrouble: several send to this address, or start this job.
        """
        check_target(url, job_id, allow_http=self.allow_http)
        check_job_secrets(secrets, job_id)
        check_secret(secret, shortest=GOOD_SECRET)
        items = not_empty(read_watched(watched))
        named: Sequence[str] | None = None if domains is None else read_domains(domains)
        told = tell or (lambda _: None)
        attempt = 0
        while True:
            attempt += 1
            if webhook_id is not None:
                found = self.get_webhook(webhook_id, token=token)
            else:
                found = find_match(self.list_webhooks(token=token), url, job_id)
            if found is not None:
                break
            try:
                body = body_of(items, named or HUB_DOMAINS, url, job_id, secret, secrets)
                made = self.send("POST", "", body, token=token)
            except HubTrouble as trouble:
                wait = wait_before_retry(trouble, attempt, now=time.time())
                if wait is None or wait > self._hub.timeout:
                    raise
                time.sleep(wait)
            else:
                told("created")
                return made
        named = found.domains if named is None else named
        steps = []
        # Of a job that was named by the webhook's id, nobody tells whether it is this one.
        is_untold = secret is not None or bool(secrets) or (webhook_id is not None and job_id is not None)
        if is_untold or found.url != url or not is_as_wanted(found, items, named):
            body = body_of(items, named, url, job_id, secret, secrets)
            found = self.send("POST", f"/{found.id}", body, token=token, repeats=True)
            steps.append("updated")
        if enable and found.status != "enabled":
            found = self.enable_webhook(found.id, token=token)
            steps.append("enabled")
        for step in steps or ["unchanged"]:
            told(step)
        return found

    def heal(
        self,
        webhook_id: str | None = None,
        *,
        try_first: bool = False,
        secret: str | None = None,
        token: Token = None,
    ) -> list[Healing]:
        """Enable those that the Hub suspended because deliveries failed; those that somebody disabled stay so.

        Args:
            webhook_id: only this one.
            try_first: send a test payload to the address from here, and enable only if it is taken.
            secret: for the test; otherwise the one that the Hub tells, if it does.
        """
        webhooks = (
            self.list_webhooks(token=token) if webhook_id is None else [self.get_webhook(webhook_id, token=token)]
        )
        found = []
        for webhook in webhooks:
            if webhook.status != "suspended":
                if webhook_id is not None:
                    found.append(Healing(webhook, False, f"it is not suspended but {webhook.status}"))
                continue
            is_good, reason = (True, "") if not try_first else self_test(webhook, secret or webhook.secret)
            if is_good:
                webhook = self.enable_webhook(webhook.id, token=token)
            found.append(Healing(webhook, is_good, reason))
        return found
