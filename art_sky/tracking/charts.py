"""Reward curves: drawn with characters for a terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Point = tuple[float, float]  # step, value

# A braille character is a grid of 2 x 4 dots; each dot's bit, by row then column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_MARK = "◆"
_TINY_WIDTH = 24  # below this an axis with labels leaves no room for a curve


@dataclass
class Curve:
    """`line` is joined up, `marks` stand alone (validation), `gaps` are steps without an update."""

    line: Sequence[Point]
    marks: Sequence[Point] = ()
    gaps: Sequence[float] = ()
    title: str = ""
    line_name: str = "reward"
    mark_name: str = "validation"
    x_name: str = "step"
    y_range: Point | None = None

    def ranges(self) -> tuple[Point, Point]:
        """((x low, x high), (y low, y high)), never empty."""
        points = [*self.line, *self.marks]
        xs = [x for x, _ in points] or [0.0]
        ys = [y for _, y in points] or [0.0]
        low, high = self.y_range or (min(ys), max(ys))
        low, high = min(low, *ys), max(high, *ys)
        return (min(xs), max(max(xs), min(xs) + 1)), (low, high if high > low else low + 1)


def terminal_chart(curve: Curve, width: int = 80, height: int = 12) -> str:
    """Lines of text at most `width` columns wide: the curve in braille dots, marks as diamonds, both axes."""
    width = max(_TINY_WIDTH, width)
    (x_low, x_high), (y_low, y_high) = curve.ranges()
    labels = [f"{y_low + (y_high - y_low) * i / 2:.2f}" for i in range(3)]
    margin = max(map(len, labels))
    columns, rows = width - margin - 2, max(3, height)
    dots = [[0] * columns for _ in range(rows)]

    def place(point: Point) -> tuple[int, int]:
        """The dot, from the left and from the top."""
        x = (point[0] - x_low) / (x_high - x_low) * (columns * 2 - 1)
        y = (y_high - point[1]) / (y_high - y_low) * (rows * 4 - 1)
        return round(x), round(y)

    placed = [place(point) for point in curve.line]
    for (x0, y0), (x1, y1) in pairwise(placed if len(placed) != 1 else placed * 2):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(length + 1):
            x, y = x0 + (x1 - x0) * i // length, y0 + (y1 - y0) * i // length
            dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    cells = [[chr(_BLANK | d) if d else " " for d in row] for row in dots]
    for x, y in map(place, curve.marks):
        cells[y // 4][x // 2] = _MARK

    lines = [curve.title[:width]] if curve.title else []
    for i, row in enumerate(cells):
        label = {0: labels[2], rows // 2: labels[1], rows - 1: labels[0]}.get(i, "")
        lines.append(
            f"{label:>{margin}} ┤{''.join(row)}".rstrip() if label else f"{'':>{margin}} │{''.join(row)}".rstrip()
        )
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    left, right = f"{x_low:g}", f"{x_high:g}"
    lines.append(f"{'':>{margin + 2}}{left}{curve.x_name:^{columns - len(left) - len(right)}}{right}")
    legend = f"⠒ {curve.line_name}" + (f"  {_MARK} {curve.mark_name}" if curve.marks else "")
    lines.append(f"{'':>{margin + 2}}{legend:^{columns}}".rstrip())
    return "\n".join(lines)


def png_chart(curve: Curve, path: Path) -> Path:
    """Writes the curve as a PNG of 1280 x 720 pixels. Imports matplotlib, without its window system.

    Raises ImportError when it is not installed (it comes with `art-sky[local]`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if curve.line:
        axes.plot(*zip(*curve.line, strict=True), color="#2563eb", linewidth=2, marker="o", markersize=4,
                  label=curve.line_name, zorder=3)  # fmt: skip
    skipped = [point for point in curve.line if point[0] in set(curve.gaps)]
    if skipped:
        axes.plot(*zip(*skipped, strict=True), linestyle="none", marker="o", markersize=7, markerfacecolor="white",
                  markeredgecolor="#2563eb", markeredgewidth=1.5, label="no update", zorder=4)  # fmt: skip
    if curve.marks:
        axes.plot(*zip(*curve.marks, strict=True), linestyle="none", marker="D", markersize=8, color="#ea580c",
                  label=curve.mark_name, zorder=5)  # fmt: skip
        for x, y in curve.marks:
            axes.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, 9), ha="center", color="#9a3412")
    (_, _), (low, high) = curve.ranges()
    axes.set_ylim(low - 0.04 * (high - low), high + 0.1 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(curve.x_name)
    axes.set_ylabel("mean reward")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if curve.title:
        axes.set_title(curve.title, loc="left", fontsize=11)
    if curve.line or curve.marks:
        axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)
    return path
