"""Measure the structure of the source: modules, imports, functions, and four paths through the product.

    python tools/house.py             all of it
    python tools/house.py --no-trace  without running anything

Modules, imports and functions are read from the syntax trees of the packages; `tools/traces.py` runs the paths.
"""

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxmodels", "hooks", "service", "robojax")
MAX_PARAMETERS = 6


def modules(packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Return the file of each module of the packages by dotted name."""
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports_of(files: Mapping[str, Path], *, everywhere: bool = False) -> dict[str, set[str]]:
    """Return the product modules that each module imports at module level, or also in functions (``everywhere``)."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        found: set[str] = set()
        for node in ast.walk(tree) if everywhere else tree.body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {each if each in files else node.module for each in whole}
        graph[name] = {each for each in found if each in files and each != name}
    return graph


def package_of(module: str) -> str:
    """Return the package of a module, such as ``service.control`` for ``service.control.guard``."""
    return ".".join(module.split(".")[:2])


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two or more nodes."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, edges: Mapping[str, set[str]], out: list[str]) -> None:
        stack = [(node, iter(sorted(edges.get(node, ()))))]
        seen.add(node)
        while stack:
            here, rest = stack[-1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(sorted(edges.get(other, ())))))
                    break
            else:
                out.append(here)
                stack.pop()

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    backwards: dict[str, set[str]] = defaultdict(set)
    for node, others in graph.items():
        for other in others:
            backwards[other].add(node)
    seen, groups = set(), []
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            visit(node, backwards, group)
            if len(group) > 1:
                groups.append(sorted(group))
    return groups


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters of a function without `self` and `cls`."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(node.args.vararg) + bool(node.args.kwarg)


def page() -> str:
    """Return the figures of the syntax trees as text."""
    files = modules()
    lines = {name: path.read_text().count("\n") for name, path in files.items()}
    out = ["package                        files   lines  median  longest"]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        top = name.split(".")[0]
        groups[top].append(name)
        folder = ".".join(path.relative_to(ROOT).parts[:2]) if len(path.relative_to(ROOT).parts) > 2 else f"{top}."
        groups[f"  {folder}"].append(name)
    for top in PACKAGES:
        for group in sorted((each for each in groups if each.strip().split(".")[0] == top), key=lambda each: each[:1]):
            sizes = {name: lines[name] for name in groups[group] if files[name].name != "__init__.py"} or {"": 0}
            longest = max(sizes, key=lambda name: sizes[name])
            out.append(
                f"{group:30}{len(groups[group]):6}{sum(lines[name] for name in groups[group]):8}"
                f"{median(sizes.values()):8.0f}  {longest.rpartition('.')[2]} {sizes[longest]}"
            )
    out.append(f"{'all':30}{len(files):6}{sum(lines.values()):8}{median(lines.values()):8.0f}")

    graph = imports_of(files)
    packages: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        packages[package_of(name)] |= {package_of(other) for other in others} - {package_of(name)}
    for title, found in (("packages", circles(packages)), ("modules", circles(graph))):
        out.append(f"\ncircles of {title}: {len(found)}")
        out += [f"  {len(group)}: {' '.join(group)}" for group in found]

    importers = Counter(other for others in imports_of(files, everywhere=True).values() for other in others)
    single = [name for name in files if importers[name] == 1 and files[name].name != "__init__.py"]
    out.append(f"\nmodules with one importer: {len(single)}, those under 60 lines: ")
    out[-1] += ", ".join(f"{name} ({lines[name]})" for name in single if lines[name] < 60) or "none"
    wide = [
        (parameters(node), f"{name}.{node.name}")
        for name, path in files.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MAX_PARAMETERS
    ]
    out.append(f"functions with more than {MAX_PARAMETERS} parameters: {len(wide)}; the largest numbers:")
    out += [f"  {count} {name}" for count, name in sorted(wide, reverse=True)[:8]]
    return "\n".join(out)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-trace", action="store_true", help="read only the source and run no trace")
    arguments = parser.parse_args()
    print(page())
    if not arguments.no_trace:
        print("\npaths through the product (tools/traces.py)", flush=True)
        subprocess.run([sys.executable, str(ROOT / "tools" / "traces.py")], check=True)


if __name__ == "__main__":
    main()
