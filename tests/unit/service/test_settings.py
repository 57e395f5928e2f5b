import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.sessions.request import ADJUSTABLE, SessionRequest
from service.setting_types import Mark, SettingsError
from service.settings import FIELDS, GROUPS, PREFIX, Settings, load_settings, unknown_variables
from tools.settings_page import session_fields_page, settings_page

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Return a folder and remove all settings from the environment."""
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "robojax.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def error_of(flags=None, file=None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, file)
    return str(caught.value)


def test_flags_override_the_environment_the_file_and_defaults(monkeypatch):
    assert load_settings().server.port == 8001
    write("port = 1111\nrate = 50\nmax_sessions = 3")
    assert load_settings().server.port == 1111
    monkeypatch.setenv("ROBOJAX_PORT", "2222")
    monkeypatch.setenv("ROBOJAX_RATE", "30")
    settings = load_settings({"port": "3333", "rate": None})
    assert (settings.server.port, settings.control.rate, settings.limits.max_sessions) == (3333, 30.0, 3)


def test_the_file_comes_from_a_flag_a_variable_or_the_folder(monkeypatch):
    for number, name in enumerate(("robojax.toml", "two.toml", "three.toml"), 1):
        write(f"port = {number}", name)
    assert load_settings().server.port == 1
    monkeypatch.setenv("ROBOJAX_CONFIG", "two.toml")
    assert load_settings().server.port == 2
    assert load_settings(file=Path("three.toml")).server.port == 3


def test_lists_and_tables_have_a_form_for_each_source(monkeypatch):
    write('ice_servers = ["stun:a", "stun:b"]\n[joint_ranges]\nhip = [-10, 20.5]')
    settings = load_settings()
    assert settings.transport.ice_servers == ("stun:a", "stun:b")
    assert settings.control.joint_ranges == {"hip": (-10.0, 20.5)}
    monkeypatch.setenv("ROBOJAX_ICE_SERVERS", "stun:c, stun:d")
    settings = load_settings({"joint_ranges": '{"knee": [0, 1]}'})
    assert settings.transport.ice_servers == ("stun:c", "stun:d")
    assert settings.control.joint_ranges == {"knee": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"port": "abc"}, "port (flag --port): found 'abc'; wanted a valid integer"),
        ({"port": "65536"}, "port (flag --port): found '65536'; wanted less than or equal to 65535"),
        ({"rate": "nan"}, "rate (flag --rate): found 'nan'; wanted a finite number"),
        ({"dtype": "int4"}, "dtype (flag --dtype): found 'int4'; wanted 'float32', 'bfloat16', 'int8', 'fp8'"),
        ({"joint_ranges": "{"}, "joint_ranges (flag --joint-ranges): found '{'; wanted JSON"),
        ({"joint_ranges": '{"a": [2, 1]}'}, "wanted low below high for a"),
        ({"joint_ranges": '{"a": [2, "x"]}'}, "joint_ranges.a.1 (flag --joint-ranges): found 'x'"),
        ({"frame_age_limit": "0"}, "frame_age_limit (flag --frame-age-limit): found '0'; wanted greater than 0"),
        ({"lerobot_allow": "10.0.0.5/24"}, "lerobot_allow (flag --lerobot-allow): found '10.0.0.5/24'; wanted"),
        ({"lerobot_tls_cert": "a.pem"}, "wanted all three files, or none"),
        ({"placement": "shard"}, "placement (flag --placement): found shard without devices"),
        ({"rate": "300"}, "rate (flag --rate) and max_rate (default): found 300 and 200; wanted rate <= max_rate"),
        (
            {"stop_after": 3},
            "degraded_after (default) and stop_after (flag --stop-after): found 3 and 3; wanted degraded_after < stop",
        ),
    ],
)
def test_an_invalid_value_is_reported_with_source_and_expectation(flags, text):
    assert text in error_of(flags)


def test_each_source_is_named(monkeypatch):
    write('port = "x"\nhots = "a"\ncolour = 1')
    monkeypatch.setenv("ROBOJAX_RATE", "-1")
    lines = error_of({"max_body": "none"}).splitlines()
    assert "port (robojax.toml port): found 'x'; wanted a valid integer, unable to parse string as an integer" in lines
    assert "rate (environment ROBOJAX_RATE): found '-1'; wanted greater than 0" in lines
    assert "hots (robojax.toml hots): no such setting; did you mean 'host'?" in lines
    assert any(line.startswith("max_body (flag --max-body)") for line in lines)
    assert any(line.startswith("colour (robojax.toml colour): no such setting; wanted one of") for line in lines)


def test_all_errors_are_reported_at_once():
    write("[control]\nrate = 50")  # A group is not a table of the file.
    lines = error_of({"rate": "300", "update_quiet": "301", "port": "x", "colour": 1}).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["port", "rate", "update_quiet", "control", "colour"]


def test_models_have_a_form_for_each_source(monkeypatch, nowhere):
    (nowhere / "odd@folder").mkdir()
    write('[models]\ndit = "some/folder"\nvq = "owner/name/transformer@v1"')
    assert load_settings().models.models == {"dit": ("some/folder", None), "vq": ("owner/name/transformer", "v1")}
    write('models = ["a=odd@folder"]')
    assert load_settings().models.models == {"a": ("odd@folder", None)}
    monkeypatch.setenv("ROBOJAX_MODELS", "a=one, b=two@abc")
    assert load_settings().models.models == {"a": ("one", None), "b": ("two", "abc")}
    flags = {"models": ["x.y-1=with, comma", "z=a=b"]}
    assert load_settings(flags).models.models == {"x.y-1": ("with, comma", None), "z": ("a=b", None)}


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (["folder"], "a path or a repo id after folder="),
        *(([f"{name}=folder"], "a name of 1 to 64 letters") for name in ("", "..", "a/b", "a\n")),
        (["a="], "a path or a repo id after a="),
        (["a=1", "b=2", "a=3"], "each name once, not a twice"),
        (5, "name=path or name=path@revision"),
        ({"a": 5}, "models.a"),
    ],
)
def test_invalid_models_are_refused(models, text):
    assert text in error_of({"models": models})
    assert "flag --models" in error_of({"models": models})


def test_a_file_that_cannot_be_read_is_an_error(monkeypatch):
    assert "config (flag --config): found no file 'nope.toml'" in error_of(file=Path("nope.toml"))
    write("port = = 1", "broken.toml")
    assert "config (broken.toml)" in error_of(file=Path("broken.toml"))
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "config (binary.toml)" in error_of(file=Path("binary.toml"))
    monkeypatch.setenv("ROBOJAX_CONFIG", "gone.toml")
    assert "environment ROBOJAX_CONFIG" in error_of()


def test_unknown_variables_are_reported_but_are_not_errors(monkeypatch):
    monkeypatch.setenv("ROBOJAX_PROT", "1")
    monkeypatch.setenv("ROBOJAX_SERVICE_HOST", "10.0.0.1")  # Kubernetes sets this variable for a service of this name.
    monkeypatch.setenv("ROBOJAX_PORT", "1")
    load_settings()
    assert unknown_variables() == ["ROBOJAX_PROT", "ROBOJAX_SERVICE_HOST"]


def test_every_setting_has_a_group_a_description_and_hides_secrets():
    names = [name for group in GROUPS.values() for name in group.model_fields]
    assert len(names) == len(set(names))
    assert all(FIELDS[name].description for name in names)
    assert GROUPS.keys() == Settings.model_fields.keys()
    values = Settings.from_values(state="/home/me", database="postgresql://me:pw@db/x", rate=25).public_values()
    assert values["rate"] == 25
    private = {name for name, field in FIELDS.items() if Mark.PRIVATE in field.metadata}
    assert values.keys() == FIELDS.keys() - private
    assert {"state", "database", "models", "keys_file"} <= private
    assert {name for name in FIELDS if name.endswith("_file")} <= private


# Replaces a group of settings by a group with one more field, without any other change.
SCRATCH = """
import os, sys
from pydantic import Field
from service.control import config
from service.setting_types import Seconds

