"""A train call on another device than the CPU, where there is none: see training_other_device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from training.make_batch import make_groups

from art_sky.errors import TrainFailed
from art_sky.training import device, state, worker

HERE = Path(__file__).parent


def test_a_step_runs_on_another_device_and_is_that_of_the_cpu(tiny_model: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch.json"
    batch.write_text(json.dumps(make_groups(tiny_model, groups=2, size=3, turns=2, tokens=6, seed=4)))
    command = [sys.executable, str(HERE / "training_device_step.py"), str(tiny_model), str(batch), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr[-3000:]
    cpu, other = (tmp_path / where for where in ("cpu", "elsewhere"))
    for name in (state.ADAPTER_CONFIG, state.STATE):
        assert (cpu / name).read_bytes() == (other / name).read_bytes()
    for name in (state.ADAPTER, state.OPTIMIZER):
        ours, theirs = (safetensors.torch.load_file(folder / name) for folder in (cpu, other))
        assert ours.keys() == theirs.keys()
        there = torch.cat([theirs[k].flatten() for k in sorted(ours)])
        here = torch.cat([ours[k].flatten() for k in sorted(ours)])
        assert ((there - here).norm() / here.norm()).item() < 1e-4, name
    for ours, theirs in zip(*(json.loads((f / "metrics.json").read_text()) for f in (cpu, other)), strict=True):
        assert theirs["data/micro_batches"] > 4
        for name in ("loss", "grad_norm", "policy/entropy", "policy/kl"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-4), name


def test_the_gpu_is_taken_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.choose_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device.choose_device() == torch.device("cuda", 0)


def test_peak_memory_of_a_cpu_is_the_process_s() -> None:
    cpu = torch.device("cpu")
    device.begin_peak(cpu)
    now = psutil.Process().memory_info().rss / 2**20
    assert 0.9 * now < device.peak_mib(cpu) < psutil.virtual_memory().total / 2**20


def test_a_gpu_without_room_is_told_as_such() -> None:
    with pytest.raises(TrainFailed, match="lower micro_batch_tokens"), worker._typed():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
