"""Progress bars on stderr, for people only: nothing is drawn where stderr is no terminal.

Several bars may be open at once (rollouts of one batch while another trains); they share one display. rich's
environment variables FORCE_COLOR=1 or TTY_COMPATIBLE=1 draw them anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar(Protocol):
    def update(self, *, done: float | None = None, total: float | None = None, text: str | None = None) -> None: ...


class _NoBar:
    def update(self, *, done: float | None = None, total: float | None = None, text: str | None = None) -> None:
        pass


class _RichBar:
    def __init__(self, display: Progress, description: str, total: float | None) -> None:
        self._display = display
        self.id = display.add_task(description, total=total, text="")

    def update(self, *, done: float | None = None, total: float | None = None, text: str | None = None) -> None:
        self._display.update(self.id, completed=done, total=total)
        if text is not None:
            self._display.update(self.id, text=text)


class _Shared:
    """rich allows one live display a terminal, so all bars of the process share one."""

    display: Progress | None = None
    users = 0


@contextmanager
def progress_bar(description: str | None, total: float | None) -> Iterator[Bar]:
    """A bar while the block runs; `description=None` draws none."""
    display = _open() if description is not None else None
    if display is None or description is None:
        yield _NoBar()
        return
    bar = _RichBar(display, description, total)
    _Shared.users += 1
    try:
        yield bar
    finally:
        _Shared.users -= 1
        if _Shared.users == 0:
            display.stop()
            _Shared.display = None
        else:
            display.stop_task(bar.id)


def _open() -> Progress | None:
    if _Shared.display is not None:
        return _Shared.display
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        return None
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    ]
    _Shared.display = Progress(*columns, console=console)
    _Shared.display.start()
    return _Shared.display
