"""Who may import whom: one table, read against every import of the packages."""

import ast
import multiprocessing
import re
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from operator import le
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import house, traces

ROOT = Path(__file__).parent.parent
OURS = ("jaxmodels", "service", "hooks", "robojax")
ACCELERATOR = {"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "safetensors"}
SERVER = {"sanic", "pydantic", "asyncio", "aiohttp", "aiortc", "uvloop", "typer", "rich"}

# package -> modules it must not import (a prefix match on the dotted name)
FORBIDDEN: dict[str, set[str]] = {
    "jaxmodels": {"service", "hooks", "robojax", *SERVER},
    "hooks": {"service", "jaxmodels", "robojax", *ACCELERATOR},
    "service": {"robojax", *ACCELERATOR, "torch"},
    "robojax": {*ACCELERATOR, "torch"},
    # Code that runs at a robot or calls a server.
    "robojax.client": {"jaxmodels", "hooks", "sanic", "pydantic", *ACCELERATOR, "torch"},
    "robojax.robot": {"jaxmodels", "hooks", "sanic", "pydantic", *ACCELERATOR, "torch"},
}
# Within a package, from the lowest layer to the highest: a module imports only from its own layer and from layers to
# its left. Modules of one layer may import each other without a cycle.
LAYERS = {
    "service": (
        "errors reloading_file stage stats setting_types loop_watchdog signal_guard"
        " < logging state threads processes < http < auth < inference transport < engines < control < sessions"
        " < recording streaming rollout dashboard < distributed < settings < api doctor shared_sessions < app"
    ),
    "hooks": ("errors threads < payload database addresses < queue < registry < client receiver < server"),
    "jaxmodels": (
        "errors _lazy < ranges < types cache_dirs < normalization devices hub_process weights < hub < hub_download"
        " < layers samplers < memory < checkpoints < text < transformer2d vlm data < policies < program"
        " < observations < policy < training"
    ),
    "robojax": "client < robot < sim < cli",
}
# module of ours -> who may import it, as programs are assembled there
COMPOSITION_ONLY = {"hooks": {"service/app.py", "service/rollout/", "robojax/__init__.py", "robojax/cli/webhooks.py"}}
# module of ours -> the only places of the client and the robot that import it, inside functions as WebRTC is large
OF_THE_SERVICE = {"service.transport": {"robojax/client/client.py"}, "service.errors": {"robojax/robot/links.py"}}
# third-party module -> the only place in jaxmodels that touches it: a file, or a folder with all in it
ONE_PLACE = {
    "huggingface_hub": "jaxmodels/hub_download.py",
    "av": "jaxmodels/data/",
    "pyarrow": "jaxmodels/data/",
    "tokenizers": "jaxmodels/checkpoints/tokenizer_files.py",
    "tensorstore": "jaxmodels/checkpoints/orbax_files.py",
}
# Distributions of modules that have another name. The table does not depend on the packages that are installed.
DISTRIBUTIONS = {
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "grpc": "grpcio",
    "jwt": "pyjwt",
    "orbax": "orbax-checkpoint",
    "rerun": "rerun-sdk",
    "scservo_sdk": "feetech-servo-sdk",
    "serial": "pyserial",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}
# Distributions without an import: commands, plug-ins of pytest, and modules that are named in strings.
TOOLS = {"beartype", "jupyterlab", "mkdocs-material", "pip-licenses", "pyright", "ruff"}
TOOLS |= {"pytest-timeout", "pytest-xdist"}


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of each import of a file."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def wrong_imports(path: Path) -> Iterator[str]:
    """Describe each import that the tables above forbid to a module."""
    place = str(path.relative_to(ROOT))
    package = place.split("/")[0]
    side = ".".join(place.split("/")[:2])  # the client's or the robot's
    is_aside = side in FORBIDDEN
    of_the_service = {name for name, places in OF_THE_SERVICE.items() if place in places}
    for line, name in imports(path):
        for banned in FORBIDDEN.get(side if is_aside else package, ()):
            if within(name, banned):
                yield f"{place}:{line}: {package} must not import {name}"
        for module, allowed in COMPOSITION_ONLY.items():
            if within(name, module) and package != module and not place.startswith(tuple(allowed)):
                yield f"{place}:{line}: only {sorted(allowed)} may import {name}"
        for module, only in ONE_PLACE.items() if package == "jaxmodels" else ():
            if within(name, module) and not place.startswith(only):
                yield f"{place}:{line}: only {only} may import {name}"
        if is_aside and within(name, "service") and not any(within(name, each) for each in of_the_service):
            yield f"{place}:{line}: robojax must not import {name}"
    for node in tree_of(path).body if is_aside and place != "robojax/robot/_scservo.py" else ():
        for module in ("service", "aiortc", "cv2", "scservo_sdk"):
            if isinstance(node, ast.ImportFrom) and within(str(node.module), module):
                yield f"{place}:{node.lineno}: {module} is imported with the module; import it in the function"


def test_modules_import_only_what_their_layer_may() -> None:
    assert [problem for path in modules() for problem in wrong_imports(path)] == []


def test_the_service_uses_only_public_names_of_jaxmodels() -> None:
    public = ("jaxmodels", "jaxmodels.errors", "jaxmodels.training", "jaxmodels.data", "jaxmodels.types")
    wrong = []
    for path in modules():
        for node in ast.walk(tree_of(path)) if path.relative_to(ROOT).parts[0] in ("service", "robojax") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            places = [name for name in names if within(name, "jaxmodels") and name not in public]
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in places]
    assert wrong == []


