"""Which of the webhooks there are is the one that is wanted, and whether it has to be changed."""

from collections.abc import Sequence

from hooks.errors import HubTrouble
from hooks.management.webhooks import WebhookInfo, WebhookWatchedItem, masked_url

# Where registries say which job a webhook was made from; huggingface_hub 2.4 knows of none.
JOB_NAMES = ("jobSourceId", "jobId", "sourceId", "id")


def find_match(webhooks: Sequence[WebhookInfo], url: str | None, job_id: str | None) -> WebhookInfo | None:
    """The one with exactly this address, or made from this job.

    Raises:
        HubTrouble: there are several, or a webhook does not tell the job it starts.
    """
    if url is not None:
        found = [webhook for webhook in webhooks if webhook.url == url]
        wanted = f"send to {masked_url(url)}"
    else:
        jobs = [(webhook, _job_ids(webhook)) for webhook in webhooks if webhook.job is not None]
        found = [webhook for webhook, ids in jobs if job_id in ids]
        wanted = f"start job {job_id}"
        untold = [webhook.id for webhook, ids in jobs if not ids]
        if untold and not found:
            raise HubTrouble(
                f"{', '.join(untold)}: the Hub does not tell which job they were made from, so it may be one of them: "
                "name it with webhook_id, or delete them"
            )
    if len(found) > 1:
        names = ", ".join(webhook.id for webhook in found)
        raise HubTrouble(f"{len(found)} webhooks {wanted}: {names}; delete all but one of them")
    return found[0] if found else None


def _job_ids(webhook: WebhookInfo) -> set[str]:
    told = webhook.raw.get("job")
    named = [webhook.raw.get(name) for name in JOB_NAMES if name != "id"]
    named += [told.get(name) for name in JOB_NAMES] if isinstance(told, dict) else []
    return {name for name in named if isinstance(name, str)}


def is_as_wanted(webhook: WebhookInfo, watched: Sequence[WebhookWatchedItem], domains: Sequence[str]) -> bool:
    """Whether it watches just this, in whatever order."""
    return {str(item) for item in watched} == {str(item) for item in webhook.watched} and set(domains) == set(
        webhook.domains
    )
