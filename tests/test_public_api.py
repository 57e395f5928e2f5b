"""What the package exports."""

import subprocess
import sys

import hooks


def test_public_names_are_exactly_those_that_are_listed() -> None:
    assert sorted(hooks._HOMES) == sorted(hooks.__all__)
    for name in hooks.__all__:
        assert getattr(hooks, name).__name__ == name
    assert set(hooks.__all__) <= set(dir(hooks))


def test_names_of_huggingface_hub_are_here_too() -> None:
    import huggingface_hub

    theirs = [name for name in huggingface_hub.__dict__["__all__"] if "webhook" in name.lower()]
    assert len(theirs) >= 15
    assert set(theirs) <= set(hooks.__all__), set(theirs) - set(hooks.__all__)


def test_importing_it_imports_nothing_else() -> None:
    script = (
        "import sys, hooks; print(*(name for name in ('sanic', 'pydantic', 'huggingface_hub') if name in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []
