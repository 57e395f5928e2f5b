"""Settings of a cluster, and the error if Ray or asyncpg is not installed."""

import sys

import pytest

import service.api
from service.app import create_app
from service.setting_types import SettingsError
from service.settings import Settings, load_settings


@pytest.mark.parametrize("engine", ["local", "ray-local", "ray-auto", "ray://10.0.0.5:10001"])
def test_each_location_of_engines_is_accepted(engine: str) -> None:
    assert load_settings({"engine": engine}).cluster.engine == engine


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": "ray"}, "wanted local, ray-local, ray-auto or ray://HOST:PORT"),
        ({"engine": "ray://user@host:1"}, "wanted local, ray-local"),
        ({"engine": "ray-local\n"}, "wanted local, ray-local"),
        ({"engines": "3", "engines_most": "2"}, "found 3 and 2; wanted engines <= engines_most"),
        ({"engine_resources": "GPU"}, "wanted NAME=AMOUNT with commas between, not 'GPU'"),
        ({"engine_resources": "GPU=0"}, "greater than 0"),
        ({"front_name": "lab-1"}, "found without database; wanted --database postgresql://... for all servers"),
        ({"database": "mysql://ann:secret@db/robojax"}, "found another value; wanted postgresql://USER@HOST:PORT/NAME"),
        ({"front_url": "http://10.0.0.5:8001/api"}, "without a path"),
        ({"front_url": "ftp://10.0.0.5"}, "wanted http://HOST:PORT"),
    ],
)
def test_an_invalid_setting_names_the_accepted_values(flags: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("://", ".*")):
        load_settings(flags)


def test_resources_are_read_from_a_flag() -> None:
    assert load_settings({"engine_resources": "TPU=4, CPU=8"}).cluster.engine_resources == {"TPU": 4.0, "CPU": 8.0}


@pytest.mark.parametrize(
    ("driver", "settings", "message"),
    [
        (
            "asyncpg",
            {"database": "postgresql://db/robojax"},
            r"database: PostgreSQL needs asyncpg.*pip install -e '\.\[postgres\]'",
        ),
        ("ray", {"engine": "ray-local"}, r"engine: ray-local needs Ray .*pip install -e '\.\[ray\]'"),
    ],
)
def test_a_missing_driver_is_named(driver, settings, message, monkeypatch) -> None:
    # Modules that import a driver are removed so that they are imported again, and restored after the test.
    for parent, module in ((service, "distributed"), (service.api, "redirects")):
        if module in vars(parent):
            monkeypatch.setattr(parent, module, vars(parent)[module])
        for name in [name for name in sys.modules if name.startswith(f"{parent.__name__}.{module}")]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(SettingsError, match=message):
        create_app(Settings.from_values(**settings, state="off"))
