"""Pictures of results, for the report and the docs: bars that stay readable, on white."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


def stacked_bars(
    path: Path,
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    marks: Mapping[str, float] | None = None,
    mark: str = "",
) -> None:
    """One bar per row, made of its parts; ``marks`` are a point of each row, for instance its p99."""

    def draw(axes: Any) -> None:
        parts = list(dict.fromkeys(part for row in rows.values() for part in row))
        ends = [0.0] * len(rows)
        for part, colour in zip(parts, COLOURS, strict=False):
            widths = [row.get(part, 0.0) for row in rows.values()]
            axes.barh(list(rows), widths, left=ends, label=part, color=colour, height=0.55)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end in enumerate(ends):
            axes.annotate(f"{end:.3g}", (end, place), (4, 0), textcoords="offset points", va="center", size=9)
        if marks:
            places = [place for place, name in enumerate(rows) if name in marks]
            values = [marks[name] for name in rows if name in marks]
            axes.plot(values, places, "|", color="#1b1e23", markersize=22, label=mark)
        axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)

    _save(path, title, unit, len(rows), draw)


def bars(
    path: Path, title: str, rows: Mapping[str, float], unit: str, ours: Sequence[str] = (), is_log: bool = False
) -> None:
    """One bar per row; those of ``ours`` stand out."""

    def draw(axes: Any) -> None:
        colours = [COLOURS[0] if name in ours else COLOURS[-1] for name in rows]
        axes.barh(list(rows), list(rows.values()), color=colours, height=0.55)
        if is_log:
            axes.set_xscale("log")
        for place, value in enumerate(rows.values()):
            axes.annotate(f"{value:.3g}", (value, place), (4, 0), textcoords="offset points", va="center", size=9)

    _save(path, title, unit, len(rows), draw)


def _save(path: Path, title: str, unit: str, rows: int, draw: Callable[[Any], None]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install -e '.[recording]' brings matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.5 * rows), layout="constrained")
    draw(axes)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", size=11, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    print(f"written: {path}", flush=True)
