"""Tables in the terminal: what others named is shown as it is, never as markup, and folded where it is too wide."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def print_table(
    columns: Sequence[str], rows: Iterable[Iterable["str | Text"]], *, never_folded: Collection[str] = ()
) -> None:
    """A heading and its rows.

    Args:
        never_folded: columns whose cells stay on one line.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in never_folded)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console(highlight=False).print(table)
