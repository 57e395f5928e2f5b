"""Tables with names from untrusted sources."""

from typing import Literal

import pytest
import typer

from robojax.cli.app import print_table, show_findings
from service.doctor import Finding


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("name", ["[red]arm[/red]", "[/]", "arm :robot:", r"\[bold]"])
def test_name_is_shown_without_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("session", "status"), [(name, "running")])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.split("  ")[0].strip() == name, row


def test_wide_cells_are_folded_and_ids_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "url"), [("a" * 30, "b" * 30)], never_folded=("id",))
    out = capsys.readouterr().out
    assert "a" * 30 in out
    assert "b" * 30 not in out
    assert out.count("b") == 30, "all characters are shown"


LEVELS: tuple[Literal["ok", "warn", "fail"], ...] = ("ok", "warn", "fail")
FINDINGS = [Finding(f"thing [{level}]", level, "found", "" if level == "ok" else "mend it") for level in LEVELS]


def test_failed_finding_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        show_findings(FINDINGS, as_json=False)
    assert ended.value.exit_code == 1
    out = capsys.readouterr().out
    assert "1 of 3 need repair" in out
    assert "thing [fail]" in out
