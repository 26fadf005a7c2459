"""benchmarks/gpu_step.py runs as it stands, on a CPU, and counts what it says it counts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


MISSING = ("zstandard", "fastapi", "uvicorn", "openai", "boto3", "wandb")  # on a machine with torch, transformers, peft


def run(*arguments: str) -> tuple[Any, str]:
    """The line that it prints, and its standard error; `MISSING` cannot be imported."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    hide = "import sys, runpy; sys.modules |= dict.fromkeys(sys.argv.pop(1).split(',')); del sys.argv[0]; "
    code = hide + "runpy.run_path(sys.argv[0], run_name='__main__')"
    script = str(ROOT / "benchmarks" / "gpu_step.py")
    command = [sys.executable, "-c", code, ",".join(MISSING), script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    return json.loads(line), done.stderr


def test_the_script_for_gpus_runs_whole_on_a_cpu() -> None:
    found, errors = run("--tiny")
    tree, rows = found["ours"], found["peers"]["rows"]
    assert (found["case"], found["notes"]["gpu"]) == ("tiny 256", "CPU")
    assert abs(tree["loss"] - rows["loss"]) < 0.05  # bfloat16, and an update between the two
    assert tree["mfu"] is None and tree["tflops"] > 0
    assert f"| tiny 256 | rows | {rows['tokens_per_second']} |" in errors.splitlines()[-1]
    # 128 tokens of prompt once, and 8 x 16 of completions whose last token is an input to nothing.
    computed, held = 128 + 8 * 15, 8 * (128 + 16)
    assert abs(tree["unique_tokens_per_second"] * tree["seconds"] / computed - 1) < 0.01
    assert abs(rows["unique_tokens_per_second"] * rows["seconds"] / (held - 8) - 1) < 0.01
    assert abs(tree["tokens_per_second"] * tree["seconds"] / held - 1) < 0.01


def test_without_a_gpu_it_says_so() -> None:
    assert "no GPU" in run()[0]["notes"]["skipped"]


def test_what_does_not_fit_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_step", ROOT / "benchmarks" / "gpu_step.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_step", bench)  # as its dataclass wants
    spec.loader.exec_module(bench)
    steps: list[str] = []

    def one_step(*_: Any, plain: bool) -> dict[str, float]:
        steps.append("rows" if plain else "tree")
        if plain and len(steps) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"seconds": 2.0, "peak_mib": 7.0, "computed": 100.0, "total": 200.0, "loss": 0.0}

    monkeypatch.setattr(bench, "one_step", one_step)
    monkeypatch.setattr(bench, "build_batch", lambda *_, **limits: None)
    policy: Any = SimpleNamespace(not_packed=None, vocab_size=512, context_length=512)
    case = bench.Case.of("tiny", 256)
    found = bench.measure(policy, None, case, 3, time.monotonic() + 60)
    assert steps == ["tree", "rows", "tree", "rows", "tree", "tree"]
    assert (len(found["tree"]), found["rows"]) == (3, [])
    line = bench.report(case, found, "a GPU", 1e12)
    assert line["peers"]["rows"] == {"out_of_memory": True} and line["ratio"] == {}
    assert bench.table([line]).splitlines()[-2:] == [
        "| tiny 256 | tree | 100.0 | 50.0 | 0.0001 | 7 |",
        "| tiny 256 | rows | out of memory |  |  |  |",
    ]
    assert len(bench.measure(policy, None, case, 3, time.monotonic() - 1)["tree"]) == 1  # time is up
