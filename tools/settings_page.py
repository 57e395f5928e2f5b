"""Generate the reference pages of all settings and of all fields of a session from their classes.

Run `python -m tools.settings_page > docs/reference/settings.md` and
`python -m tools.settings_page --session-fields > docs/reference/session_fields.md`.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from robojax.cli.serve import setting_default, setting_flags
from service.api.schemas import NewSessionRequest
from service.sessions.request import ADJUSTABLE
from service.setting_types import NAME_PATTERN, Mark
from service.settings import FIELDS, FILE, FILE_VARIABLE, GROUPS, PREFIX


def settings_page() -> str:
    """Return the page as Markdown: a table per group."""
    common = sum(Mark.COMMON in field.metadata for field in FIELDS.values())
    lines = [
        "# Settings",
        "",
        "These are the settings of `robojax serve`. A flag overrides the environment, the environment overrides a TOML",
        f"file, and the file overrides the default. `--config` or `{FILE_VARIABLE}` names the file. Without them, the",
        f"server reads `{FILE}` in the folder in which it starts. The keys of the file are the names of the flags with",
        "`_` for `-`: `frame_age_limit = 0.5`. A list is `A,B` in a flag and an array in the file. A JSON object in a",
        "flag is a table in the file.",
        "",
        f"`robojax serve --help` shows the {common} settings in bold, and `--help-all` shows all {len(FIELDS)}.",
        "",
        "<!-- Generated from the classes: python -m tools.settings_page > docs/reference/settings.md -->",
    ]
    for group in GROUPS.values():
        title = (group.__doc__ or "").removesuffix(".")
        lines += ["", f"## {title}", "", "| Flag | Variable | Default | Meaning |", "|---|---|---|---|"]
        lines += [_row(name, field) for name, field in group.model_fields.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in _cells(name, field)) + " |"


def _cells(name: str, field: FieldInfo) -> Iterator[str]:
    flags, metavar = setting_flags(name, field)
    shown = ", ".join(f"`{flag} {metavar}`" if metavar else f"`{flag}`" for flag in flags)
    yield f"**{shown}**" if Mark.COMMON in field.metadata else shown
    yield f"`{PREFIX}{name.upper()}`"
    default = setting_default(field)
    yield f"`{default}`" if default and field.repr else ""
    yield (field.description or "").replace("<", "&lt;")


def session_fields_page() -> str:
    """Return the page of the fields of a session as Markdown."""
    schema = NewSessionRequest.model_json_schema()
    lines = [
        "# Fields of a session",
        "",
        "`POST /sessions` accepts these fields. `POST /policies/check` accepts the same fields and requires only",
        "`policy_path`. `PATCH /sessions/{session_id}` changes the fields with *yes* in its column while the robot",
        "moves; null restores the default. An unknown field is refused (422) with the nearest known name. The settings",
        "of a server may have narrower bounds (`max_rate`, `max_cameras`).",
        "",
        "A name has 1 to 64 letters, digits, `_`, `.` or `-`, and not only dots.",
        "",
        "<!-- Generated: python -m tools.settings_page --session-fields > docs/reference/session_fields.md -->",
        "",
        "| Field | Type | Bounds | Default | PATCH | Meaning |",
        "|---|---|---|---|---|---|",
    ]
    for name, field in schema["properties"].items():
        forms = [form for form in field.get("anyOf", [field]) if form["type"] != "null"]
        cells = (
            f"`{name}`",
            " or ".join(map(_describe_type, forms)),
            "; ".join(filter(None, map(_describe_bounds, forms))),
            "required" if name in schema["required"] else f"`{json.dumps(field['default'])}`",
            "yes" if name in ADJUSTABLE else "",
            field["description"],
        )
        lines.append("| " + " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _describe_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"array of {_describe_type(schema['items'])}s"
    if schema["type"] == "object":
        return f"object of {_describe_type(_values_of(schema))}s by name"
    return "name" if schema.get("pattern") == NAME_PATTERN else schema["type"]


def _values_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))


def _describe_bounds(schema: Mapping[str, Any]) -> str:
    texts = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "maxLength": "at most {} characters",
        "maxItems": "at most {} entries",
        "maxProperties": "at most {} entries",
    }
    bounds = [text.format(schema[bound]) for bound, text in texts.items() if bound in schema]
    if "minLength" in schema:
        bounds = [f"{schema['minLength']} to {schema['maxLength']} characters"]
    if schema.get("uniqueItems"):
        bounds.append("without duplicates")
    if schema["type"] in ("array", "object"):
        inner = schema["items"] if schema["type"] == "array" else _values_of(schema)
        bounds += [f"each {text}" for text in filter(None, [_describe_bounds(inner)])]
    return ", ".join(bounds)


if __name__ == "__main__":
    print(session_fields_page() if "--session-fields" in sys.argv else settings_page(), end="")