def test_imports_and_declared_dependencies_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    names_of = {extra: {canonicalize_name(Requirement(text).name) for text in texts} for extra, texts in wanted.items()}
    declared = set().union(*(names for extra, names in names_of.items() if extra != "dev"))
    helpers = [path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    wrong, used = [], set(TOOLS)
    for path in (*modules(), *helpers):
        for line, name in imports(path):
            module = name.split(".")[0]
            distribution = canonicalize_name(DISTRIBUTIONS.get(module, module))
            used.add(distribution)
            needs_no_package = module in sys.stdlib_module_names or module in (*OURS, "benchmarks")
            if path not in helpers and not needs_no_package and distribution not in declared:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {distribution} is not in pyproject.toml")
    unused = sorted((declared | names_of["dev"]) - used)
    wrong += [f"{name} is in pyproject.toml, but no file imports it" for name in unused]
    assert not wrong, "\n".join(wrong)


def ranks(package: str) -> dict[str, int]:
    levels = enumerate(LAYERS[package].split("<"))
    return {f"{package}.{name}": rank for rank, names in levels for name in names.split()}


# Path -> largest number of files, functions, returns to a file that had been left, and callbacks; see tools/traces.py.
# On a slow machine, functions of holds and of the batch timer run too.
PATHS = {
    "frame": (13, 62, 60, 0),
    "session": (56, 356, 250, 5),
    "policy": (25, 280, 780, 0),
    "push": (31, 260, 280, 5),
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_through_the_product_stay_short(path: str) -> None:
    # In a process of its own, because a trace also counts what runs in threads that other tests left.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        # A pause of the machine adds functions.
        figures = [process.submit(measure_path, path).result() for _ in range(1 if path == "policy" else 2)]
    assert any(found[0] > 0 and all(map(le, found, PATHS[path])) for found in figures), figures


def measure_path(path: str) -> tuple[int, int, int, int]:
    trace = traces.run(path)
    return len(trace.files), len(trace.functions), trace.returns, trace.callbacks


def test_within_a_package_nothing_knows_what_stands_above_it() -> None:
    files = house.modules()
    rank = {name: level for package in LAYERS for name, level in ranks(package).items()}
    below = {name for name in map(house.package_of, files) if "." in name}
    assert below == set(rank), "the table has exactly the modules and packages of the four"
    found = {
        (name, other)
        for name, others in house.imports_of(files).items()
        for other in others
        if "." in name and name.split(".")[0] == other.split(".")[0]
        if rank.get(house.package_of(name), -1) < rank.get(house.package_of(other), -1)
    }
    assert not found


def test_there_are_no_circular_imports() -> None:
    # Imports inside functions and for type checkers count too.
    assert house.circles(house.imports_of(house.modules(), everywhere=True)) == []


# Everyday words that replaced a term of the field, for which people search.
_BANNED = """
knock lacking told wish parcel leash patience crew errand keeper courier drive thinking asking trail lane turnover
growth askers changeover consultation thought standing kept ledger onlooker punctual found wanted place places tell
hear heard shown asked seen look looking complaint complaints utils helpers misc
"""
BANNED = set(_BANNED.split())
# Public names with such a word that stay, by package, because users have them in code, files or settings.
FIXED_NAMES = {
    "hooks": {"WebhookNotFound", "kept", "kept_dead", "kept_bytes", "lane"},
    "jaxmodels": {"shapes_kept"},
    "robojax": {"drive_mode", "found"},
    "service/distributed": {"engine_patience"},
    "service/recording": {"tell"},
    "service/rollout": {"update_patience"},
    "service/streaming": {"compile_patience", "act_patience"},
}


def words_of(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_"))


def public_names(node: ast.AST) -> Iterator[str]:
    """Names of functions, classes, methods and attributes; what is inside of functions or begins with _ is private."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        yield child.name
        if isinstance(child, ast.ClassDef):
            yield from public_names(child)
            yield from (
                each.target.id
                for each in child.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )
            stored = [each for each in ast.walk(child) if isinstance(each, ast.Attribute)]
            yield from (each.attr for each in stored if isinstance(each.ctx, ast.Store) and each.attr[0] != "_")


def test_modules_have_the_names_of_the_field() -> None:
    assert not [name for name in house.modules() if words_of(name.rpartition(".")[2]) & BANNED]


def test_public_names_are_of_the_field() -> None:
    packages = ["hooks", "jaxmodels", "robojax"]
    packages += [f"service/{path.parent.name}" for path in (ROOT / "service").glob("*/__init__.py")]
    assert len(packages) > 12
    found = {
        package: {
            name
            for path in house.modules((package,)).values()
            for name in public_names(tree_of(path))
            if words_of(name) & BANNED
        }
        for package in packages
    }
    assert {package: names for package, names in found.items() if names} == FIXED_NAMES


# `hooks` does not import `service`, and users know a policy and a session in two packages by these names.
SHARED_NAMES = {"CannotListen", "DeadlineProtocol", "Policy", "Session"}


def test_a_public_class_name_is_defined_once() -> None:
    homes: dict[str, set[str]] = {}
    for name, path in house.modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(name)
    assert {name for name, modules in homes.items() if len(modules) > 1} == SHARED_NAMES
