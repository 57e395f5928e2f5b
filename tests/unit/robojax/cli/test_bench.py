"""``robojax bench``: what there is to run, what a page says, and what it says where there is nothing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer

from benchmarks import report
from benchmarks.catalogue import ALL, FOLDER, Benchmark, wanted
from robojax.cli import bench

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "benchmarks.md"
HERE = [one for one in ALL if one.script.is_file()]


class Page(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        named = [given.get(name) or "#" for name in ("src", "href")]
        self.fetched += [address for address in named if not address.startswith("#")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_every_benchmark_takes_the_arguments_that_the_catalogue_gives_it(one: Benchmark) -> None:
    source = one.script.read_text()
    flags = {word for word in (*(one.quick or ()), *one.full, one.takes, "--output") if str(word).startswith("--")}
    assert {flag for flag in flags if f'"{flag}"' not in source} == set()


@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_results_that_the_checkout_has_are_answered_in_a_sentence(one: Benchmark) -> None:
    path = FOLDER / "results" / f"{one.name}.json"
    if one.answer.__name__ == "<lambda>" or not path.is_file():
        pytest.skip("nothing to say, or not measured yet")
    assert re.search(r"\d", one.answered(json.loads(path.read_text())))


def test_results_of_another_shape_have_no_answer_and_are_no_error() -> None:
    assert {one.answered({"cases": [], "rows": 3}) for one in ALL} == {""}


def test_the_docs_name_every_benchmark() -> None:
    assert [one.name for one in HERE if f"`{one.name}`" not in DOCS.read_text()] == []


def test_a_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    one = ALL[0]
    found = {
        "is_quiet": False,
        "note": "<script>alert(1)</script>",
        "cases": {"a & b": {"stages_ms": {"video": {"p50": 1.25, "p99": 2.0}}, "deep": {"x": {"p50": 3.0}}}},
        "rows": [{"name": "<b>", "value": 1.5, "samples": [1, 2]}],
        "machine": {"cores": 2},
    }
    (tmp_path / f"{one.name}.json").write_text(json.dumps(found))
    (tmp_path / f"{one.name}.png").write_bytes(b"\x89PNG")
    collected = report.collect([one, ALL[1]], [tmp_path])
    text = report.page(collected)
    page = Page(text)
    assert page.open == []
    assert all(address.startswith("data:image/png;base64,") for address in page.fetched)
    assert len(page.fetched) == 1
    assert "<script" not in text
    assert "url(" not in text
    for shown in ("<script>alert(1)</script>", "busy machine", "a & b", "1.25", "Not measured yet", one.question):
        assert shown in page.text
    assert "[1, 2]" not in page.text


def test_the_first_folder_that_has_a_result_wins(tmp_path: Path) -> None:
    one = ALL[0]
    for place in ("mine", "shipped"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{one.name}.json").write_text(json.dumps({"note": place}))
    folders = [tmp_path / "none", tmp_path / "mine", tmp_path / "shipped"]
    assert [found.result for found in report.collect([one], folders)] == [{"note": "mine"}]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="nobody"):
        wanted(["nobody"])
    with pytest.raises(typer.Exit) as ended:
        bench._chosen(["nobody"], quick=False)
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
    monkeypatch.setattr(bench, "_chosen", lambda names, quick: [one])
    with pytest.raises(typer.Exit) as ended:
        bench.bench([], quick=True, into=tmp_path / "out")
    assert ended.value.exit_code == 1
    assert "no such policy" in capfd.readouterr().err
    assert (tmp_path / "out" / "index.html").is_file()


def test_what_only_compares_is_left_out_without_its_peer(capsys) -> None:
    compares = next(one for one in ALL if not one.is_peerless)
    assert bench._possible([compares, ALL[0]], {"--openpi-python": None, "--lerobot-python": None}) == [ALL[0]]
    assert "--openpi-python" in capsys.readouterr().err
