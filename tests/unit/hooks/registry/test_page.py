"""What the page about the registry shows is what there is."""

import re
from pathlib import Path

from hooks.registry.jobs import load_jobs

PAGE = (Path(__file__).parents[4] / "docs" / "operate" / "webhooks_registry.md").read_text()


def block(language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_jobs_on_the_page_are_read(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(block("toml"))
    assert load_jobs(tmp_path / "jobs.toml")["retrain"].secrets == ("HF_TOKEN",)
