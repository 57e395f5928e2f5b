"""The report page: every question, its answer, its picture and its figures, in one file that needs nothing else.

    python benchmarks/report.py --output report.html

Results are read from the folders given, the first that has one wins; by default those of the repository.
"""

import argparse
import base64
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.catalogue import Benchmark, wanted
from benchmarks.measured import RESULTS, machine

STYLE = Path(__file__).with_name("report.css")
# Said elsewhere on the page, or of no use in a table.
APART = ("question", "command", "at", "machine", "log", "is_quiet", "bare_loop_lateness_ms")
MOST_ROWS, MOST_COLUMNS = 40, 9


@dataclass(frozen=True)
class Found:
    """One benchmark's results; of one that was not run there are none.

    Attributes:
        picture: beside the results, if there is one.
    """

    benchmark: Benchmark
    result: Mapping[str, Any] | None
    picture: Path | None = None


def collect(benchmarks: Sequence[Benchmark], folders: Sequence[Path]) -> list[Found]:
    """Results of each, from the first folder that has them."""
    found = []
    for one in benchmarks:
        path = next((path for folder in folders if (path := folder / f"{one.name}.json").is_file()), None)
        picture = None if path is None else path.with_suffix(".png")
        has_picture = picture is not None and picture.is_file()
        result = None if path is None else json.loads(path.read_text())
        found.append(Found(one, result, picture if has_picture else None))
    return found


def page(found: Sequence[Found]) -> str:
    """The whole document."""
    here = machine()
    versions = ", ".join(f"{name} {value}" for name, value in here["versions"].items())
    facts = [here["processor"], f"{here['cores']} cores", f"{here['memory_gb']:g} GB", here["accelerator"]]
    where = ", ".join(filter(None, map(str, filter(None, facts))))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    known = [one for one in found if one.result is not None]
    missing = [one.benchmark for one in found if one.result is None]
    rows = "".join(
        f'<tr><td><a href="#{one.benchmark.name}">{_text(one.benchmark.question)}</a></td><td>{_answer(one)}</td></tr>'
        for one in known
    )
    left = "".join(f"<li>{_text(one.question)} <code>robojax bench {one.name}</code></li>" for one in missing)
    not_run = f"<section><h2>Not measured yet</h2><ul>{left}</ul></section>" if missing else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>robojax benchmarks</title><style>{STYLE.read_text()}</style></head><body><main>"
        f"<header><h1>robojax benchmarks</h1><p>Made on {now}, on {_text(where)}, Python {here['python']}; "
        f"{_text(versions)}. Each section says when and where its own figures were measured.</p>"
        '<p class="legend"><span class="quiet">quiet machine</span> bare loops, which do nothing but wait, were on '
        'time: milliseconds count. <span class="busy">busy machine</span> they were not: only ratios within it do.</p>'
        '</header><section><h2>Answers</h2><div class="wide"><table class="answers">'
        f"<tbody>{rows}</tbody></table></div></section>{''.join(map(_section, known))}{not_run}</main></body></html>\n"
    )


def _section(one: Found) -> str:
    result, benchmark = one.result or {}, one.benchmark
    picture = ""
    if one.picture is not None:
        data = base64.b64encode(one.picture.read_bytes()).decode()
        picture = f'<img alt="{_text(benchmark.question)}" src="data:image/png;base64,{data}">'
    facts, tables = {}, []
    for name, value in result.items():
        if name not in APART and not isinstance(value, dict | list):
            facts[name] = value
    for title, table in tables_of({name: value for name, value in result.items() if name not in APART}):
        tables.append(f"<h4>{_text(title)}</h4>{_table(table)}" if title else _table(table))
    listed = "".join(f"<dt>{_text(_words(name))}</dt><dd>{_cell(value)}</dd>" for name, value in facts.items())
    return (
        f'<section id="{benchmark.name}"><h2>{_text(benchmark.question)} {_badge(result)}</h2>'
        f'<div class="answer">{_answer(one)}</div><p class="reading">{_text(benchmark.reading)}</p>{picture}'
        + (f"<dl>{listed}</dl>" if listed else "")
        + f"<details{'' if picture else ' open'}><summary>All figures</summary>{''.join(tables)}</details>"
        + f'<p class="how">{_text(_where(result))}<br><code>robojax bench {benchmark.name}</code></p></section>'
    )


