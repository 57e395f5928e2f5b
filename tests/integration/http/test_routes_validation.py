import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.testing.rig import Server, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "hunter2-correct-horse"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Server]:
    async with started() as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def server(running: Server) -> AsyncIterator[Server]:
    """Return the one server of all tests here, and delete the sessions of a test afterwards."""
    yield running
    for session in (await running.call("GET", "/sessions"))[1]:
        await running.call("DELETE", f"/sessions/{session['session_id']}")
    assert await running.call("GET", "/sessions") == (200, [])


async def refused(server, **how):
    status, reply = await server.call("POST", "/sessions", **how)
    assert status == 422, reply
    assert set(reply) == {"detail"}
    for entry in reply["detail"]:
        assert set(entry) == {"loc", "msg", "type"}
    return reply["detail"]


async def refused_body(server, **more):
    fields = {"session_id": "arm", "policy_path": "p", "transport_server_url": "http://rooms"} | more
    return await refused(server, json=fields)


async def test_missing_body_is_a_missing_field(server):
    assert await refused(server) == [{"loc": ["body"], "msg": "Field required", "type": "missing"}]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('{"session_id": ', 15),
        ("{]", 1),
        ("nonsense", 0),
        ('{"rate": NaN}', 9),
        ('{"a": "NaN", "rate": -Infinity}', 21),
        ('{"rate": Infinity}', 9),
        ("[" * 100_000, 0),
        ("1" * 5000, 0),
    ],
)
async def test_invalid_json_is_reported_with_its_position(server, text, position):
    [entry] = await refused(server, data=text, headers={"content-type": "application/json"})
    constant = next((found for found in ("NaN}", "-Infinity", "Infinity") if found in text), "").rstrip("}")
    hint = f": {constant} is not a JSON number; send a finite number" if constant else ""
    assert entry == {"loc": ["body", position], "msg": f"JSON decode error{hint}", "type": "json_invalid"}


async def test_long_body_or_many_values_are_refused_unparsed(server):
    many = "[" + "{}," * 5000 + "0]"
    for text in (
        "[" * 200_000,
        many,
        '{"rate":' + many + "}",
        '{"a":"\\"",' + '"\\\\",' * 5000 + "}",
        many.encode("utf-16"),
    ):
        [entry] = await refused(server, data=text, headers={"content-type": "application/json"})
        assert (entry["type"], entry["loc"]) == ("too_long", ["body"])
    # Commas inside a text do not count.
    status, _ = await server.create("arm", language_instruction="\t,\n," * 1024)
    assert status == 200


@pytest.mark.parametrize(
    ("value", "places"), [("abc", [[], []]), (-1, [[], []]), ({"Jaw": -1}, [[], ["Jaw"]]), ({"Jaw": {}}, [[], ["Jaw"]])]
)
async def test_location_of_an_error_has_no_type_names(server, value, places):
    entries = await refused_body(server, max_relative_target=value)
    assert [entry["loc"] for entry in entries] == [["body", "max_relative_target", *place] for place in places]


async def test_number_of_reported_errors_is_limited(server):
    entries = await refused_body(server, max_relative_target={f"joint{number}": -1 for number in range(1000)})
    assert len(entries) == 65
    assert entries[-1]["type"] == "too_many_errors"
    assert entries[-1]["msg"].split()[0].isdigit()
    [entry] = await refused_body(server, **{f"name{number}": 0 for number in range(300)})
    assert (entry["type"], entry["loc"]) == ("too_long", ["body"])


async def test_invalid_utf8_is_not_json(server):
    [entry] = await refused(server, data=b'{"session_id": "\xff\xfe"}', headers={"content-type": "application/json"})
    assert entry["type"] == "json_invalid"


async def test_duplicate_name_in_an_object_is_refused(server):
    body = '{"session_id": "arm", "policy_path": "p", "transport_server_url": "direct", "rate": 30, "rate": 200}'
    [entry] = await refused(server, data=body, headers={"content-type": "application/json"})
    assert (entry["type"], entry["msg"]) == ("json_invalid", "JSON decode error: a name stands twice in one object")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_other_content_types_are_refused(server, kind):
    [entry] = await refused(server, data=json.dumps({"session_id": "arm"}), headers={"content-type": kind})
    assert (entry["loc"], entry["type"]) == (["body"], "content_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.robot+json", "APPLICATION/JSON"])
