import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from service.api.pages import full_document, specified_document
from service.app import API_ROUTES, ROUTES, create_app
from service.settings import Settings

GOLDEN = Path(__file__).parent / "openapi.golden.json"


def test_specified_document_equals_the_golden_document():
    assert json.loads(json.dumps(specified_document(ROUTES))) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("document", [specified_document(ROUTES), full_document(ROUTES)], ids=["specified", "full"])
def test_both_documents_are_valid(document):
    OpenAPIV31SpecValidator(json.loads(json.dumps(document))).validate()


def test_full_document_has_exactly_the_routes_of_the_app():
    app = create_app(Settings.from_values(embedded_transport=False))
    served = {
        (method, "/" + re.sub(r"<(\w+)[^>]*>", r"{\1}", route.path))
        for route in app.router.routes
        for method in route.methods - {"HEAD", "OPTIONS"}
        # The endpoints of webhooks belong to the Hub's interface and not to this API.
        if not (route.path + "/").startswith("webhooks/")
        # OpenAPI cannot describe WebSockets.
        and not route.extra.websocket
    }
    documented = {
        (method.upper(), path) for path, operations in full_document(ROUTES)["paths"].items() for method in operations
    }
    under_api = {(route.method, f"/api{route.path}".rstrip("/")) for route in API_ROUTES}
    assert served == documented | under_api


def test_full_document_is_a_superset():
    specified, full = specified_document(ROUTES), full_document(ROUTES)
    for path, operations in specified["paths"].items():
        for method, operation in operations.items():
            assert full["paths"][path][method]["operationId"] == operation["operationId"]
            assert set(operation["responses"]) <= set(full["paths"][path][method]["responses"])
    assert specified["components"]["schemas"].items() <= full["components"]["schemas"].items()
    request, more = (full["components"]["schemas"][name] for name in ("CreateSessionRequest", "NewSessionRequest"))
    assert set(more["properties"]) > set(request["properties"])
    assert more["required"] == request["required"]


async def test_full_document_has_the_limits_of_the_settings(serve):
    async with serve(max_rate=90, max_cameras=2) as server:
        _, document = await server.call("GET", "/openapi-full.json")
    fields = document["components"]["schemas"]["NewSessionRequest"]["properties"]
    assert fields["rate"]["anyOf"][0]["maximum"] == 90
    assert fields["camera_names"]["maxItems"] == 2


async def test_documents_are_served(server):
    assert (await server.call("GET", "/openapi.json"))[1] == json.loads(GOLDEN.read_text())
    assert (await server.call("GET", "/api/openapi-full.json"))[0] == 200


async def test_page_runs_only_its_own_script(server):
    async with server.http.get("/docs") as answer:
        page, policy = await answer.text(), answer.headers["content-security-policy"]
    assert "http://" not in page
    assert "https://" not in page
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        [text] = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "innerHTML" not in page
