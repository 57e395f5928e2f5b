"""The shipped policy: the output of `check`, and a server that ends during or after loading."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import pytest

from robojax.client import Client
from tests.testing.models import compilation as compilation
from tests.unit.robojax.cli.conftest import end

POLICY = str(Path(__file__).parents[4] / "robojax" / "sim" / "policy")


def test_check_describes_a_policy_and_its_fit(call, tmp_path):
    (tmp_path / "so101.toml").write_text("[joints.gripper]\nstep = 8\n[joints.sholder_pan]\nlow = -60")
    flags = ("--rate", "25", "--runs", "10", "--limits", "so101.toml", "--json")
    result = call("check", POLICY, *flags, ROBOJAX_COMPILE_CACHE="off")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["requirements"]["cameras"] == {"front": [96, 96]}
    assert found["requirements"]["joint_names"][0] == "Rotation"
    assert 0 < found["inference_ms"]["p50"] <= found["inference_ms"]["p99"]
    assert (found["rate"], found["verdict"]) == (25.0, "fits")
    assert set(found["parameters_by_part"]) == {"vision", "transformer"}
    assert sum(found["parameters_by_part"].values()) == found["parameters"]
    assert found["weights_bytes"] == {"float32": 4 * found["parameters"], "bfloat16": 2 * found["parameters"]}
    assert [(part["part"], part["times"]) for part in found["parts_ms"]] == [("chunk", 1)]
    assert (found["dtype"], found["prefix_tokens"], found["lerobot_version"]) == ("float32", None, None)
    jaw = found["limits"]["Jaw"]
    assert (jaw["low"], jaw["high"], jaw["step"], jaw["origin"]) == (0, 100, 8, "so101.toml, joint table")
    assert found["unmatched"] == ["sholder_pan"], "a misspelled name limits nothing and is reported"
    assert found["requirements"]["action_range"][1][5] == pytest.approx(63.6, abs=0.1)
    statistics = found["requirements"]["state_statistics"]
    assert (statistics["mean"][3], statistics["std"][3]) == pytest.approx((78.1, 11.7), abs=0.1)


def test_check_prints_the_gates_of_a_quantized_policy(call, tmp_path):
    flags = ("--dtype", "int8", "--runs", "5", "--episodes", "1")
    done = call("check", POLICY, *flags, "--action-error-percent", "5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gates = found["gates"]
    assert (found["dtype"], gates["passed"], gates["actions"]["reference"]) == ("int8", True, "float32")
    assert [joint["joint"] for joint in gates["actions"]["joints"]] == found["requirements"]["joint_names"]
    assert all(0 < joint["share"] < 0.02 for joint in gates["actions"]["joints"])
    assert gates["success"] == {"episodes": 1, "lifted": 1, "reference_lifted": 1, "probability": 1.0}
    assert call("record-demo", "pick", "--episodes", "1", "--workers", "1").returncode == 0
    done = call("check", POLICY, *flags[:-1], "0", "--observations", "pick")
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "difference of int8 from float32, in the unit of the policy's actions, over" in text
    assert "observations of pick" in text
    assert re.search(r"Wrist_Pitch 0\.\d{4} [01]\.\d{3} 0\.5 failed", text)
    assert "gate of success: not run, because no episodes were asked for" in text


def test_check_prints_the_least_times_of_accelerators(call):
    text = " ".join(call("check", POLICY, "--roofline", "--batch", "1,16", COLUMNS="120").stdout.split())
    assert "batch 1 in float32" in text
    assert "batch 16 in float32" in text
    assert [text.count(f" {name} ") for name in ("H100", "H200", "L40S", "v5e", "v6e")] == [2] * 5
    assert "not measured: no peaks are listed for cpu:0 (cpu)" in text
    found = json.loads(call("check", POLICY, "--roofline", "--dtype", "bfloat16", "--json").stdout)
    [batch] = found["batches"]
    assert (batch["batch"], batch["dtype"], batch["measured"]) == (1, "bfloat16", None)
    assert [part["name"] for part in batch["parts"]] == ["frames", "chunk"]
    assert list(batch["least"]) == ["H100", "H200", "L40S", "v5e", "v6e"]
    assert all(least["chunk_ms"] > least["chunk_in_8_bits_ms"] > 0 for least in batch["least"].values())


def test_check_reports_missing_joint_names(call, tmp_path):
    policy = Path(shutil.copytree(POLICY, tmp_path / "policy", copy_function=shutil.copyfile))
    (policy / "robojax.json").write_text('{"rate": 25}')
    done = call("check", str(policy), "--runs", "5")
    text = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0, done.stderr
    assert "a session needs joint_names (6 names in the order of its actions)" in text
    assert "--policy.joint_names" in text
    assert "action_1" in text
    assert "Rotation" not in text


def test_check_refuses_a_policy_without_statistics(call, tmp_path):
    policy = Path(shutil.copytree(POLICY, tmp_path / "policy", copy_function=shutil.copyfile))
    post = json.loads((policy / "policy_postprocessor.json").read_text())
    del post["steps"][0]["state_file"]
    (policy / "policy_postprocessor.json").write_text(json.dumps(post))
    done = call("check", str(policy))
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 3
    assert "policy_postprocessor.json: feature 'action' (type ACTION, mode MEAN_STD) has no statistics" in text
    assert "Do: docs/policies/checkpoints.md describes the folder of a policy" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("flags", "code", "messages"),
    [
        (("--rename", "top=cam"), 3, ("top=cam names no camera of the policy, which has front", "without --rename")),
        (("--rename", "cam=front"), 3, ("the policy's name comes first, as front=cam", "without --rename")),
        (("--rename", "front"), 2, ("--rename front does not name two cameras",)),
        (("--batch", "4"), 2, ("--batch is '4'", "only --roofline reads it")),
        (("--roofline", "--batch", "1,-4"), 2, ("--batch is '1,-4'", "wanted integers")),
        (("--roofline", "--batch", "0"), 3, ("batch is 0",)),
        (("--lerobot-version", "0.5"), 2, ("--lerobot-version", "'0.5' is not one of '0.4', '0.6'")),
    ],
)
def test_invalid_flag_of_check_is_named(call, flags: tuple[str, ...], code: int, messages: tuple[str, ...]):
    done = call("check", POLICY, *flags, ROBOJAX_COMPILE_CACHE="off")
    text = " ".join(done.stderr.replace("│", " ").split())
    assert (done.returncode, [words for words in messages if words not in text]) == (code, [])


def test_manual_updates_are_listed_with_their_results(serve, call):
    with serve("--state", "off") as (_, url), Client(url) as client:

        def output_of(*arguments: str, code: int = 0) -> str:
            done = call(*arguments, "--server", url)
            assert done.returncode == code, done.stderr
            return done.stdout + done.stderr

        assert "no policy updates of session 'unknown' at" in output_of("deployments", "unknown")
        assert "Session unknown not found" in output_of("policy", "unknown", "v1", code=4)
        assert "robojax deployments unknown" in output_of("rollback", "unknown", code=4)
        client.create("arm", POLICY, transport_server_url=url)
        assert "arm: noop" in output_of("policy", "arm")
        assert "has no revision 'v9'" in output_of("policy", "arm", "v9", code=4)
        assert "ran no other policy" in output_of("rollback", "arm", code=4)
        results = [one["result"] for one in json.loads(output_of("deployments", "arm", "--json"))]
        assert results == ["failed", "failed", "noop"]
        assert "v9" in output_of("deployments")


@pytest.mark.parametrize("wait", [0.3, None], ids=["loading", "ready"])
def test_server_with_a_real_policy_exits_with_0(serve, pauses, wait):
    with serve() as (process, url), Client(url) as client, ThreadPoolExecutor(1) as pool:
        created = pool.submit(client.create, "arm", POLICY, transport_server_url=url)
        wait_for([created], wait)
        end(process, pauses)
        assert (created.exception(60) is None) == (wait is None)