async def test_other_names_of_json_are_accepted(server, kind):
    entries = await refused(server, data="{}", headers={"content-type": kind})
    assert [entry["loc"][1] for entry in entries] == ["session_id", "policy_path", "transport_server_url"]
    assert {entry["type"] for entry in entries} == {"missing"}


@pytest.mark.parametrize(
    ("field", "value", "place", "kind"),
    [
        ("session_id", 5, [], "string_type"),
        ("session_id", "", [], "string_pattern_mismatch"),
        ("session_id", "a b", [], "string_pattern_mismatch"),
        ("session_id", "..", [], "string_pattern_mismatch"),
        ("session_id", "arm\n", [], "string_pattern_mismatch"),
        ("session_id", "x" * 65, [], "string_pattern_mismatch"),
        ("policy_path", "", [], "string_too_short"),
        ("policy_path", "  ", [], "string_too_short"),
        ("policy_path", "a\0b", [], "string_too_short"),
        ("policy_path", "x" * 5000, [], "string_too_long"),
        ("transport_server_url", "ftp://rooms", [], "url_scheme"),
        ("transport_server_url", "rooms:8000", [], "url_scheme"),
        ("transport_server_url", "http://", [], "url_scheme"),
        ("transport_server_url", "http://rooms:x", [], "url_scheme"),
        ("transport_server_url", "http://[::1", [], "url_scheme"),
        ("transport_server_url", f"http://me:{SECRET}@rooms", [], "url_credentials"),
        ("camera_names", "front", [], "list_type"),
        ("camera_names", ["front", 5], [1], "string_type"),
        ("camera_names", ["front", "a/b"], [1], "string_pattern_mismatch"),
        ("camera_names", ["front", "front"], [], "unique_items"),
        ("camera_names", [f"c{number}" for number in range(9)], [], "invalid"),
        ("workspace_id", "a/b", [], "string_pattern_mismatch"),
        ("workspace_id", 5, [], "string_type"),
        ("policy_type", 5, [], "string_type"),
        ("policy_type", None, [], "string_type"),
        ("language_instruction", ["x"], [], "string_type"),
        ("language_instruction", "pick\0", [], "string_control_character"),
        ("language_instruction", "pick\r\n", [], "string_control_character"),
        ("language_instruction", "\x1b[2J", [], "string_control_character"),
        ("rate", "20", [], "float_type"),
        ("rate", True, [], "float_type"),
        ("rate", 0, [], "greater_than_equal"),
        ("rate", 5e-324, [], "greater_than_equal"),
        ("rate", 1001, [], "less_than_equal"),
        ("rate", 201, [], "invalid"),
        ("revision", "", [], "string_too_short"),
        ("joint_names", [""], [0], "string_too_short"),
        ("prompt_cut", "end", [], "literal_error"),
    ],
)
async def test_invalid_field_is_reported_with_its_location(server, field, value, place, kind):
    [entry] = await refused_body(server, **{field: value})
    assert entry["loc"] == ["body", field, *place]
    assert entry["type"] == kind
    assert (await server.call("GET", "/sessions"))[1] == []


@pytest.mark.parametrize("path", ["/sessions/a%00b", "/sessions/%00", "/deployments/a%00", "/recordings/arm%00"])
async def test_nul_in_an_id_is_refused(server, path):
    method = "DELETE" if path.startswith("/recordings") else "GET"
    async with server.http.request(method, path) as answer:
        [entry] = (await answer.json())["detail"]
    assert (answer.status, entry["loc"][0], entry["type"]) == (422, "path", "invalid")
    assert "\\0" in entry["msg"]


@pytest.mark.parametrize(
    ("field", "near"),
    [
        ("dry_runn", "dry_run"),
        ("dryrun", "dry_run"),
        ("max_relative_traget", "max_relative_target"),
        ("maxRelativeTarget", "max_relative_target"),
        ("DRY_RUN", "dry_run"),
        ("Max-Relative-Target", "max_relative_target"),
        ("camera_name", "camera_names"),
        ("joint_name", "joint_names"),
    ],
)
async def test_unknown_field_is_refused_with_the_nearest_name(server, field, near):
    [entry] = await refused_body(server, **{field: 0.5})
    assert (entry["loc"], entry["type"]) == (["body", field], "extra_forbidden")
    assert entry["msg"].startswith(f"unknown field {field!r}; did you mean {near!r}?")
    assert (await server.call("GET", "/sessions"))[1] == []


