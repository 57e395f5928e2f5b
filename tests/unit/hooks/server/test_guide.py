"""What docs/operate/webhooks.md shows is run: Python as scripts of its own, commands beside a server and a stub Hub."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hooks.payload import sample
from tests.testing.stub_hub import StubHub
from tests.unit.hooks.server.conftest import ask, end

GUIDE = Path(__file__).parents[4] / "docs" / "operate" / "webhooks.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
USUAL = "http://127.0.0.1:7860"
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with StubHub() as hub:
        yield hub


@pytest.fixture
def surroundings(environment, hub, tmp_path) -> dict[str, str]:
    scripts = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return environment | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "HF_HOME": str(tmp_path / "hf"), "PATH": scripts}


def test_every_block_is_python_or_commands():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}
    assert len(PYTHON) == 3


def test_the_first_script_serves_both_of_its_endpoints(script):
    with script(PYTHON[0]) as (process, url):
        told = ask(f"{url}/webhooks/trigger_training", sample(repo_type="dataset", repo="lab/cubes", sha="c0ffee"))
        assert told.json == {"train": "lab/cubes", "at": "c0ffee"}
        assert ask(f"{url}/webhooks/robots/arm", sample(repo="lab/arm", sha="c0ffee")).json == "c0ffee"
        assert ask(f"{url}/webhooks/robots/arm", sample(repo="other/arm")).json == {"status": "ignored"}
        code, errors = end(process)
        assert (code, "Traceback" in errors) == (0, False)


def test_the_second_script_serves_with_its_secret(script):
    with script(PYTHON[1]) as (process, url):
        assert ask(f"{url}/webhooks/hello", sample()).status == 401
        told = ask(f"{url}/webhooks/hello", sample(repo="a/b"), x_webhook_secret="replace-by-a-long-random-text")
        assert told.json == {"message": "hello a/b"}
        assert end(process) == (0, "")


def test_the_management_runs_as_it_stands(hub, surroundings, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PYTHON[2]], env=surroundings, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not hub.webhooks


def test_the_commands_run_beside_what_they_start(hub, surroundings, tmp_path):
    (tmp_path / "app.py").write_text(PYTHON[1])
    (tmp_path / "secret").write_text("a-secret-of-some-length\n")
    (serve,) = (line for line in COMMANDS if line.startswith("robojax webhooks serve"))
    others = [line for line in COMMANDS if line.startswith("robojax webhooks") and line != serve]
    process = subprocess.Popen(
        shlex.split(serve.replace("7860", "0")), env=surroundings, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("Running on local URL"))
        for line in others:
            done = subprocess.run(
                shlex.split(line.replace(USUAL, url)),
                env=surroundings,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(hub.webhooks) == 1


def test_every_other_command_has_the_options_that_are_shown():
    from robojax.cli.app import COMMANDS as KNOWN
    from service.settings import FIELDS

    for line in COMMANDS:
        if not line.startswith("robojax webhooks"):
            assert line.split()[1] in KNOWN, line
    for option in re.findall(r"--(registry[\w-]*)", GUIDE.read_text()):
        assert option.replace("-", "_") in FIELDS, option
