"""The settings, metrics, labels, stages and routes of the operator's guide exist."""

import re
import tomllib
from pathlib import Path

from service.api.blueprint import ROUTES
from service.settings import Settings
from service.stage import Stage

GUIDE = (Path(__file__).parents[3] / "docs" / "operate" / "operating.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_settings_file_of_the_guide_is_valid() -> None:
    (text,) = blocks("toml")
    found = tomllib.loads(text)
    settings = Settings.from_values(**found)
    assert (settings.webhooks.state, settings.logging.log_format) == ("/var/lib/robojax", "json")


async def test_alarms_of_the_guide_use_existing_metrics(server) -> None:
    async with server.http.get("/metrics") as answer:
        text = await answer.text()
    families = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    alarms = "\n".join(blocks("yaml"))
    for name in re.findall(r"\b(robojax_\w+)", alarms):
        assert name.removesuffix("_bucket") in families, name
    (stages,) = re.findall(r'stage=~"([^"]+)"', alarms)
    assert set(stages.split("|")) <= {str(stage) for stage in Stage}


def test_routes_of_the_guide_exist() -> None:
    routes = {f"{route.method} {route.path}" for route in ROUTES}
    for method, path in re.findall(r"`(GET|DELETE|POST) (/\S+?)`", GUIDE):
        assert f"{method} {path}" in routes


def test_commands_of_the_guide_exist() -> None:
    from robojax.cli.app import Commands

    names = set(Commands(name="robojax").list_commands(None))  # pyright: ignore[reportArgumentType]
    for name in re.findall(r"(?:^|bin/)robojax ([a-z]+)", GUIDE, re.MULTILINE):
        assert name in names, name
