"""Models of diffusers from the command line: looked at, served, refused."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

# Where a command is called in the tests' process, JAX would keep this test's folder as its cache.
NO_CACHE = {"ROBOJAX_COMPILE_CACHE": "off"}


def forward(url: str, name: str) -> Any:
    body = {"inputs": {"hidden_states": [[[[0.5] * 8] * 8] * 4], "timestep": 3, "class_labels": [1]}}
    request = urllib.request.Request(
        f"{url}/models/{name}/forward", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_check_tells_what_a_model_is_and_how_fast(robojax, model_folder):
    told = robojax("check", str(model_folder), "--runs", "5", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert (found["class"], found["kind"], found["config"]["num_layers"]) == ("Transformer2DModel", "patches", 2)
    assert found["parameters"] > 50_000
    assert [entry["name"] for entry in found["inputs"] if entry["required"]] == [
        *("hidden_states", "timestep", "class_labels")
    ]
    assert found["timed_with"] == {"hidden_states": [1, 4, 8, 8], "timestep": [1], "class_labels": [1]}
    assert 0 < found["forward_ms"]["p50"] <= found["forward_ms"]["p99"]
    assert found["compile_s"] > 0


def test_check_of_a_pipeline_asks_for_the_subfolder_and_then_shows_a_table(call, model_folder):
    told = call("check", str(model_folder.parent), **NO_CACHE)
    assert (told.returncode, "transformer" in told.stderr) == (3, True)
    told = call("check", str(model_folder.parent), "--subfolder", "transformer", "--runs", "5", **NO_CACHE)
    assert told.returncode == 0, told.stderr
    for text in ("Transformer2DModel with patches input", "class_labels (batch) int32", "p50", "cpu:0"):
        assert text in told.stdout


@pytest.mark.parametrize("config", ["{", '{"_class_name": "FluxTransformer2DModel"}', '{"_class_name": 5}'])
def test_check_of_a_folder_that_is_no_such_model_ends_with_3(call, tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    told = call("check", str(tmp_path), **NO_CACHE)
    assert (told.returncode, told.stdout) == (3, "")
    assert "config.json" in told.stderr


def test_a_server_with_models_says_what_it_loads_runs_them_and_ends_with_0(serve, model_folder):
    with serve("--model", f"dit={model_folder}", "--model", f"again={model_folder}") as (process, url):
        assert forward(url, "dit")["outputs"] == forward(url, "again")["outputs"]
        with pytest.raises(urllib.error.HTTPError) as caught:
            forward(url, "other")
        assert "loaded: dit, again" in caught.value.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log = process.stderr.read()
    for text in ("model dit: loading", "model dit: reading", "model dit: compiling", "model again: ready in"):
        assert text in log


def test_a_model_that_cannot_be_loaded_ends_the_start_with_3(robojax, tmp_path):
    told = robojax("serve", "--port", "0", "--model", f"broken={tmp_path}")
    assert (told.returncode, told.stdout) == (3, "")
    for text in ("the server cannot start", "model 'broken' cannot be loaded: ", "config.json", "Do: "):
        assert text in told.stderr


def test_a_name_that_is_none_ends_with_2(call):
    told = call("serve", "--model", "a/b=folder")
    assert (told.returncode, "a name of 1 to 64 letters" in told.stderr) == (2, True)


@pytest.mark.parametrize("after", [0.5, 2.0])
def test_a_start_that_is_ended_while_it_loads_ends_with_0(environment, tmp_path, model_folder, pauses, after):
    models = [part for number in range(30) for part in ("--model", f"m{number}={model_folder}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "robojax.cli", "serve", "--port", "0", *models],
        env=environment | {"ROBOJAX_COMPILE_CACHE": "off"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "model m0: loading" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(after)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert pauses.running(began) < 6
    assert "Traceback" not in err
