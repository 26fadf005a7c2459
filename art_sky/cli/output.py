"""How commands speak: one JSON document, or tables. Progress goes to stderr, so that stdout stays clean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


def print_json(document: Any) -> None:
    """ASCII, so that any terminal and any text survives."""
    click.echo(json.dumps(document, indent=2))


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Columns whose name begins with `#` are numbers, set to the right; None is shown as a dash."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        # Nothing is cut off: an address or a name that does not fit goes on in the next line.
        made.add_column(column.lstrip("#"), justify="right" if column.startswith("#") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def duration(seconds: float | None) -> str:
    """`42s`, `3m 05s`, `2h 07m`, `4d 03h`."""
    if seconds is None:
        return "-"
    s = int(max(0.0, seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h {s % 3600 // 60:02d}m"
    return f"{s // 86400}d {s % 86400 // 3600:02d}h"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("[", "\\[")  # rich would read it as markup
