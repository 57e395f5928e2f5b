"""Files that ``python -m tools.new_policy`` writes."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxmodels.policies
from jaxmodels.data import Dataset
from jaxmodels.policies import policy_types, trained_types
from tests.unit.jaxmodels.training.conftest import MakeConfig
from tools.new_policy.__main__ import ROOT, write_policy_type

NAME = "wave_policy"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty checkout whose policy types are found next to the product's."""
    root = tmp_path / "checkout"
    monkeypatch.setattr(
        jaxmodels.policies, "__path__", [*jaxmodels.policies.__path__, str(root / "jaxmodels/policies")]
    )
    yield root
    for module in [name for name in sys.modules if name.startswith(f"jaxmodels.policies.{NAME}")]:
        del sys.modules[module]
    policy_types.cache_clear()


def test_new_policy_type_passes_its_own_test(
    checkout: Path, dataset: Dataset, config: MakeConfig, tmp_path: Path
) -> None:
    *_, test = write_policy_type(NAME, checkout)
    policy_types.cache_clear()
    assert NAME in trained_types()
    spec = importlib.util.spec_from_file_location(test.stem, test)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, f"test_{NAME}_acts_the_same_after_saving")(dataset, config, tmp_path)


@pytest.mark.parametrize("name", ["a", NAME, "this_has_24_characters_x"])
def test_new_policy_type_has_no_style_errors(name: str, tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff", reason="ruff is not installed").find_ruff_bin()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    write_policy_type(name, tmp_path)
    first_party = 'lint.isort.known-first-party = ["jaxmodels"]'  # The temporary folder has only a part of the package.
    for command in (["check", "--no-cache", "--config", first_party], ["format", "--no-cache", "--check"]):
        done = subprocess.run([ruff, *command, tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["WavePolicy", "2d", "wave-policy", "wave__policy", "", "../wave", "class", "a" * 25])
def test_wrong_name_of_a_policy_type_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wanted snake case of at most 24 characters, for example wave_policy"):
        write_policy_type(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["act", "tokens2d", "config"])
def test_taken_name_of_a_policy_type_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"the name '{name}' is taken: jaxmodels/policies/{name}.* exists"):
        write_policy_type(name)


def test_nothing_is_kept_if_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "tests").write_text("a file instead of the folder of tests")
    with pytest.raises(OSError, match="test"):
        write_policy_type(NAME, tmp_path)
    assert not list((tmp_path / "jaxmodels/policies").iterdir())
