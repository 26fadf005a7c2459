"""benchmarks/gpu_step.py runs as it stands, on a CPU, and counts what it says it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Any:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_the_script_for_gpus_runs_whole_on_a_cpu() -> None:
    found = run("--tiny")
    tree, rows = found["ours"], found["peers"]["rows"]
    assert (found["case"], found["notes"]["gpu"]) == ("tiny 256", "CPU")
    assert abs(tree["loss"] - rows["loss"]) < 0.05  # bfloat16, and an update between the two
    assert tree["mfu"] is None and tree["tflops"] > 0
    # 128 tokens of prompt once, and 8 x 16 of completions whose last token is an input to nothing.
    computed, held = 128 + 8 * 15, 8 * (128 + 16)
    assert abs(tree["unique_tokens_per_second"] * tree["seconds"] / computed - 1) < 0.01
    assert abs(rows["unique_tokens_per_second"] * rows["seconds"] / (held - 8) - 1) < 0.01
    assert abs(tree["tokens_per_second"] * tree["seconds"] / held - 1) < 0.01


def test_without_a_gpu_it_says_so() -> None:
    assert "no GPU" in run()["notes"]["skipped"]
