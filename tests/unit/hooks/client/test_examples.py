"""The page about managing webhooks runs as it stands, against the stub Hub."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.stub_hub import StubHub

PAGE = Path(__file__).parents[4] / "docs" / "operate" / "webhooks_management.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(stub: StubHub, tmp_path):
    environment = {
        **os.environ,
        "HF_ENDPOINT": stub.url,
        "HF_TOKEN": "hf_token",
        "HF_HOME": str(tmp_path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def test_the_python_does_what_it_says(stub, run, tmp_path):
    told = run(sys.executable, "-c", "\n".join(text for language, text in BLOCKS if language == "python"))
    (webhook,) = stub.webhooks.values()
    assert webhook.url == "https://robot.example.com/webhooks/policy"
    assert [item["name"] for item in webhook.watched] == ["someone/arm", "someone"]
    assert webhook.secret == (tmp_path / "webhook.secret").read_text().strip()
    assert webhook.secret not in told
    assert "secret='********'" in told
    assert "enabled\n" in told


def test_the_commands_do_what_they_say(stub, run, tmp_path):
    (commands,) = (text for language, text in BLOCKS if language == "bash")
    told = run("bash", "-euc", commands)
    for text in ("created", "model:someone/arm", "updated", "deleted"):
        assert text in told
    assert (tmp_path / "hook.secret").read_text().strip() not in told
    assert not stub.webhooks
