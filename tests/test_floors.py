"""Versions below which a dependency has a known vulnerability."""

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

FLOORS = {"aiohttp": "3.14.4", "av": "18.1", "PyJWT": "2.15", "huggingface_hub": "2.4"}


@pytest.mark.parametrize(("package", "floor"), FLOORS.items())
def test_the_installed_version_is_not_below_its_security_floor(package: str, floor: str) -> None:
    assert Version(version(package)) >= Version(floor)


@pytest.mark.parametrize(("package", "floor"), FLOORS.items())
def test_the_distribution_asks_for_at_least_the_floor(package: str, floor: str) -> None:
    from importlib.metadata import requires

    wanted = [Requirement(text) for text in requires("robojax") or []]
    ours = [r for r in wanted if r.name.lower().replace("_", "-") == package.lower().replace("_", "-")]
    assert ours, f"robojax does not require {package}"
    lower = [Version(s.version) for s in ours[0].specifier if s.operator == ">="]
    assert lower, f"{ours[0]} has no floor"
    assert max(lower) >= Version(floor)
