"""Diffusers models on the command line: described, served, refused."""

import json
import signal
import subprocess
import sys
import time

import pytest

# Without this setting, JAX would use the folder of one test as the cache of the whole process.
NO_CACHE = {"ROBOJAX_COMPILE_CACHE": "off"}


def test_check_describes_and_times_a_model(call, model_folder):
    result = call("check", str(model_folder), "--runs", "5", "--json", **NO_CACHE)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["class"], found["kind"], found["config"]["num_layers"]) == ("Transformer2DModel", "patches", 2)
    assert found["parameters"] > 50_000
    assert [entry["name"] for entry in found["inputs"] if entry["required"]] == [
        *("hidden_states", "timestep", "class_labels")
    ]
    assert found["timed_with"] == {"hidden_states": [1, 4, 8, 8], "timestep": [1], "class_labels": [1]}
    assert 0 < found["forward_ms"]["p50"] <= found["forward_ms"]["p99"]
    assert found["compile_s"] > 0
    refused = call("check", str(model_folder), "--roofline", **NO_CACHE)
    assert (refused.returncode, "--roofline cannot describe" in refused.stderr) == (2, True)


def test_check_of_a_pipeline_needs_the_subfolder(call, model_folder):
    result = call("check", str(model_folder.parent), **NO_CACHE)
    assert (result.returncode, "transformer" in result.stderr) == (3, True)
    result = call("check", str(model_folder.parent), "--subfolder", "transformer", "--runs", "5", **NO_CACHE)
    assert result.returncode == 0, result.stderr
    for text in ("Transformer2DModel with patches input", "class_labels (batch) int32", "p50", "cpu:0"):
        assert text in result.stdout


@pytest.mark.parametrize("config", ["{", '{"_class_name": "FluxTransformer2DModel"}', '{"_class_name": 5}'])
def test_check_of_an_unknown_model_exits_with_3(call, tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    result = call("check", str(tmp_path), **NO_CACHE)
    assert (result.returncode, result.stdout) == (3, "")
    assert "config.json" in result.stderr


def test_broken_or_misnamed_model_prevents_the_start(robojax, call, tmp_path):
    result = robojax("serve", "--port", "0", "--model", f"broken={tmp_path}")
    assert (result.returncode, result.stdout) == (3, "")
    for text in ("the server cannot start", "model 'broken' cannot be loaded: ", "config.json", "Do: "):
        assert text in result.stderr
    result = call("serve", "--model", "a/b=folder")
    assert (result.returncode, "a name of 1 to 64 letters" in result.stderr) == (2, True)


def test_sigterm_during_a_load_exits_with_0(environment, tmp_path, model_folder, pauses):
    models = [part for number in range(30) for part in ("--model", f"m{number}={model_folder}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "robojax.cli", "serve", "--port", "0", *models],
        env=environment | {"ROBOJAX_COMPILE_CACHE": "off"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "model m0: loading" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert pauses.running(began) < 6
    assert "Traceback" not in err
