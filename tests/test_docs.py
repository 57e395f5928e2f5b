"""Guides: every page is in the site, and named files, routes and methods exist. `test_guides.py` runs their blocks."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.api.blueprint import ROUTES
from tests.test_layers import LAYERS, PRODUCT_PACKAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAMED = re.compile(r"\bdocs/[\w/]+\.(?:md|png|svg)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SOURCES = ("*.py", "*.md", "*.ipynb", "*.yaml", "Makefile", "Dockerfile", "Caddyfile", "nginx.conf")


def paths_in(nav: list[Any]) -> list[str]:
    """Return the pages of a part of the navigation in order."""
    entries = [next(iter(entry.values())) if isinstance(entry, dict) else entry for entry in nav]
    return [path for entry in entries for path in (paths_in(entry) if isinstance(entry, list) else [entry])]


def test_every_page_is_in_the_site_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    left_out = set(re.findall(r"\S+\.md", config["exclude_docs"]))
    root_pages = {"reference/contributing.md", "reference/changelog.md"}
    expected = {path.relative_to(DOCS).as_posix() for path in PAGES} - {path.lstrip("/") for path in left_out}
    assert sorted(paths_in(config["nav"])) == sorted(expected | root_pages)


@pytest.mark.parametrize(
    "page", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_links_of_a_page_exist(page: Path) -> None:
    assert [path for path in LINK.findall(page.read_text()) if not (page.parent / path).exists()] == []


def test_guides_that_the_repository_names_exist() -> None:
    folders = [*PRODUCT_PACKAGES, "benchmarks", "deploy", "docs", "notebooks", "tests", "tools"]
    files = [path for folder in folders for pattern in SOURCES for path in (ROOT / folder).rglob(pattern)]
    files += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")]
    named = {(name, path) for path in files for name in NAMED.findall(path.read_text())}
    assert [(name, str(path)) for name, path in named if not (ROOT / name).is_file()] == []


def test_the_readme_is_short() -> None:
    text = README.read_text()
    (table,) = re.findall(r"^## To change X, open Y\n+((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(text.splitlines()) <= 150
    assert len(table.splitlines()) - 2 <= 15


def test_the_architecture_page_shows_the_tested_layers() -> None:
    page = (DOCS / "reference" / "architecture.md").read_text()
    _, above_to_below = page.split("## One table")[1].split("|---|---|\n", 1)
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", above_to_below.split("\n\n")[0], re.MULTILINE)
    shown = {"service": " < ".join(row.strip() for row in reversed(rows)).replace("`", "")}
    for package in ("hooks", "jaxmodels", "robojax"):
        (row,) = re.findall(rf"^\| `{package}` \| (`.* < .*`) \|$", page, re.MULTILINE)
        shown[package] = row.replace("`", "")
    assert shown == LAYERS


def test_the_architecture_page_names_existing_methods() -> None:
    page = (DOCS / "reference" / "architecture.md").read_text()
    trees = [ast.parse(path.read_text()) for path in (ROOT / "service").rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {f"{node.name}.{part.name}" for node in classes for part in node.body if isinstance(part, FUNCTIONS)}
    named = set(re.findall(r"\b[A-Z]\w+\.[a-z]\w*", page.split("## One line")[1].split("## Rules")[0]))
    assert len(named) > 10
    assert named <= methods


def test_the_list_of_routes_matches_the_server() -> None:
    rows = re.findall(r"^\| ([A-Z]+) \| `(\S+)` \| (\S+) \|", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((route.method, route.path, str(route.role or "-")) for route in ROUTES)
