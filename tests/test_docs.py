"""The guides: each is in the site, what they name is there, and the snippets of one run as they stand."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from jaxmodels.transformer2d.diffusers_config import read_block_config
from jaxmodels.transformer2d.diffusers_folder import tensor_names
from service.api.blueprint import ROUTES
from tests.test_layers import LAYERS
from tests.testing.compiling import QUICK, compiling_quickly

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDE = DOCS / "policies" / "transformer2d.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
USUAL = "http://127.0.0.1:8001"
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [16],
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAMED = re.compile(r"\bdocs/[\w/]+\.(?:md|png|svg)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SOURCES = ("*.py", "*.md", "*.ipynb", "*.yaml", "Makefile", "Dockerfile", "Caddyfile", "nginx.conf")


def paths_in(nav: list[Any]) -> list[str]:
    """Pages of a part of the navigation, in order."""
    entries = [next(iter(entry.values())) if isinstance(entry, dict) else entry for entry in nav]
    return [path for entry in entries for path in (paths_in(entry) if isinstance(entry, list) else [entry])]


def test_every_page_is_in_the_site_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    left_out = set(re.findall(r"\S+\.md", config["exclude_docs"]))
    of_the_root = {"reference/contributing.md", "reference/changelog.md"}
    expected = {path.relative_to(DOCS).as_posix() for path in PAGES} - {path.lstrip("/") for path in left_out}
    assert sorted(paths_in(config["nav"])) == sorted(expected | of_the_root)


@pytest.mark.parametrize(
    "page", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    assert [path for path in LINK.findall(page.read_text()) if not (page.parent / path).exists()] == []


def test_guides_that_the_repository_names_are_there() -> None:
    """In errors, help, notebooks and manifests, too."""
    folders = (
        "jaxmodels",
        "service",
        "hooks",
        "robojax",
        "benchmarks",
        "deploy",
        "docs",
        "notebooks",
        "tests",
        "tools",
    )
    files = [path for folder in folders for pattern in SOURCES for path in (ROOT / folder).rglob(pattern)]
    files += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")]
    named = {(name, path) for path in files for name in NAMED.findall(path.read_text())}
    assert [(name, str(path)) for name, path in named if not (ROOT / name).is_file()] == []


def test_the_readme_is_short() -> None:
    text = README.read_text()
    (table,) = re.findall(r"^## To change X, open Y\n+((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(text.splitlines()) <= 150
    assert len(table.splitlines()) - 2 <= 15


def test_the_page_of_the_architecture_has_the_layers_that_are_held() -> None:
    page = (DOCS / "reference" / "architecture.md").read_text()
    _, above_to_below = page.split("## One table")[1].split("|---|---|\n", 1)
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", above_to_below.split("\n\n")[0], re.MULTILINE)
    shown = {"service": " < ".join(row.strip() for row in reversed(rows)).replace("`", "")}
    for package in ("hooks", "jaxmodels", "robojax"):
        (row,) = re.findall(rf"^\| `{package}` \| (`.* < .*`) \|$", page, re.MULTILINE)
        shown[package] = row.replace("`", "")
    assert shown == LAYERS


def test_the_one_line_of_the_architecture_names_methods_that_there_are() -> None:
    page = (DOCS / "reference" / "architecture.md").read_text()
    trees = [ast.parse(path.read_text()) for path in (ROOT / "service").rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {f"{one.name}.{part.name}" for one in classes for part in one.body if isinstance(part, FUNCTIONS)}
    named = set(re.findall(r"\b[A-Z]\w+\.[a-z]\w*", page.split("## One line")[1].split("## Rules")[0]))
    assert len(named) > 10
    assert named <= methods


def test_the_list_of_routes_is_that_of_the_server() -> None:
    rows = re.findall(r"^\| ([A-Z]+) \| `(\S+)` \| (\S+) \|", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((route.method, route.path, str(route.role or "-")) for route in ROUTES)


def snippets(language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(GUIDE.read_text()) if found == language]


def write_unet(folder: Path) -> None:
    """What the guide calls stable-diffusion: the one transformer of a very small UNet, and a tensor beside it."""
    prefix, random = "mid_block.attentions.0", np.random.default_rng(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(UNET))
    tensors = {
        f"{prefix}.{place.theirs}": random.standard_normal(place.shape, np.float32)
        for place in tensor_names(read_block_config(UNET, prefix))
    }
    tensors["conv_in.bias"] = np.zeros(16, np.float32)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


class Ran(NamedTuple):
    """Where the guide's Python was run, and the names it left."""

    folder: Path
    names: dict[str, Any]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder, names = tmp_path_factory.mktemp("guide"), {"__name__": "__main__"}
    write_unet(folder / "stable-diffusion" / "unet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")
        with compiling_quickly():
            for number, text in enumerate(snippets("python"), 1):
                exec(compile(text, f"{GUIDE.name}, Python block {number}", "exec"), names)
    return Ran(folder, names)


def test_every_block_is_python_or_commands() -> None:
    assert {language for language, _ in BLOCK.findall(GUIDE.read_text())} == {"python", "bash"}


def test_the_python_runs_and_gives_what_it_says(ran: Ran) -> None:
    names = ran.names
    assert names["sample"].shape == (2, 4, 8, 8)
    assert names["features"].shape == (2, 16, 8, 8)
    np.testing.assert_allclose(names["probabilities"].sum(1), np.ones((2, 16)), atol=1e-6)
    assert names["tokens"].ids.shape == names["tokens"].log_probability.shape == (2, 16)
    assert names["images"].shape == (2, 4, 8, 8)
    assert np.isfinite(names["images"]).all()


@contextmanager
def serving(command: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The URL of a server that a command of the guide starts; on a free port."""
    process = subprocess.Popen(
        [*command.split(), "--port", "0"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = next((match for line in process.stdout if (match := re.search(r"serves at (\S+)", line))), None)
        assert found, "the server ended before it served"
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=90)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the guide's commands want curl")
def test_the_commands_run_and_answer_what_python_answers(ran: Ran) -> None:
    lines = [re.sub(r"\s+#.*", "", line) for text in snippets("bash") for line in text.splitlines()]
    (start,) = (line for line in lines if line.startswith("robojax serve"))
    others = [line for line in lines if not line.startswith(("robojax serve", "pip install"))]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | QUICK | {"PATH": path, "ROBOJAX_COMPILE_CACHE": "off", "JAX_PLATFORMS": "cpu"}
    answers = {}
    with serving(start, ran.folder, environment) as url:
        for line in others:
            run = subprocess.run(
                ["bash", "-euc", line.replace(USUAL, url)],
                cwd=ran.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert run.returncode == 0, f"{line}\n{run.stdout}\n{run.stderr}"
            answers[line] = run.stdout
    check, one, to_npz, shape, to_json = answers.values()
    assert "Transformer2DModel with patches input" in check
    assert json.loads(one)["kind"] == "patches"
    assert not to_npz
    assert shape.strip() == "(2, 4, 8, 8)"
    with np.load(ran.folder / "answer.npz") as answer:
        np.testing.assert_allclose(answer["sample"], ran.names["sample"], atol=1e-5)
    log_probabilities = np.array(json.loads(to_json)["outputs"]["sample"]["data"], np.float32)
    np.testing.assert_allclose(log_probabilities, ran.names["vq"](np.array([[8, 8, 3, 8]])).sample, atol=1e-5)
