"""Docstrings name parameters and exceptions that exist."""

import ast
import builtins
import re
from collections.abc import Iterator

import pytest

from tools import house

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples|Note):$")
# "name: text" or "name, other: text" at the first level of a section.
ENTRY = re.compile(r"^(?P<names>[`*\w.]+(?:, [`*\w.]+)*)(?: \([^)]*\))?: ")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def entries(docstring: str, section: str) -> Iterator[str]:
    """Yield the names that a section of a docstring describes."""
    here, indent = "", None
    for line in docstring.expandtabs().splitlines():
        text = line.strip()
        if found := SECTION.match(text):
            here, indent = found[1], None
            continue
        if here != section or not text:
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        if depth < indent:
            here = ""
        elif depth == indent and (found := ENTRY.match(text)):
            yield from (name.strip("`*").rpartition(".")[2] for name in found["names"].split(", "))


def exception_names() -> set[str]:
    """Return the names of built-in exceptions, of the product's classes, and of exceptions that it imports."""
    names = {name for name, value in vars(builtins).items() if isinstance(value, type)}
    for path in house.modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names |= {(alias.asname or alias.name).rpartition(".")[2] for alias in node.names}
    return names


def documented() -> Iterator[tuple[str, ast.AST, str, set[str]]]:
    """Yield place, node and docstring of each function and class, and the names that its `Args:` may have."""
    for name, path in house.modules().items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, Function | ast.ClassDef) or not (text := ast.get_docstring(node)):
                continue
            functions = [node] if isinstance(node, Function) else []
            fields: set[str] = set()
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                family = [node, *(item for item in tree.body if isinstance(item, ast.ClassDef) and item.name in bases)]
                functions = [
                    item
                    for base in family
                    for item in base.body
                    if isinstance(item, Function) and item.name == "__init__"
                ]
                fields = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
            arguments = {
                argument.arg
                for function in functions
                for argument in (
                    *function.args.posonlyargs,
                    *function.args.args,
                    *function.args.kwonlyargs,
                    *filter(None, (function.args.vararg, function.args.kwarg)),
                )
            }
            yield f"{path.relative_to(house.ROOT)}:{node.lineno} {name}.{node.name}", node, text, arguments | fields


@pytest.mark.parametrize("section", ["Args", "Raises"])
def test_docstrings_name_existing_parameters_and_exceptions(section: str) -> None:
    exceptions = exception_names()
    problems = [
        f"{place}: {section} names {name!r}"
        for place, _, text, arguments in documented()
        for name in entries(text, section)
        if name not in (arguments if section == "Args" else exceptions)
    ]
    assert not problems, "\n".join(problems)
