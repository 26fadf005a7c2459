from pathlib import Path

import pytest


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return tmp_path / "run"
