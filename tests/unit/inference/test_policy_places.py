import logging
import os

import pytest

from jaxmodels import PolicyFolder
from jaxmodels.errors import CheckpointError
from service.errors import InvalidRequest, PolicyError
from service.inference.policy_sources import SourceRules, copy_roots
from tests.testing.doubles import ScriptedLoader
from tests.testing.rig import body, started


@pytest.fixture
def roots(tmp_path):
    """Return a root with policies and links into and out of it, and folders outside of the root."""
    for name in ("root/act", "root/sly", "outside/act"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "outside/act/model.safetensors").write_text("x")
    (tmp_path / "root/sly/model.safetensors").symlink_to(tmp_path / "outside/act/model.safetensors")
    (tmp_path / "root/out").symlink_to(tmp_path / "outside/act")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root/loop")
    (tmp_path / "in").symlink_to(tmp_path / "root/act")
    (tmp_path / "root-2").mkdir()
    return tmp_path


def refused(rules, path):
    with pytest.raises(InvalidRequest) as caught:
        rules.check(str(path))
    return str(caught.value)


def test_a_folder_inside_a_root_is_allowed_directly_or_by_a_link(roots):
    rules = SourceRules([roots / "root"])
    for path in ("root", "root/act", "in", "root/../root/act", "root/act/"):
        rules.check(str(roots / path))
    refused(SourceRules([roots / "later"]), roots)


def test_other_paths_are_refused_with_one_message(roots):
    rules = SourceRules([roots / "root"])
    inside = ("root/out", "root/sly", "root/loop", "root/../outside/act", "root/act/config.json", "root/nowhere")
    paths = [roots / name for name in ("outside/act", "root-2", *inside)]
    paths += [roots, "/", "~", "~unknown-user", "../root/act", "someone/arm", "x" * 5000, "a\0b", "\udcff", ""]
    texts = {refused(rules, path) for path in paths}
    assert len(texts) == 1
    assert "policy_roots" in texts.pop()


def test_only_repos_of_allowed_owners_are_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = SourceRules(owners=["LeRobot"])
    rules.check("lerobot/act_aloha")
    refs = ("other/act", "lerobot", "lerobot/a/b", "lerobot/..", "lerobot/", "/lerobot/a", "lerobot/a b", "lérobot/a")
    for name in refs:
        refused(rules, name)
    (tmp_path / "lerobot/act_aloha").mkdir(parents=True)  # A local folder of this name takes precedence.
    refused(rules, "lerobot/act_aloha")


@pytest.mark.parametrize("revision", ["refs/pr/7", "pr/7", "REFS/PR/7", "refs/convert/x"])
async def test_pull_requests_to_an_allowed_owner_are_refused(revision):
    new = body(policy_path="lerobot/act")
    shadow = {"shadow_policy_path": "lerobot/act", "shadow_revision": revision}
    async with started(policy_owners=("lerobot",)) as server:
        for path, sent, field in (
            ("/sessions", new | {"revision": revision}, "revision"),
            ("/sessions", new | shadow, "shadow_revision"),
            ("/sessions", new | {"revision": "main"}, None),
            ("/sessions/arm/policy", {"revision": revision}, "revision"),
            ("/policies/check", {"policy_path": "lerobot/act", "revision": revision}, "revision"),
        ):
            status, answer = await server.call("POST", path, json=sent)
            expected = (200, None) if field is None else (422, ["body", field])
            assert (status, field and answer["detail"][0]["loc"]) == expected, (path, answer)
    assert len(server.load.loads) == 1
    SourceRules(is_open=True).check("lerobot/act", revision=revision)


def test_an_open_server_accepts_any_path_until_a_rule_is_configured(tmp_path):
    SourceRules(is_open=True).check(str(tmp_path))
    refused(SourceRules(owners=["a"], is_open=True), tmp_path)
    refused(SourceRules(), tmp_path)


def test_pickles_and_code_are_named_in_the_log_and_ignored(roots, caplog):
    for name in ("weights.bin", "old.pt", "modeling.py"):
        (roots / "root/act" / name).touch()
    with caplog.at_level(logging.INFO):
        SourceRules([roots / "root"]).check(str(roots / "root/act"))
    assert "modeling.py, old.pt, weights.bin" in caplog.text


def test_loading_checks_the_path_again_except_for_updates(roots):
    load = SourceRules([roots / "root"]).guard_loader(ScriptedLoader())
    policy = load(str(roots / "root/act"))
    load(str(roots / "outside/act"), like=policy)
    with pytest.raises(PolicyError, match="policy_roots"):
        load(str(roots / "outside/act"))


@pytest.mark.parametrize("field", ["policy_path", "shadow_policy_path"])
async def test_a_refused_path_is_422_at_its_field_without_the_path(roots, field):
    allowed = {"policy_path": str(roots / "root/act")}
    async with started(policy_roots=(str(roots / "root"),)) as server:
        status, answer = await server.create(**allowed | {field: str(roots / "root/out")})
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", field])
        assert "--policy-roots" in str(answer)
        assert os.fspath(roots) not in str(answer)
        assert not server.load.loads
        assert (await server.create(**allowed))[0] == 200


def test_an_update_is_opened_only_inside_the_hub_cache(roots):
    repo = roots / "models--lab--act"
    (repo / "snapshots/abc").mkdir(parents=True)
    (roots / "root/act/config.json").rename(repo / "blob")
    (repo / "snapshots/abc/config.json").symlink_to("../../blob")
    with PolicyFolder(repo / "snapshots/abc", roots=copy_roots(repo / "snapshots/abc")) as opened:
        assert set(opened.descriptors) == {"config.json"}
    with pytest.raises(CheckpointError, match="leads out"):
        PolicyFolder(roots / "root/sly", roots=copy_roots(roots / "root/sly"))


@pytest.mark.parametrize("name", ["model.safetensors", "odd name.json", "numbers.safetensors", "orbax"])
def test_a_link_that_leads_out_is_refused_for_any_file_name(roots, name):
    link = roots / "root/act" / name
    link.unlink(missing_ok=True)
    link.symlink_to(roots / "outside/act/config.json")
    refused(SourceRules([roots / "root"]), roots / "root/act")


async def test_a_public_server_loads_only_configured_paths(roots):
    async with started(host="0.0.0.0", insecure=True) as server:
        assert (await server.create(policy_path=str(roots / "root/act")))[0] == 422
