"""Every notebook runs, uses only public names, is stored without outputs, and links to the next notebook."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

import jaxmodels
from tests.testing.compiling import QUICK, compiling_quickly

PUBLIC = re.compile(
    r"jaxmodels(\.(data|errors|normalization|samplers|devices|text|training|transformer2d|types|weights"
    r"|policies\.(lerobot_folder|\w+\.(config|model|policy))))?"
)
ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBERED = [path for path in NOTEBOOKS if path.stem[:2].isdigit()]
# Seconds per notebook. Notebooks train and compile without a cache, which takes long on a busy machine.
TIMEOUT = 600
SHORTER = 20  # No cell depends on how well a policy has learned, or on the number of measurements.
# Replacements that reduce batch sizes, image sizes, denoising steps and episodes.
FEWER = {
    "(1, 2, 4, 8)": "(1, 2)",
    ", (720, 1280))": ")",
    "(2, 5, 10)": "(2, 5)",
    '"--episodes", 6)': '"--episodes", 3)',
    "episodes=range(5))": "episodes=range(2))",
    "episodes=[5])": "episodes=[2])",
}
# Program that tests whether the machine can render. It runs in a separate process because OpenGL may abort it.
DRAWING = "import robojax.sim, mujoco; mujoco.GLContext(8, 8)"


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def text(path: Path, kind: str = "markdown") -> str:
    return "\n".join("".join(cell["source"]) for cell in cells(path, kind))


def shortened(source: str) -> str:
    """Return a cell with a twentieth of its training steps and timed calls, and the changes of `FEWER`."""
    for long, short in FEWER.items():
        source = source.replace(long, short)
    counts = r"\b(runs=|for _ in range\()(\d+)"
    if "TrainingConfig(" in source:
        counts = r"\b(runs=|steps=|log_freq=|save_freq=|progress\.step == )(\d+)"
    return re.sub(counts, lambda found: f"{found[1]}{max(1, int(found[2]) // SHORTER)}", source)


@pytest.fixture(scope="session")
def can_draw() -> bool:
    return subprocess.run([sys.executable, "-c", DRAWING], capture_output=True, check=False).returncode == 0


def test_there_are_notebooks() -> None:
    assert NUMBERED
    assert [path.stem[:2] for path in NUMBERED] == [f"{number:02}" for number in range(1, len(NUMBERED) + 1)]


@pytest.mark.notebook
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, can_draw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "record-demo" in text(path, "code") and not can_draw:
        pytest.skip("this machine cannot render the simulated arm; robojax doctor shows what is missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", "off")
    monkeypatch.setenv("ROBOJAX_FRAME_CACHE", str(tmp_path / "frames"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    jax.jit(abs)(-1)  # XLA reads its flags once, so the flags below apply only to processes of a notebook.
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    names: dict = {"__name__": "__main__"}
    try:
        with compiling_quickly():
            for number, cell in enumerate(cells(path, "code"), 1):
                source = shortened("".join(cell["source"]))
                exec(compile(source, f"{path.name}, code cell {number}", "exec"), names)
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")  # pyplot keeps figures until they are closed.
    assert capsys.readouterr().out, "a notebook must print something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_uses_only_public_names(path: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(path, "code"))
    for node in ast.walk(ast.parse(text(path, "code"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "jaxmodels":
            assert PUBLIC.fullmatch(str(node.module)), ast.unparse(node)
            module = import_module(str(node.module))
            assert {alias.name for alias in node.names} <= set(getattr(module, "__all__", dir(module)))
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names if alias.name.split(".")[0] == "jaxmodels"}
            assert imported <= {"jaxmodels"}, ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxmodels":
            assert node.attr in jaxmodels.__all__


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_that_a_notebook_names_exist(path: Path) -> None:
    named = {Path(name).name for name in text(path).split("`") if name.endswith(".ipynb")}
    assert named <= {notebook.name for notebook in NOTEBOOKS}
    if path in NUMBERED[:-1]:
        assert NUMBERED[NUMBERED.index(path) + 1].name in named


def test_the_guide_lists_all_notebooks() -> None:
    assert "docs/start/notebooks.md" in (ROOT / "README.md").read_text()
    guide = (ROOT / "docs" / "start" / "notebooks.md").read_text()
    assert all(f"notebooks/{path.name}" in guide for path in NOTEBOOKS)
