"""What the settings say of several hosts."""

from pathlib import Path
from typing import Any

import pytest

from service.distributed.host_coordinator import HostOptions, read_address, read_host_options
from service.setting_types import SettingsError
from service.settings import Settings, load_settings


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("sixteen letters!\n")
    path.chmod(0o600)
    return path


def settings(secret: Path, **more: Any) -> Settings:
    asked: dict[str, Any] = {"devices": ("all",), "placement": "shard", "hosts_count": 2}
    asked |= {"hosts_address": "10.0.0.1:8470", "hosts_secret_file": str(secret)}
    return Settings.from_values(**(asked | more))


def options_of(settings: Settings) -> HostOptions | None:
    return read_host_options(settings.hosts, settings.policies)


def test_one_host_needs_nothing() -> None:
    assert options_of(Settings()) is None


def test_the_coordinator_is_on_the_next_port_or_somewhere_else_or_found_by_jax(secret: Path) -> None:
    options = options_of(settings(secret))
    assert options is not None
    assert (options.count, options.host, options.port, options.coordinator) == (2, "10.0.0.1", 8470, "10.0.0.1:8471")
    assert options.secret == b"sixteen letters!"
    coordinators = [options_of(settings(secret, hosts_coordinator=said)) for said in ("10.0.0.2:99", "auto")]
    assert [found and found.coordinator for found in coordinators] == ["10.0.0.2:99", None]


def test_addresses_may_be_of_the_new_kind() -> None:
    assert read_address("hosts_address", "[fd00::1]:8470") == ("[fd00::1]", 8470)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hosts_address": None}, "hosts_address: found None; wanted ADDRESS:PORT"),
        ({"hosts_address": "10.0.0.1"}, "wanted ADDRESS:PORT"),
        ({"hosts_address": "0.0.0.0:8470"}, "wanted an address that other hosts reach"),
        ({"hosts_coordinator": "here"}, "hosts_coordinator: found 'here'"),
        ({"hosts_secret_file": None}, "hosts_secret_file: found none"),
        ({"hosts_secret_file": "/no/such/file"}, "cannot be read"),
    ],
)
def test_what_is_missing_is_said(secret: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        options_of(settings(secret, **more))


def test_a_secret_is_long_and_for_its_owner_only(secret: Path) -> None:
    secret.write_text("short")
    with pytest.raises(SettingsError, match="has 5 characters; wanted 16 or more"):
        options_of(settings(secret))
    secret.chmod(0o640)
    with pytest.raises(SettingsError, match="others may read or change"):
        options_of(settings(secret))


def test_hosts_are_for_policies_that_are_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"hosts_count \(flag --hosts-count\): found 2; wanted --devices all"):
        load_settings({"hosts_count": "2", "devices": "all"})
