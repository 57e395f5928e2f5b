"""Layers of the packages: one table, compared with every import."""

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
PRODUCT_PACKAGES = ("jaxmodels", "service", "hooks", "robojax")
ACCELERATOR = {"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "safetensors"}
SERVER = {"sanic", "pydantic", "asyncio", "aiohttp", "aiortc", "uvloop", "typer", "rich"}

# Package to the modules that it must not import (prefixes of dotted names).
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
        " < recording streaming rollout dashboard < distributed < settings < api doctor shared_sessions lerobot < app"
    ),
    "hooks": ("errors threads < payload database addresses < queue < registry < client receiver < server"),
    "jaxmodels": (
        "errors _lazy < ranges < types cache_dirs < normalization devices hub_process weights < quantization < hub"
        " < hub_download < layers samplers < memory < checkpoints < text < transformer2d vlm data < policies < program"
        " < observations gates roofline instructions < policy < loading < export training"
    ),
    "robojax": "client < robot < sim < cli",
}
# Package to the files that may import it, because they assemble the programs.
COMPOSITION_ONLY = {"hooks": {"service/app.py", "service/rollout/", "robojax/__init__.py", "robojax/cli/webhooks.py"}}
# Module to the only files of the client and the robot that import it, inside functions, because WebRTC is large.
OF_THE_SERVICE = {"service.transport": {"robojax/client/client.py"}, "service.errors": {"robojax/robot/links.py"}}
# Third-party module to the only file or folder of jaxmodels that imports it.
ONLY_IMPORTER = {
    "huggingface_hub": "jaxmodels/hub_download.py",
    "av": "jaxmodels/data/",
    "pyarrow": "jaxmodels/data/",
    "tokenizers": "jaxmodels/checkpoints/tokenizer_files.py",
    "tensorstore": "jaxmodels/checkpoints/orbax_files.py",
}
# Distributions whose module has another name. The table does not depend on the installed packages.
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
    "zenoh": "eclipse-zenoh",
}
# Distributions without an import: commands, plug-ins of pytest, and modules named in strings.
TOOLS = {"beartype", "jupyterlab", "mkdocs-material", "pip-licenses", "pyright", "ruff"}
TOOLS |= {"pytest-timeout", "pytest-xdist"}


