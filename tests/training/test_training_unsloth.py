"""Unsloth as what loads the model: on a CPU the same update as without it. Needs an environment that has it."""

from __future__ import annotations

import importlib.util

import pytest
import safetensors.torch
from training.make_batch import make_groups

from art_sky.config import LoRAConfig, TrainConfig, TrainerConfig
from art_sky.errors import InvalidConfig
from art_sky.schemas import InitTask, TrainTask
from art_sky.store.batches import encode_batch
from art_sky.training import state as files
from art_sky.training.process import TrainerProcess

INSTALLED = importlib.util.find_spec("unsloth") is not None


@pytest.mark.unsloth
@pytest.mark.skipif(not INSTALLED, reason="needs Unsloth")
async def test_a_model_that_unsloth_loads_is_trained_alike(tiny_model, tmp_path):
    groups = make_groups(tiny_model, groups=2, size=4, turns=2)
    found = {}
    for kind in ("native", "unsloth"):
        settings = TrainerConfig(kind=kind)
        process = TrainerProcess(tiny_model, "float32", 1, tmp_path / f"{kind}.log", settings=settings)
        try:
            start, out, path = tmp_path / f"{kind}-0", tmp_path / f"{kind}-1", tmp_path / "batch"
            await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=4), out_dir=str(start)))
            path.write_bytes(encode_batch(groups))
            task = TrainTask(
                request_id="r", base_model="tiny", parent_dir=str(start), batch_path=str(path), out_dir=str(out),
                config=TrainConfig(learning_rate=1e-2),
            )  # fmt: skip
            *_, outcome = [m async for m in process.train(task)]
        finally:
            await process.close()
        found[kind] = outcome.metrics, safetensors.torch.load_file(out / files.OPTIMIZER)
    native, unsloth = found["native"], found["unsloth"]
    assert unsloth[0]["loss"] == pytest.approx(native[0]["loss"], rel=1e-5)
    assert unsloth[0]["data/prefix_tree"] == 1
    for name, moment in native[1].items():
        assert (unsloth[1][name] - moment).norm() <= 1e-4 * moment.norm(), name
    assert "training on CPU" in (tmp_path / "unsloth.log").read_text()


@pytest.mark.skipif(INSTALLED, reason="is for where it is not installed")
async def test_without_unsloth_its_trainer_says_what_to_install(tiny_model, tmp_path):
    process = TrainerProcess(tiny_model, "float32", 1, tmp_path / "log", settings=TrainerConfig(kind="unsloth"))
    try:
        with pytest.raises(InvalidConfig, match=r"art-sky\[unsloth\]"):
            await process.init(InitTask(base_model="tiny", lora=LoRAConfig(), out_dir=str(tmp_path / "0")))
    finally:
        await process.close()
