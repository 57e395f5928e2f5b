"""Which versions of what matters this process runs."""

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Package to version; of Python, too."""
    found = {"python": platform.python_version()}
    for package in ("robojax", "jax", "flax", "sanic", "aiortc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
