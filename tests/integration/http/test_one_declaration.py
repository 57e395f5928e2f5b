"""A field of the session API and an aggregation of chunks need one added line, tried in a copy of the service."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import service

PACKAGE = Path(service.__file__).parent
ROOT = PACKAGE.parent
# This runs in the copy. It reads the record as the next start of a server does.
SERVE = """
import asyncio, json, sys
from service.sessions.records import from_json
from tests.testing.rig import started

async def main(sent, refused):
    async with started() as server:
        for name, value in refused.items():
            status, reply = await server.create(**{name: value})
            assert (status, reply["detail"][0]["loc"]) == (422, ["body", name]), reply
        status, reply = await server.create(**sent)
        assert status == 200, reply
        sessions = server.app.ctx.sessions
        record = from_json(sessions.get_record("arm").as_json())
        assert {name: getattr(record.new, name) for name in sent} == sent
        assert record.new == sessions.get("arm").new and not record.is_newer
        _, document = await server.call("GET", "/openapi-full.json")
        fields = document["components"]["schemas"]["NewSessionRequest"]["properties"]
        _, status = await server.call("GET", "/sessions/arm")
        print(json.dumps([[fields[name] for name in sent], status["stats"]["overlap"]]))

asyncio.run(main(*map(json.loads, sys.argv[1:])))
"""
# The file, an existing line, and the line to add before it.
ADDED = [
    (
        "sessions/request.py",
        '    record: Annotated[bool, Field(description="Record every',
        '    label: Annotated[str | None, Field(max_length=8, description="For people.")] = None\n',
    ),
    (
        "control/aggregation.py",
        '            WeightedAggregation("conservative", 0.3),',
        '            WeightedAggregation("careful", 0.1),\n',
    ),
]
SENT, REFUSED = {"label": "left arm", "overlap": "careful"}, {"label": "the left arm", "overlap": "careless"}


def test_one_line_adds_a_field_to_body_record_and_documents(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "service")  # The bytecode stays valid, because modification times are copied.
    for other in ("hooks", "jaxmodels", "robojax", "tests"):
        (tmp_path / other).symlink_to(ROOT / other)
    for module, line, added in ADDED:
        changed = tmp_path / "service" / module
        text = changed.read_text()
        assert text.count(line) == 1
        changed.write_text(text.replace(line, added + line))
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(SENT), json.dumps(REFUSED)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"description": "For people."' in done.stdout
    assert '"careful"]' in done.stdout
