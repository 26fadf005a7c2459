from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import art_sky
from art_sky.controller.wheel import make_wheel


def test_the_wheel_installs_and_is_the_same_code(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels")
    assert wheel == make_wheel(tmp_path / "wheels")
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel],
        check=True,
    )
    ours = Path(art_sky.__file__).parent
    for name in ("__init__.py", "server/main.py", "node/records.py"):
        assert (target / "art_sky" / name).read_bytes() == (ours / name).read_bytes()


def test_equal_contents_are_an_equal_file(tmp_path: Path) -> None:
    one, two = make_wheel(tmp_path / "one"), make_wheel(tmp_path / "two")
    assert one.name == two.name and one.read_bytes() == two.read_bytes()


def test_a_node_imports_straight_from_the_wheel_with_the_standard_library_alone(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    code = "import art_sky.node.records as r, sys; print(r.__file__); print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(wheel)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    file, heavy = done.stdout.split()
    assert file.startswith(str(wheel)) and heavy == "False"
