"""``robojax bench``: what there is to run, and what it says where something is missing or fails."""

from pathlib import Path

import pytest
import typer

from benchmarks.catalogue import ALL, Benchmark, wanted
from robojax.cli import bench

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "benchmarks.md"
HERE = [one for one in ALL if one.script.is_file()]


def test_every_benchmark_takes_the_arguments_that_the_catalogue_gives_it() -> None:
    for one in HERE:
        source = one.script.read_text()
        flags = {word for word in (*(one.quick or ()), *one.full, one.takes, "--output") if str(word).startswith("--")}
        assert {flag for flag in flags if f'"{flag}"' not in source} == set(), one.name


def test_the_docs_name_every_benchmark() -> None:
    assert [one.name for one in HERE if f"`{one.name}`" not in DOCS.read_text()] == []


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="nobody"):
        wanted(["nobody"])
    with pytest.raises(typer.Exit) as ended:
        bench._select_benchmarks(["nobody"], quick=False)
    assert ended.value.exit_code == 2


def test_without_a_checkout_it_says_what_to_do(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    with pytest.raises(typer.Exit) as ended:
        bench.bench([], page_only=True, into=tmp_path)
    assert ended.value.exit_code == 2
    assert "git clone" in capsys.readouterr().err


def test_one_that_fails_is_named_with_what_it_said_and_the_page_is_written(tmp_path: Path, monkeypatch, capfd) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys; print('no such policy'); sys.exit(3)")

    monkeypatch.setattr(Benchmark, "script", script)
    one = Benchmark("broken", "Does it work?", "It does not.", (0.01, 0.01), quick=())
    monkeypatch.setattr(bench, "_select_benchmarks", lambda names, quick: [one])
    with pytest.raises(typer.Exit) as ended:
        bench.bench([], quick=True, into=tmp_path / "out")
    assert ended.value.exit_code == 1
    assert "no such policy" in capfd.readouterr().err
    assert (tmp_path / "out" / "index.html").is_file()


def test_what_only_compares_is_left_out_without_its_peer(capsys) -> None:
    compares = next(one for one in ALL if not one.is_peerless)
    assert bench._filter_possible([compares, ALL[0]], {"--openpi-python": None, "--lerobot-python": None}) == [ALL[0]]
    assert "--openpi-python" in capsys.readouterr().err
