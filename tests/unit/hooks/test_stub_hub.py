"""The stub is driven by the real client and the real command, or nothing that is tested against it means anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download

from tests.testing.stub_hub import Receiver, StubHub


def test_the_real_client_and_command_manage_fetch_and_verify_and_a_push_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    with StubHub(token="hf_someone") as hub, Receiver() as receiver:
        api = HfApi(endpoint=hub.url, token="hf_someone")
        made = api.create_webhook(
            url=receiver.url, watched=[{"type": "model", "name": "someone/arm"}], secret="a secret"
        )
        sha = hub.push("someone/arm", {"model.safetensors": bytes(range(256)), "notes/a.txt": "a"})
        hub.settle()
        ((headers, payload),) = receiver.got
        assert (headers["x-webhook-secret"], payload.webhook.id) == ("a secret", made.id)
        assert payload.new_sha("main") == api.model_info("someone/arm").sha == sha
        folder = Path(snapshot_download("someone/arm", revision=sha, cache_dir=tmp_path, endpoint=hub.url))
        assert (folder / "model.safetensors").read_bytes() == bytes(range(256))
        checked = api.verify_repo_checksums("someone/arm", revision=sha, cache_dir=tmp_path)
        assert (checked.checked_count, checked.mismatches, checked.missing_paths) == (2, [], [])
        assert [ref.target_commit for ref in api.list_repo_refs("someone/arm").branches] == [sha]
        listed = subprocess.run(
            [str(Path(sys.executable).parent / "hf"), "webhooks", "ls", "--format", "json"],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_someone", "HF_HOME": str(tmp_path)}
            | {"HF_HUB_DISABLE_UPDATE_CHECK": "1"},
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert [webhook["id"] for webhook in json.loads(listed.stdout)] == [made.id]