def _answer(one: Found) -> str:
    """Its sentence, or a list of them."""
    parts = one.benchmark.answered(one.result or {}).split("; ")
    return _text(parts[0]) if len(parts) == 1 else f"<ul>{''.join(f'<li>{_text(part)}</li>' for part in parts)}</ul>"


def _badge(result: Mapping[str, Any]) -> str:
    is_quiet = result.get("is_quiet")
    if is_quiet is None:
        return ""
    return '<span class="quiet">quiet machine</span>' if is_quiet else '<span class="busy">busy machine</span>'


def _where(result: Mapping[str, Any]) -> str:
    """When and where it was measured, as far as the results say."""
    told = result.get("machine") or {}
    parts = [result.get("at"), told.get("accelerator"), told.get("processor") or told.get("device")]
    cores = told.get("cores") or told.get("cpus")
    parts += [f"{cores} cores" if cores else None, f"Python {told['python']}" if "python" in told else None]
    parts += [f"{name} {value}" for name, value in (told.get("versions") or {}).items() if name != "robojax"]
    return ", ".join(str(part) for part in parts if part) or "where and when is not in the results"


# Tables of whatever a benchmark found.

Table = tuple[list[str], list[list[Any]]]


def tables_of(found: Mapping[str, Any], title: str = "") -> Iterator[tuple[str, Table]]:
    """Every table in these results, with its title: maps of maps, and lists of maps."""
    for name, value in found.items():
        path = f"{title}, {_words(name)}" if title else _words(name)
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            rows = [_flat(row) for row in value]
            columns = list(dict.fromkeys(column for row in rows for column in row))[:MOST_COLUMNS]
            cells = [[row.get(column) for column in columns] for row in rows]
            yield path, (columns, cells[:MOST_ROWS])
        elif isinstance(value, dict) and value:
            flat = {key: _flat(one) if isinstance(one, dict) else {"": one} for key, one in value.items()}
            columns = list(dict.fromkeys(column for row in flat.values() for column in row))
            if len(columns) <= MOST_COLUMNS or not any(isinstance(one, dict) for one in value.values()):
                yield path, (["", *columns], [[_words(key), *map(row.get, columns)] for key, row in flat.items()])
                continue
            # Too wide for one table: what goes no deeper makes one together, each of the others one of its own.
            deep = {key: one for key, one in value.items() if _is_deep(one)}
            shallow = {key: one for key, one in value.items() if key not in deep}
            yield from tables_of({name: shallow}, title)
            yield from tables_of(deep, path)


def _is_deep(found: Any) -> bool:
    return isinstance(found, dict) and (
        len(_flat(found)) > MOST_COLUMNS or any(isinstance(one, dict | list) for one in found.values())
    )


def _flat(found: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Values by the way to them; lists stay out, as they are samples."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name} ")
        elif not isinstance(value, list):
            flat[f"{before}{name}"] = value
    return flat


def _table(table: Table) -> str:
    columns, rows = table
    head = "".join(f"<th>{_text(_words(column))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_aligned(cell)}>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _aligned(cell: Any) -> str:
    return ' class="number"' if isinstance(cell, int | float) and not isinstance(cell, bool) else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(f"{value:.4g}" if isinstance(value, float) else str(value))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: object) -> str:
    return html.escape(str(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, action="append", help="a folder of results; may be given again")
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    options = parser.parse_args()
    options.output.write_text(page(collect(wanted(()), options.results or [RESULTS])))
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