async def test_unknown_field_without_a_near_name_lists_all_names(server):
    [entry] = await refused_body(server, someday="maybe")
    assert "the known fields are: session_id, policy_path" in entry["msg"]
    [entry] = await refused_body(server, **{"x" * 5000: 1})
    assert len(str(entry)) < 1500
    entries = await refused_body(server, **{f"dry_run{number}": 0 for number in range(200)})
    assert (len(entries), entries[-1]["type"]) == (65, "too_many_errors")


@pytest.mark.parametrize(
    ("body", "found"),
    [("[]", "a list"), ('"x"', "a string"), ("null", "null"), ("true", "a boolean"), ("1", "a number")],
)
async def test_body_that_is_not_an_object_is_refused_with_its_type(server, body, found):
    status, reply = await server.call("POST", "/sessions", data=body, headers={"content-type": "application/json"})
    [entry] = reply["detail"]
    assert (status, entry["loc"], entry["msg"]) == (422, ["body"], f"Body should be a JSON object, got {found}")


async def test_each_request_refuses_unknown_fields(server):
    await server.create()
    moves = ("start", "restart", "rollback", "policy", "record")
    for path in (*(f"/sessions/arm/{move}" for move in moves), "/debug/sessions/arm/reset", "/tickets"):
        status, reply = await server.call("POST", path, json={"dry_run": True})
        assert (status, ["body", "dry_run"] in [entry["loc"] for entry in reply["detail"]]) == (422, True), path
    assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "ready"


async def test_start_accepts_an_empty_object_and_stop_any_body(server):
    await server.create()
    assert (await server.call("POST", "/sessions/arm/start", json={}))[0] == 200
    assert (await server.call("POST", "/sessions/arm/stop", json={"now": True}))[0] == 200
    assert (await server.call("POST", "/sessions/arm/emergency_stop", json={"now": True}))[0] == 200


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"session_id": "my arm"}, "'my arm'"),
        ({"transport_server_url": "ftp://rooms"}, "'ftp://rooms'"),
        ({"camera_names": ["front", "left cam"]}, "'left cam'"),
        ({"camera_names": ["left", "right"]}, "['left', 'right']"),
        ({"workspace_id": "/lab"}, "'/lab'"),
        ({"policy_type": "diffusoin"}, "'diffusoin'"),
        ({"joint_names": ["shoulder"] * 6}, "['shoulder']"),
        ({"rate": 999.25}, "999.25"),
        ({"rate": 5000}, "got 5000"),
        ({"rate": "fast"}, "got 'fast'"),
        ({"workspace_id": "a\x1b[31m"}, r"'a\x1b[31m'"),
        ({"session_id": "x" * 4000}, "'" + "x" * 200 + "...'"),
    ],
)
async def test_errors_show_the_sent_value(server, more, shown):
    entries = await refused_body(server, **more)
    assert shown in entries[0]["msg"]
    assert len(str(entries)) < 1500


@pytest.mark.parametrize(
    "more",
    [
        {"transport_server_url": f"http://me:{SECRET}@rooms"},
        {"transport_server_url": f"ftp://me:{SECRET}@rooms"},
        {"transport_server_url": f"me:{SECRET}@rooms"},
        {"policy_path": f"https://me:{SECRET}@models.example/act", "policy_type": "x"},
        {"policy_path": f"me:{SECRET}@models.example/act", "policy_type": "x"},
        {"workspace_id": f"token={SECRET}"},
        {"revision": "", "api_key": SECRET},
        {"password": SECRET},
    ],
)
async def test_errors_never_show_secrets(server, more):
    entries = await refused_body(server, **more)
    assert SECRET not in str(entries)


async def test_queries_are_validated(server):
    for query, place in (
        ("limit=0", "limit"),
        ("limit=", "limit"),
        ("level=", "level"),
        ("limit=x", "limit"),
        ("limit=501", "limit"),
        ("before=x", "before"),
        ("level=loud", "level"),
    ):
        status, reply = await server.call("GET", f"/debug/logs?{query}")
        assert (status, reply["detail"][0]["loc"]) == (422, ["query", place])
