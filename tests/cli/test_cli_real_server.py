"""`serve`, and launch to down, with the real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "art_sky.cli.main"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "ART_SKY_HOME": str(tmp_path / "home")}


def run(environment: dict[str, str], folder: Path, *args: str) -> Any:
    out = subprocess.run(
        [*COMMAND, *args, "--json"], env=environment, cwd=folder, capture_output=True, text=True, check=True, timeout=90
    )
    return json.loads(out.stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(tmp_path: Path, environment: dict[str, str], number: signal.Signals) -> None:
    state = tmp_path / "state"
    process = subprocess.Popen(
        [*COMMAND, "serve", "--state-dir", str(state), "--store", str(tmp_path / "runs")],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (state / "server.json").is_file():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads((state / "server.json").read_text())["pid"] == process.pid, "it took the command's place"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "listens on http://127.0.0.1:" in err


def test_launch_status_down(tmp_path: Path, environment: dict[str, str]) -> None:
    cluster = run(environment, tmp_path, "launch", "real", "--store", "runs", "--idle-minutes", "5")
    try:
        assert cluster["state"] == "up" and cluster["store"] == f"file://{tmp_path}/runs"
        (seen,) = run(environment, tmp_path, "status")["clusters"]
        assert seen["server"]["pid"] == cluster["details"]["pid"] and seen["server"]["idle_limit_seconds"] == 300
        assert Path(cluster["token_file"]).stat().st_mode & 0o777 == 0o600
    finally:
        (ended,) = run(environment, tmp_path, "down", "real")["clusters"]
    assert ended["state"] == "down"
    assert "the server has ended" in Path(cluster["log_file"]).read_text()
