"""The page of all settings, from their classes: `python -m tools.settings_page > docs/reference/settings.md`."""

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from robojax.cli.serve import setting_default, setting_flags
from service.setting_types import Mark
from service.settings import FIELDS, FILE, FILE_VARIABLE, GROUPS, PREFIX


def settings_page() -> str:
    """Return the page as Markdown: a table per group."""
    common = sum(Mark.COMMON in field.metadata for field in FIELDS.values())
    lines = [
        "# Settings",
        "",
        "Of `robojax serve`. A flag wins over the environment, that over a TOML file, that over the default.",
        f"The file is the one that `--config` or `{FILE_VARIABLE}` names, else `{FILE}` in the folder that the server",
        "is started in. Its keys are the names of the flags with `_` for `-`: `frame_age_limit = 0.5`. A list is",
        "`A,B` in a flag and an array in the file; JSON is a table there.",
        "",
        f"`robojax serve --help` shows the {common} in bold, `--help-all` all {len(FIELDS)}.",
        "",
        "<!-- Made of the classes: python -m tools.settings_page > docs/reference/settings.md -->",
    ]
    for group in GROUPS.values():
        lines += ["", f"## {group.__doc__}", "", "| Flag | Variable | Default | What it does |", "|---|---|---|---|"]
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


if __name__ == "__main__":
    print(settings_page(), end="")
