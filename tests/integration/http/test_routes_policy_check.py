import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

NAMES = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"]
DEMO = {"policy_path": "robojax/sim/policy"}


async def test_requirements_of_a_policy_are_shown_without_loading(server):
    status, reply = await server.call("POST", "/policies/check", json=DEMO)
    assert (status, reply["fits"], reply["misfits"]) == (200, True, [])
    assert (reply["policy_type"], reply["camera_names"], reply["rate"]) == ("act", ["front"], 25.0)
    assert reply["camera_sizes"] == {"front": [96, 96]}
    assert reply["joint_names"] == ["Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw"]
    assert reply["requirements"]["chunk"] == 20
    # The robot's program derives the unit from the range of the actions in training.
    low, high = reply["requirements"]["action_range"]
    assert (len(low), high[3], round(low[2], 1)) == (6, 100.0, -76.8)
    assert server.load.loads == []


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"camera_names": ["top"]}, ["lacks ['front']"]),
        ({"policy_type": "diffusion", "camera_names": []}, ["is of type 'act'", "lacks ['front']"]),
        ({"rate": 400}, ["at most 200"]),
        ({"joint_names": ["a", "b"]}, ["joint_names of the request are 2"]),
    ],
)
async def test_all_misfits_are_reported_as_at_creation(server, wish, words):
    status, reply = await server.call("POST", "/policies/check", json=DEMO | wish)
    assert (status, reply["fits"], reply["rate"], len(reply["misfits"])) == (200, False, None, len(words))
    for text, word in zip(reply["misfits"], words, strict=True):
        assert word in text


async def test_folder_without_a_policy_is_refused_by_name(server):
    status, reply = await server.call("POST", "/policies/check", json={"policy_path": "tests/unit/service"})
    assert (status, reply["detail"][0]["loc"], reply["detail"][0]["type"]) == (422, ["body", "policy_path"], "policy")
    assert "config.json" in reply["detail"][0]["msg"] or "model.safetensors" in reply["detail"][0]["msg"]
    assert "policy 'tests/unit/service' cannot be used" in reply["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("path", "shown", "hidden"),
    [
        ("nowhere/to/policy", "policy 'nowhere/to/policy' cannot be used", "<policy_path>"),
        ("/nowhere/" + "x" * 300, "/nowhere/" + "x" * 191 + "...", "x" * 192),
        ("nowhere/a\x1b[31mb", r"nowhere/a\x1b[31mb", "\x1b"),
        ("https://me:hunter2@models.example/act", "***@models.example/act", "hunter2"),
        ("me:hunter2@models.example/act", "***@models.example/act", "hunter2"),
        ("/nowhere/hf_abcdefghijklmnop", "/nowhere/hf_***", "abcdefgh"),
    ],
)
async def test_errors_show_sent_values_without_secrets(server, path, shown, hidden):
    _, reply = await server.call("POST", "/policies/check", json={"policy_path": path})
    text = reply["detail"][0]["msg"]
    assert shown in text
    assert hidden not in text


async def test_camera_with_any_name_is_renamed(server, tmp_path):
    camera = "/cam/Top caméra:0"
    folder = shutil.copytree(DEMO["policy_path"], tmp_path / "policy")
    for file in ("config.json", "policy_preprocessor.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace("images.front", f"images.{camera}"))
    (statistics,) = folder.glob("policy_preprocessor*.safetensors")
    tensors = {name.replace("images.front", f"images.{camera}"): x for name, x in load_file(statistics).items()}
    save_file(tensors, statistics)
    policy = {"policy_path": str(folder)}
    _, reply = await server.call("POST", "/policies/check", json=policy)
    assert (reply["fits"], reply["camera_names"]) == (False, [camera])
    (text,) = reply["misfits"]
    assert text.startswith(f'camera_names lacks {[camera]}; send rename {{"{camera}": ...}}')
    _, reply = await server.call("POST", "/policies/check", json=policy | {"camera_names": ["front"]})
    assert "send rename" in reply["misfits"][0]
    _, reply = await server.call("POST", "/policies/check", json=policy | {"rename": {camera: "front"}})
    assert (reply["fits"], reply["camera_names"]) == (True, ["front"])
    for wrong in ({camera: camera}, {"": "front"}):
        assert (await server.call("POST", "/policies/check", json=policy | {"rename": wrong}))[0] == 422
    _, reply = await server.call("POST", "/policies/check", json=policy | {"rename": {"Topcam": "front"}})
    assert "rename Topcam=front names no camera of the policy" in reply["detail"][0]["msg"]
    assert camera in reply["detail"][0]["msg"]


async def test_check_accepts_exactly_the_fields_of_a_session(server):
    wish = DEMO | {"session_id": "arm", "transport_server_url": "direct", "dry_run": True}
    status, reply = await server.call("POST", "/policies/check", json=wish | {"max_relative_target": {"Jaw": 1.0}})
    assert (status, reply["fits"]) == (200, True), reply
    _, reply = await server.call("POST", "/policies/check", json=wish | {"max_relative_target": {"Jaws": 1.0}})
    assert (reply["fits"], "Jaws" in reply["misfits"][0]) == (False, True)
    status, reply = await server.call("POST", "/policies/check", json=wish | {"max_relative_traget": 1.0})
    assert (status, reply["detail"][0]["loc"]) == (422, ["body", "max_relative_traget"])
    assert "did you mean 'max_relative_target'?" in reply["detail"][0]["msg"]


async def test_bug_of_a_reader_shows_only_the_type_of_its_error(server, monkeypatch):
    def fail(path: str, revision: str | None):
        raise RuntimeError("token hf_abc in /root")

    monkeypatch.setattr(server.app.ctx.policy_reader, "_read", fail)
    status, reply = await server.call("POST", "/policies/check", json=DEMO)
    assert status == 422
    assert "RuntimeError" in str(reply)
    assert "hf_abc" not in str(reply)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree("robojax/sim/policy", tmp_path / "policy", copy_function=shutil.copyfile))


async def test_policy_without_joint_names_fits_with_sent_names(server, demo):
    (demo / "robojax.json").write_text('{"rate": 25}')
    status, answer = await server.call("POST", "/policies/check", json={"policy_path": str(demo)})
    assert (status, answer["fits"], answer["joint_names"]) == (200, False, None)
    (text,) = answer["misfits"]
    assert "send 6 names in the order of the policy's actions" in text
    assert "robojax.json" in text
    asked = {"policy_path": str(demo), "joint_names": NAMES[::-1]}
    status, answer = await server.call("POST", "/policies/check", json=asked)
    assert (status, answer["fits"], answer["joint_names"][0]) == (200, True, "Jaw")


async def test_policy_without_statistics_is_refused_by_name(server, demo):
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        values = json.loads((demo / name).read_text())
        for step in values["steps"]:
            if "normalizer" in step["registry_name"]:
                step["config"]["features"] = {}
                del step["state_file"]
        (demo / name).write_text(json.dumps(values))
    status, answer = await server.call("POST", "/policies/check", json={"policy_path": str(demo)})
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "policy_path"])
    text = answer["detail"][0]["msg"]
    assert "policy_preprocessor.json: feature 'observation.state' (type STATE, mode MEAN_STD)" in text
    assert "policy_postprocessor.json: feature 'action' (type ACTION, mode MEAN_STD) has no statistics" in text
    sidecar = json.loads((demo / "robojax.json").read_text()) | {"normalization": "identity"}
    (demo / "robojax.json").write_text(json.dumps(sidecar))
    status, answer = await server.call("POST", "/policies/check", json={"policy_path": str(demo)})
    assert (status, answer["fits"]) == (200, True)
