"""What has to hold before a request becomes an event, cheapest first; nothing is parsed for a stranger."""

import asyncio
import hashlib
import json
import secrets
import time
from functools import partial

from sanic import Request

from hooks.receiving import answers, body
from hooks.receiving.body import Broken, TooLarge, TooSlow
from hooks.receiving.endpoint import Endpoint
from hooks.receiving.event import Answer, Status
from hooks.receiving.ledger import Arrival
from hooks.receiving.payloads import Facts, Unusable, check, facts_of, is_quick, parse
from hooks.receiving.rates import Rates
from hooks.receiving.secrets import SECRET_HEADERS
from hooks.receiving.settings import ReceiverSettings

ID_HEADERS = ("webhook-id", "x-github-delivery")
LONGEST_ID = 256


class Refused(Exception):
    """A request that becomes no event."""

    def __init__(self, told: Answer):
        super().__init__(told.status)
        self.told = told


async def read(endpoint: Endpoint, request: Request, settings: ReceiverSettings, rates: Rates) -> bytes:
    """The body of a request that may send: size, rate, secret, in this order, and as early as each can be told.

    Raises:
        Refused: it may not.
    """
    too_large = answers.refusal(413, f"The body has more than {settings.max_body} bytes.")
    if body.declared(request) > settings.max_body:
        raise Refused(too_large)
    wait = rates.take(request.remote_addr or request.ip or "", time.monotonic())
    if wait:
        headers = {"retry-after": str(max(1, round(wait)))}
        raise Refused(answers.answer({"error": "Too many deliveries from this address."}, 429, headers))
    refusal = endpoint.proofs.refuse_by_head(request.headers)
    if refusal is not None:
        raise Refused(refusal)
    try:
        content = await body.read(request, settings.max_body, settings.read_within)
    except TooLarge:
        raise Refused(too_large) from None
    except TooSlow:
        raise Refused(answers.refusal(408, f"The body took more than {settings.read_within:g} s.")) from None
    except Broken:
        raise Refused(answers.refusal(400, "The body cannot be read.")) from None
    # A signature of 5 MB takes 4 ms for each secret that may have made it.
    proven = partial(endpoint.proofs.refuse, request.headers, content, now=time.time())
    refusal = proven() if is_quick(content) else await asyncio.to_thread(proven)
    if refusal is not None:
        raise Refused(refusal)
    return content


def arrival_of(endpoint: Endpoint, request: Request, content: bytes) -> Arrival:
    """What is kept of a request whose sender is known.

    Raises:
        Refused: its body is not what the endpoint needs.
    """
    takes_payload = endpoint.handler.takes("payload")
    facts = Facts()
    try:
        if content or takes_payload:
            data = parse(content)
            facts = facts_of(data)
            if takes_payload:
                check(endpoint.handler.model, data)
    except Unusable as error:
        # A handler that takes no payload may be sent anything.
        if takes_payload:
            more = {"fields": list(error.fields)} if error.fields else {}
            raise Refused(answers.refusal(422, f"{str(error).capitalize()}.", **more)) from None
    delivery_id = next((request.headers[name] for name in ID_HEADERS if request.headers.get(name)), None)
    if delivery_id is not None and (len(delivery_id) > LONGEST_ID or not delivery_id.isprintable()):
        raise Refused(answers.refusal(422, "The id of the delivery is not usable."))
    kept = {name.lower(): text for name, text in request.headers.items() if name.lower() not in SECRET_HEADERS}
    return Arrival(
        id=secrets.token_hex(12),
        path=endpoint.path,
        body=content,
        headers=json.dumps(kept),
        lane=facts.repo_id or "",
        # An empty body says nothing, so two of them are two events.
        identity=f"body:{hashlib.sha256(content).hexdigest()}" if content and delivery_id is None else "",
        webhook_id=facts.webhook_id or "",
        delivery_id=delivery_id,
        repo=facts.repo,
        repo_type=facts.repo_type,
        scope=facts.scope,
        action=facts.action,
        status=Status.WAITING if endpoint.filter.wants(facts) else Status.IGNORED,
    )