def modules() -> list[Path]:
    return sorted(path for package in PRODUCT_PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return the line and dotted name of each import of a file."""
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


def forbidden_imports(path: Path) -> Iterator[str]:
    """Yield a message for each import that the tables above forbid."""
    file = str(path.relative_to(ROOT))
    package = file.split("/")[0]
    side = ".".join(file.split("/")[:2])  # The part of the client or of the robot.
    is_separate = side in FORBIDDEN
    of_the_service = {name for name, files in OF_THE_SERVICE.items() if file in files}
    for line, name in imports(path):
        for banned in FORBIDDEN.get(side if is_separate else package, ()):
            if within(name, banned):
                yield f"{file}:{line}: {package} must not import {name}"
        for module, allowed in COMPOSITION_ONLY.items():
            if within(name, module) and package != module and not file.startswith(tuple(allowed)):
                yield f"{file}:{line}: only {sorted(allowed)} may import {name}"
        for module, only in ONLY_IMPORTER.items() if package == "jaxmodels" else ():
            if within(name, module) and not file.startswith(only):
                yield f"{file}:{line}: only {only} may import {name}"
        if is_separate and within(name, "service") and not any(within(name, allowed) for allowed in of_the_service):
            yield f"{file}:{line}: robojax must not import {name}"
    for node in tree_of(path).body if is_separate and file != "robojax/robot/_scservo.py" else ():
        for module in ("service", "aiortc", "cv2", "scservo_sdk"):
            if isinstance(node, ast.ImportFrom) and within(str(node.module), module):
                yield f"{file}:{node.lineno}: {module} is imported at module level; import it in the function"


def test_modules_import_only_allowed_modules() -> None:
    assert [problem for path in modules() for problem in forbidden_imports(path)] == []


def test_the_service_uses_only_public_names_of_jaxmodels() -> None:
    public = ("jaxmodels", "jaxmodels.errors", "jaxmodels.training", "jaxmodels.data", "jaxmodels.types")
    problems = []
    for path in modules():
        for node in ast.walk(tree_of(path)) if path.relative_to(ROOT).parts[0] in ("service", "robojax") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            files = [name for name in names if within(name, "jaxmodels") and name not in public]
            problems += [f"{path.relative_to(ROOT)}: {name}" for name in files]
    assert problems == []


def test_imports_and_declared_dependencies_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    names_of = {extra: {canonicalize_name(Requirement(text).name) for text in texts} for extra, texts in groups.items()}
    declared = set().union(*(names for extra, names in names_of.items() if extra != "dev"))
    helpers = [path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    problems, used = [], set(TOOLS)
    for path in (*modules(), *helpers):
        for line, name in imports(path):
            module = name.split(".")[0]
            distribution = canonicalize_name(DISTRIBUTIONS.get(module, module))
            used.add(distribution)
            needs_no_package = module in sys.stdlib_module_names or module in (*PRODUCT_PACKAGES, "benchmarks")
            if path not in helpers and not needs_no_package and distribution not in declared:
                problems.append(f"{path.relative_to(ROOT)}:{line}: {distribution} is not in pyproject.toml")
    unused = sorted((declared | names_of["dev"]) - used)
    problems += [f"{name} is in pyproject.toml, but no file imports it" for name in unused]
    assert not problems, "\n".join(problems)


def ranks(package: str) -> dict[str, int]:
    levels = enumerate(LAYERS[package].split("<"))
    return {f"{package}.{name}": rank for rank, names in levels for name in names.split()}


# Path -> largest number of files, functions, returns to a file that had been left, and callbacks; see tools/traces.py.
# On a slow machine, functions of holds and of the batch timer run too, and threads alternate more often.
PATHS = {
    "frame": (13, 62, 110, 0),
    "session": (56, 356, 260, 5),
    "policy": (26, 274, 760, 0),
    "push": (32, 265, 290, 5),
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_through_the_product_stay_short(path: str) -> None:
    # Use a new process, because a trace also counts functions in threads that other tests left.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        for _ in range(3):  # A pause of the machine adds functions.
            figures = process.submit(measure_path, path).result()
            if all(map(le, figures, PATHS[path])):
                break
    assert figures[0] > 0
    assert all(map(le, figures, PATHS[path])), figures


def measure_path(path: str) -> tuple[int, int, int, int]:
    trace = traces.run(path)
    return len(trace.files), len(trace.functions), trace.returns, trace.callbacks


def test_modules_import_only_from_their_own_or_lower_layers() -> None:
    files = house.modules()
    rank = {name: level for package in LAYERS for name, level in ranks(package).items()}
    below = {name for name in map(house.package_of, files) if "." in name}
    assert below == set(rank), "the table must list all modules and packages"
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


# Everyday words that must not replace a term of the field.
_BANNED = """
knock lacking told wish parcel leash patience crew errand keeper courier drive thinking asking trail lane turnover
growth askers changeover consultation thought standing kept ledger onlooker punctual found wanted place places tell
hear heard shown asked seen look looking complaint complaints utils helpers misc
"""
BANNED = set(_BANNED.split())
# Public names with such a word, by package, that users have in code, files or settings.
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
    """Yield the public names of functions, classes, methods and attributes outside of functions."""
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


def test_module_names_use_terms_of_the_field() -> None:
    assert not [name for name in house.modules() if words_of(name.rpartition(".")[2]) & BANNED]


def test_public_names_use_terms_of_the_field() -> None:
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


# `hooks` does not import `service`, and the client uses the same names for a policy and a session.
SHARED_NAMES = {"CannotListen", "DeadlineProtocol", "Policy", "Session"}


def test_a_public_class_name_is_defined_once() -> None:
    homes: dict[str, set[str]] = {}
    for name, path in house.modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(name)
    assert {name for name, modules in homes.items() if len(modules) > 1} == SHARED_NAMES
