import json
import re
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from service import doctor
from service.auth.caller import Role
from service.auth.keys import KeyFile
from service.doctor import Finding, diagnose
from service.settings import Settings, load_settings

ROBOT_PACKAGES = doctor._robot_packages


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    """Omit the checks that start other processes."""
    for name in ("_devices", "_rendering", "_robot_packages"):
        monkeypatch.setattr(doctor, name, lambda name=name: Finding(name, "ok", "left out"))


def found(name: str, **settings) -> Finding:
    return next(finding for finding in diagnose(Settings.from_values(**settings)) if finding.name == name)


def test_each_finding_that_is_not_ok_has_a_fix():
    findings = diagnose(Settings.from_values(port=0, host="0.0.0.0", compile_cache="off"))
    assert [finding.name for finding in findings] == [
        *("Python", "packages", "_devices", "_rendering", "video codecs", "port", "keys", "state folder", "recording"),
        *("_robot_packages", "serial ports (for robojax robot)", "compile cache", "Hub cache"),
    ]
    for finding in findings:
        assert finding.found
        assert bool(finding.fix) == (finding.level != "ok")


def test_occupied_port_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert found("port", port=port).level == "fail"
    assert found("port", port=0).level == "ok"


def test_running_robojax_server_is_ok(monkeypatch, serve):
    monkeypatch.delenv("ROBOJAX_KEY", raising=False)
    with serve() as (_, url):
        finding = found("port", port=int(url.rpartition(":")[2]))
        assert (finding.level, finding.fix) == ("ok", "")
        assert f"your robojax server runs at {url} (robojax {version('robojax')}; 0 sessions)" in finding.found
        monkeypatch.setenv("ROBOJAX_PORT", url.rpartition(":")[2])
        assert finding in diagnose(load_settings())


def test_robot_packages_are_imported(monkeypatch):
    monkeypatch.setattr(doctor, "_robot_packages", ROBOT_PACKAGES)
    name = "robot packages (for robojax robot)"
    monkeypatch.setattr(doctor, "_ROBOT_MODULES", ("json", "ast"))
    assert found(name, port=0) == Finding(name, "ok", "json, ast")
    monkeypatch.setattr(doctor, "_ROBOT_MODULES", ("json", "no_such_module"))
    finding = found(name, port=0)
    assert (finding.level, finding.found) == ("warn", "missing: no_such_module")
    assert "pip install -e '.[robot]'" in finding.fix


def test_serial_ports_are_listed_with_the_group_that_may_use_them(monkeypatch, tmp_path):
    name = "serial ports (for robojax robot)"
    monkeypatch.setattr(doctor, "_DEVICE_FOLDER", tmp_path)
    assert found(name, port=0).level == "warn"
    for port in ("ttyUSB1", "ttyACM0", "ttyS0"):
        (tmp_path / port).touch()
    assert found(name, port=0) == Finding(name, "ok", f"{tmp_path}/ttyACM0, {tmp_path}/ttyUSB1")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path.name != "ttyACM0")
    finding = found(name, port=0)
    assert (finding.level, finding.found) == ("warn", f"{tmp_path}/ttyACM0: this user may not read and write")
    assert f"usermod -aG {(tmp_path / 'ttyACM0').group()} $USER" in finding.fix


def test_public_address_needs_a_key(tmp_path):
    assert found("keys", port=0).level == "ok"
    assert found("keys", port=0, host="0.0.0.0").level == "fail"
    assert found("keys", port=0, host="0.0.0.0", insecure=True).level == "warn"
    KeyFile(tmp_path / "keys.json").create("ann", Role.OPERATOR, "ann", now=0.0)
    assert found("keys", port=0, host="0.0.0.0", state=str(tmp_path)).level == "ok"
    (tmp_path / "keys.json").write_text("{")
    assert found("keys", port=0, state=str(tmp_path)).level == "fail"


def test_cache_check_does_not_create_folders(tmp_path):
    expected = tmp_path / "deep" / "cache"
    assert str(expected) in found("compile cache", port=0, compile_cache=str(expected)).found
    assert not expected.parent.exists()
    assert found("Hub cache", port=0, policy_cache="/proc/nothing").level == "warn"
    for off in ("off", ""):
        assert found("compile cache", port=0, compile_cache=off).found == "off"


@pytest.mark.parametrize(("free", "level"), [(1e8, "fail"), (1e9, "warn"), (1e11, "ok")])
def test_disk_space_is_judged(monkeypatch, tmp_path, free, level):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    assert found("Hub cache", port=0, policy_cache=str(tmp_path)).level == level


def test_probe_that_crashes_or_hangs_is_explained(monkeypatch):
    assert doctor._run("import sys; sys.exit('no such driver')", {})[0] == "no such driver"
    assert doctor._run("import os; os.kill(os.getpid(), 9)", {})[0] == "exit code -9"
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.2)
    assert doctor._run("import time; time.sleep(60)", {})[0] == "no answer in 0.2 s"


def test_doctor_reports_all_findings_and_exits_with_1_on_failure(robojax):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = robojax("doctor", "--json", "--port", str(other.getsockname()[1]), timeout=110)
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 1
    assert (findings["port"]["level"], findings["Python"]["level"]) == ("fail", "ok")
    assert findings["JAX devices"]["level"] in ("ok", "warn")
    assert re.search("cpu|cuda", findings["JAX devices"]["found"])
    assert Path(findings["compile cache"]["found"].split(",")[0]).name == "xla"
