"""Exported names of the packages."""

import subprocess
import sys
from importlib import import_module

import pytest

import hooks

PACKAGES = (
    "hooks",
    "jaxmodels",
    "jaxmodels.data",
    "jaxmodels.samplers",
    "jaxmodels.training",
    "jaxmodels.transformer2d",
    "robojax.client",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_exactly_the_listed_names_are_exported(package: str) -> None:
    module = import_module(package)
    names = module.__all__
    assert len(set(names)) == len(names)
    assert set(names) <= set(dir(module))
    homes = getattr(module, "_NAMES", {package: " ".join(names)})
    assert sorted(" ".join(homes.values()).split()) == sorted(names)
    for name in names:
        assert getattr(getattr(module, name), "__name__", name) == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_webhook_names_of_huggingface_hub_are_exported() -> None:
    import huggingface_hub

    names = [name for name in huggingface_hub.__dict__["__all__"] if "webhook" in name.lower()]
    assert len(names) >= 15
    assert set(names) <= set(hooks.__all__), set(names) - set(hooks.__all__)


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        ("hooks", "sanic pydantic huggingface_hub"),
        ("jaxmodels, jaxmodels.errors, jaxmodels.types", "jax"),
        ("jaxmodels.data", "jax pyarrow av"),
        ("jaxmodels.text", "tokenizers"),
        ("robojax.client", "jax sanic aiortc av pydantic service numpy"),
        ("service.app, service.distributed.cluster, service.engines.host", "ray"),
    ],
)
def test_importing_a_package_imports_nothing_heavy(imported: str, heavy: str) -> None:
    script = f"import sys, {imported}; print(*(name for name in '{heavy}'.split() if name in sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []
