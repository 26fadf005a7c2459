"""Charts for terminals and files."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from art_sky.tracking.charts import Curve, png_chart, terminal_chart

RISING = Curve([(i, i / 10) for i in range(1, 11)], [(0, 0.05), (10, 0.9)], [3], "a run", y_range=(0, 1))


def test_a_rising_curve_rises() -> None:
    lines = terminal_chart(RISING, 60, 10).splitlines()
    assert lines[0] == "a run" and lines[1].startswith("1.00 ┤") and lines[10].startswith("0.00 ┤")
    assert "validation" in lines[-1] and lines[-2].split() == ["0", "step", "10"]
    columns = zip(*(line.ljust(60) for line in lines[1:11]), strict=True)
    tops = [next(y for y, c in enumerate(column) if c > "\u2800") for column in columns if max(column) > "\u2800"]
    assert tops == sorted(tops, reverse=True) and len(tops) > 40, "to the right means up"
    assert sum(line.count("◆") for line in lines[1:11]) == 2


points = st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6)), max_size=30)


@given(line=points, marks=points, width=st.integers(0, 200), height=st.integers(0, 30))
def test_any_points_fit_any_width(
    line: list[tuple[float, float]], marks: list[tuple[float, float]], width: int, height: int
) -> None:
    labels = 16  # the longest of the axis
    for text in terminal_chart(Curve(line, marks, title="t" * 300), width, height).splitlines():
        assert len(text) <= max(width, 24 + labels)


def test_png(tmp_path: Path) -> None:
    path = png_chart(RISING, tmp_path / "new" / "reward.png")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1280, 720)
    assert [p.name for p in path.parent.iterdir()] == ["reward.png"]
    assert "matplotlib.pyplot" not in sys.modules
    png_chart(Curve([]), path)


def test_nothing_heavy_before_it_is_needed() -> None:
    code = "import sys, art_sky.tracking.charts; print({'wandb', 'matplotlib', 'httpx'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
