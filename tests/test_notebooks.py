"""Every notebook runs from top to bottom, uses public names only, and is stored without outputs."""

import ast
import json
from importlib import import_module
from pathlib import Path

import pytest

import jaxmodels

PUBLIC = ("jaxmodels", "jaxmodels.errors", "jaxmodels.samplers", "jaxmodels.sharding", "jaxmodels.transformer2d")
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", "off")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path), 1):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
    assert capsys.readouterr().out, "a notebook shows something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_public_names_only(path: Path) -> None:
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in code_cells(path)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "jaxmodels":
            assert node.module in PUBLIC, ast.unparse(node)
            module = import_module(str(node.module))
            assert {alias.name for alias in node.names} <= set(getattr(module, "__all__", dir(module)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxmodels":
            assert node.attr in jaxmodels.__all__
