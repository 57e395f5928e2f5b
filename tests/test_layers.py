"""Who may import whom: one table, read against every import of the packages."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
OURS = ("jaxmodels", "service", "hooks", "robojax")
ACCELERATOR = {"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "safetensors"}
SERVER = {"sanic", "pydantic", "pydantic_settings", "asyncio", "aiohttp", "aiortc", "uvloop", "typer", "rich"}

# package -> modules it must not import (a prefix match on the dotted name)
FORBIDDEN: dict[str, set[str]] = {
    "jaxmodels": {"service", "hooks", *SERVER},
    "hooks": {"service", "jaxmodels", *ACCELERATOR},
    "service": {*ACCELERATOR, "torch"},
    "robojax": {"jaxmodels", "hooks", "sanic", "pydantic", *ACCELERATOR, "torch"},
}
# module of ours -> who may import it
# The console commands put together what runs in a process of their own.
COMPOSITION_ONLY = {
    "hooks": {
        "service/app.py",
        "service/updates/webhooks.py",  # the part of the composition that is about webhooks
        "service/cli/webhooks.py",
    },
}
# module of ours -> the only places of robojax that use it, and only inside of functions: WebRTC is a lot to import
OF_THE_SERVICE = {
    "service.transport": {"robojax/client/asynchronous.py"},
    "service.errors": {"robojax/robot/links.py"},
}
# third-party module -> the only place in jaxmodels that touches it: a file, or a folder with all in it
ONE_PLACE = {
    "huggingface_hub": "jaxmodels/hub.py",
    "av": "jaxmodels/data/",
    "pyarrow": "jaxmodels/data/",
    "tokenizers": "jaxmodels/text/",
}
# Modules of extras that are not in dev: where one is not installed, nothing else says whose it is.
DISTRIBUTIONS = {"rerun": ["rerun-sdk"]}
# Nobody imports these: commands, plug-ins of pytest, and what is named as a text.
TOOLS = {"beartype", "jupyterlab", "pip-licenses", "pyright", "pytest-timeout", "pytest-xdist", "ruff"}


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    place = str(path.relative_to(ROOT))
    package = place.split("/")[0]
    wrong = [
        f"{place}:{line}: {package} must not import {name}"
        for line, name in imports(path)
        for banned in FORBIDDEN[package]
        if within(name, banned)
    ]
    wrong += [
        f"{place}:{line}: only {sorted(allowed)} may import {name}"
        for line, name in imports(path)
        for module, allowed in COMPOSITION_ONLY.items()
        if within(name, module) and package != module and place not in allowed
    ]
    if package == "jaxmodels":
        wrong += [
            f"{place}:{line}: only {allowed} may import {name}"
            for line, name in imports(path)
            for module, allowed in ONE_PLACE.items()
            if within(name, module) and not place.startswith(allowed)
        ]
    if package == "robojax":
        allowed = {name for name, places in OF_THE_SERVICE.items() if place in places}
        wrong += [
            f"{place}:{line}: robojax must not import {name}"
            for line, name in imports(path)
            if within(name, "service") and not any(within(name, each) for each in allowed)
        ]
        wrong += [
            f"{place}:{node.lineno}: {module} is imported with the module; import it in the function"
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom)
            for module in ("service", "aiortc", "cv2", "scservo_sdk")
            if within(str(node.module), module) and place != "robojax/robot/serial_port.py"
        ]
    assert not wrong, "\n".join(wrong)


def test_the_service_uses_only_public_names_of_jaxmodels() -> None:
    public = ("jaxmodels", "jaxmodels.errors", "jaxmodels.training", "jaxmodels.data", "jaxmodels.types")
    wrong = []
    for path in (ROOT / "service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            wrong += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
                for name in names
                if within(name, "jaxmodels") and name not in public
            ]
    assert not wrong, "\n".join(wrong)


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    names_of = {extra: {canonicalize_name(Requirement(text).name) for text in texts} for extra, texts in wanted.items()}
    declared = set().union(*(names for extra, names in names_of.items() if extra != "dev"))
    installed = dict(packages_distributions()) | DISTRIBUTIONS
    beside = [path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    wrong, used = [], set(TOOLS)
    for path in (*modules(), *beside):
        for line, name in imports(path):
            module = name.split(".")[0]
            names = {canonicalize_name(one) for one in installed.get(module, [module])}
            used |= names
            is_ours = module in sys.stdlib_module_names or module in (*OURS, "benchmarks")  # of the checkout
            if path not in beside and not is_ours and not names & declared:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {sorted(names)} is not in pyproject.toml")
    unused = sorted((declared | names_of["dev"]) - used)
    wrong += [f"{name} is in pyproject.toml, and nobody imports it" for name in unused]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_circular_imports() -> None:
    files = {module_name(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        # Imports inside functions run later and cannot close a cycle at import time.
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        wanted = set()
        for node in top:
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            else:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    wanted.add(whole if whole in files else str(node.module))
        graph[name] = {other for other in wanted if other in files and other != name}

    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "circular import: " + " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_both_packages_that_fetch_policies_take_the_same_files() -> None:
    from hooks import policy_files
    from jaxmodels import hub

    # Neither may import the other; a file that only one of them knows would be missing after an update.
    assert policy_files.POLICY_FILES == hub.POLICY_FILES
