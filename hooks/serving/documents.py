"""The endpoints as an OpenAPI document, and as a page to read."""

from collections.abc import Iterable
from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema

from hooks.payload import WebhookPayload
from hooks.serving.landing import STYLE, EndpointInfo

Json = dict[str, Any]

ANSWERS = {
    "200": "Handled: what the handler returned, or null; or left alone because of its filters; or a duplicate",
    "202": "Kept, and handled in the background",
    "401": "No secret or signature",
    "403": "A wrong one",
    "413": "The body is too large",
    "422": "The body is no payload that the handler can take",
    "429": "Too many from one source",
    "500": "The handler failed; the same delivery may be sent again",
    "503": "Too many wait already; Retry-After tells when to send again",
}


def openapi(endpoints: Iterable[EndpointInfo], *, title: str = "Webhooks", version: str = "1") -> Json:
    """The OpenAPI 3.1 document."""
    _, schemas = models_json_schema([(WebhookPayload, "validation")], ref_template="#/components/schemas/{model}")
    paths: Json = {}
    for endpoint in endpoints:
        operation: Json = {
            "operationId": endpoint.path.strip("/").replace("/", "_"),
            "summary": endpoint.text or endpoint.path.rsplit("/", 1)[-1],
            "parameters": [
                {
                    "name": "Webhook-Id",
                    "in": "header",
                    "description": "Of the delivery, the same in every attempt; a second one with it is a duplicate.",
                    "schema": {"type": "string"},
                }
            ],
            "requestBody": {
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/WebhookPayload"},
                        "example": endpoint.sample(),
                    }
                }
            },
            "responses": {status: {"description": text} for status, text in ANSWERS.items()},
        }
        if endpoint.wanted:
            operation["description"] = f"Only {endpoint.wanted}."
        if endpoint.has_secret:
            operation["security"] = [{"secret": []}]
        paths[endpoint.path] = {"post": operation}
    secret = {"type": "apiKey", "in": "header", "name": "X-Webhook-Secret"}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"secret": secret}},
    }


def page(document: Json, links: dict[str, str]) -> str:
    """The document to read in a browser."""
    parts = ["<h1>Endpoints</h1><nav>"]
    parts += [f'<a href="{escape(url)}">{escape(name)}</a> ' for name, url in links.items()]
    parts.append("</nav>")
    for path, operations in document["paths"].items():
        told = operations["post"]
        parts.append(f"<h2><code>POST {escape(path)}</code></h2><p>{escape(told['summary'])}</p>")
        parts.append(f"<p>{escape(told.get('description', ''))}</p>" if "description" in told else "")
        parts.append("<p>Needs <code>X-Webhook-Secret</code>.</p>" if "security" in told else "")
    parts.append("<h2>Answers</h2>" + _table(ANSWERS.items()))
    for name, schema in document["components"]["schemas"].items():
        rows = [(field, _kind(part)) for field, part in schema.get("properties", {}).items()]
        parts.append(f"<h2>{escape(name)}</h2><p>{escape(_plain(schema.get('description', '')))}</p>{_table(rows)}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Webhooks: endpoints</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _plain(text: str) -> str:
    return text.split("\n\n")[0].replace("``", "")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    told = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<div class="scroll"><table>{told}</table></div>'


def _kind(part: Json) -> str:
    if "anyOf" in part:
        return " or ".join(_kind(one) for one in part["anyOf"])
    if part.get("type") == "array":
        return f"list of {_kind(part.get('items', {}))}"
    return str(part.get("$ref", part.get("type", "anything"))).rsplit("/", 1)[-1]
