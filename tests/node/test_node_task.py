from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

import art_sky
from art_sky.node.task import node_command, task_yaml

yaml = pytest.importorskip("yaml")


def test_the_task_ends_the_cluster_with_its_job_and_carries_no_secret() -> None:
    task = yaml.safe_load(task_yaml())
    assert task["resources"]["autostop"] == {"idle_minutes": 1, "down": True, "wait_for": "jobs"}
    assert not {"envs", "secrets", "workdir"} & set(task) and "ports" not in task["resources"]
    assert task["run"].startswith("exec ")


def test_the_lines_of_the_task_run_from_the_wheel_in_the_home_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".art-sky-node"
    folder.mkdir()
    package = Path(art_sky.__file__).parent
    for name, seconds in (("art_sky-0.0.1-py3-none-any.whl", 1), ("art_sky-0.1.0-py3-none-any.whl", 2)):
        with zipfile.ZipFile(folder / name, "w") as wheel:
            for file in (package / "__init__.py", *(package / "node").glob("*.py")):
                wheel.write(file, f"art_sky/{file.relative_to(package)}")
        os.utime(folder / name, (seconds, seconds))
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    line = node_command("task")
    assert subprocess.run(["bash", "-c", line], env=environment).returncode == 0
    line = node_command("nothing", "a b")
    refused = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert "No module named art_sky.node.nothing" in refused.stderr
