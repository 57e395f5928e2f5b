"""Minimum versions of dependencies without known vulnerabilities, and the page that lists all dependencies."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FLOORS = {"aiohttp": "3.14.4", "av": "18.1", "PyJWT": "2.15", "huggingface_hub": "2.4"}


@pytest.mark.parametrize(("package", "floor"), FLOORS.items())
def test_installed_and_required_versions_are_not_below_the_floor(package: str, floor: str) -> None:
    assert Version(version(package)) >= Version(floor)
    requirements = [Requirement(text) for text in requires("robojax") or []]
    matching = [r for r in requirements if r.name.lower().replace("_", "-") == package.lower().replace("_", "-")]
    assert matching, f"robojax does not require {package}"
    lower = [Version(s.version) for s in matching[0].specifier if s.operator == ">="]
    assert lower, f"{matching[0]} has no minimum version"
    assert max(lower) >= Version(floor)


def test_the_dependencies_page_lists_each_package_with_its_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: texts for name, texts in project["optional-dependencies"].items() if name != "dev"}
    expected: dict[str, set[str]] = {Requirement(text).name: set() for text in project["dependencies"]}
    for extra, texts in extras.items():
        for name in (Requirement(text).name for text in texts):
            if name not in expected or expected[name]:  # Skip packages that are always installed.
                expected.setdefault(name, set()).add(extra)
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([\w.-]+) \| ([^|]*)(?:\|[^|]*){4}\|$", page, re.M)
    listed = {name: set(re.findall(r"`(\w+)`", why)) & set(extras) for name, why in rows if name != "Package"}
    assert listed == expected