class ControlSettings(config.ControlSettings):
    "Control loop"
    scratch_wait: Seconds = Field(default=1.5, description="Seconds that only this test waits")

config.ControlSettings = ControlSettings
from service.settings import load_settings
from tools.settings_page import settings_page

def value(**flags):
    return load_settings(flags).control.scratch_wait

print(value(), value(scratch_wait="4"), value(scratch_wait="4", rate="25"))
os.environ["ROBOJAX_SCRATCH_WAIT"] = "3"
print(value())
del os.environ["ROBOJAX_SCRATCH_WAIT"]
open("robojax.toml", "w").write("scratch_wait = 2")
print(value())
print(next(line for line in settings_page().splitlines() if "scratch" in line))
sys.argv = ["robojax", "serve", "--help-all"]
from robojax.cli import main
main()
"""


def test_a_new_field_of_a_group_is_a_complete_setting(nowhere):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    ran = subprocess.run([sys.executable, "-c", SCRATCH], env=environment, capture_output=True, text=True, check=True)
    defaults, variable, file, row, shown = ran.stdout.split("\n", 4)
    assert (defaults, variable, file) == ("1.5 4.0 4.0", "3.0", "2.0")
    assert row == ("| `--scratch-wait NUMBER` | `ROBOJAX_SCRATCH_WAIT` | `1.5` | Seconds that only this test waits |")
    assert "--scratch-wait" in shown
    assert "Seconds that only this test waits; default: 1.5" in shown


def test_the_generated_pages_match_the_classes():
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text() == settings_page(), "python -m tools.settings_page > docs/reference/settings.md"
    page = ROOT / "docs" / "reference" / "session_fields.md"
    command = "python -m tools.settings_page --session-fields > docs/reference/session_fields.md"
    assert page.read_text() == session_fields_page(), command
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == [field.name for field in dataclasses.fields(SessionRequest)]
    assert {row[0].strip("`") for row in rows if row[4] == "yes"} == set(ADJUSTABLE)
    (limit,) = (row for row in rows if row[0] == "`max_relative_target`")
    assert limit[1:4] == ["number or object of numbers by name", "above 0; each above 0", "`null`"]
