"""Training in two processes that talk by gloo equals training in one, and ends when one of them does."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from training.make_batch import make_groups

from art_sky.config import LoRAConfig, SFTConfig, TrainConfig, TrainerConfig
from art_sky.errors import ChildDied, TrainFailed
from art_sky.inference.gpus import Gpu, place, visible
from art_sky.schemas import InitTask, TrainTask
from art_sky.store.batches import encode_batch
from art_sky.training import state as files
from art_sky.training.process import TrainerProcess
from art_sky.training.ranks import own_gpu
from art_sky.training.rows import plan
from art_sky.training.sequences import build_batch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine are many times slower


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_engine_and_every_process_of_the_trainer_have_gpus_of_their_own(gpus) -> None:
    machine = tuple(Gpu(str(i), 80_000, 0) for i in range(gpus))
    split = place(machine)
    engine, trainer = (visible(side)["CUDA_VISIBLE_DEVICES"] for side in (split.engine, split.trainer))
    count = len(split.trainer)
    # The trainer's process is rank 0, and computes on the first that it sees.
    ranks = [trainer.split(",")[0]] + [own_gpu(rank, trainer)["CUDA_VISIBLE_DEVICES"] for rank in range(1, count)]
    assert [*engine.split(","), *ranks] == [gpu.index for gpu in machine]
    with pytest.raises(TrainFailed, match=f"no GPU for process {count + 1} of the trainer"):
        own_gpu(count, trainer)


@contextlib.asynccontextmanager
async def trainer(model, tmp_path, processes: int):
    settings = TrainerConfig(processes=processes)
    process = TrainerProcess(model, "float32", processes, tmp_path / "trainer.log", settings=settings)
    try:
        yield process
    finally:
        await process.close()


async def run(process, tmp_path, parent: str, out: str, groups: list, config) -> dict:
    path = tmp_path / f"{out}.batch"
    path.write_bytes(encode_batch(groups))
    task = TrainTask(
        request_id=out, base_model="tiny", parent_dir=str(tmp_path / parent), batch_path=str(path),
        out_dir=str(tmp_path / out), config=config,
    )  # fmt: skip
    *_, outcome = [m async for m in process.train(task)]
    return outcome.metrics


def moments(tmp_path, step: str) -> torch.Tensor:
    """After one update from none: the gradient, in the first moments."""
    found = safetensors.torch.load_file(tmp_path / step / files.OPTIMIZER)
    return torch.cat([v.flatten() for k, v in sorted(found.items()) if k.startswith("exp_avg.")])


CONFIGS = {
    "cispo": TrainConfig(learning_rate=1e-2, max_grad_norm=1e9),
    "gspo": TrainConfig(
        learning_rate=1e-2, max_grad_norm=1e9, loss_fn="gspo", kl_penalty_coef=0.1, kl_bias_correction=True
    ),
    "corrected": TrainConfig(
        learning_rate=1e-2, max_grad_norm=1e9, loss_fn="ppo", importance_correction="sequence_truncate",
        kl_penalty_coef=0.1, kl_penalty_in="advantage",
    ),
    "sft": SFTConfig(learning_rate=1e-2, max_grad_norm=1e9),
}  # fmt: skip
OF_THE_MACHINE = ("time/train_seconds", "time/tokens_per_second", "memory/peak_mib")
# Of each process: what they share is computed in both, and cut otherwise.
OF_PLANS = ("data/tokens_computed", "data/micro_batches")


async def test_two_processes_give_the_gradient_and_metrics_of_one(tiny_model, tmp_path):
    groups = make_groups(tiny_model, groups=3, size=4, turns=2, seed=3)
    results = {}
    for processes in (1, 2):
        async with trainer(tiny_model, tmp_path, processes) as process:
            await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=4), out_dir=str(tmp_path / "0")))
            await run(process, tmp_path, "0", f"start{processes}", groups, TrainConfig(learning_rate=3e-2))
            parent = "start1"  # an adapter whose B is not 0, the same for both
            state = files.load(tmp_path / parent)
            files.save(files.TrainerState.fresh(state.adapter_config, state.adapter), tmp_path / "parent")
            for name, config in CONFIGS.items():
                metrics = await run(process, tmp_path, "parent", f"{name}{processes}", groups, config)
                results[name, processes] = metrics
            log = (tmp_path / "trainer.log").read_text()
            assert process.child.restarts == 0, log
    for name in CONFIGS:
        one, two = (moments(tmp_path, f"{name}{n}") for n in (1, 2))
        assert ((one - two).norm() / one.norm()).item() < 1e-5, name
        assert one.norm() > 0
        first, second = results[name, 1], results[name, 2]
        assert first.keys() == second.keys()
        for key in first.keys() - {*OF_THE_MACHINE, *OF_PLANS}:
            assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), (name, key)
        assert second["data/tokens_computed"] >= first["data/tokens_computed"]


async def test_a_process_that_dies_fails_the_call_and_the_next_one_works(tiny_model, tmp_path, monkeypatch):
    groups = make_groups(tiny_model, groups=2, size=4)
    arm = tmp_path / "arm"
    monkeypatch.setenv("ART_SKY_FAILPOINT", f"follower-mid-step@{arm}")
    async with trainer(tiny_model, tmp_path, 2) as process:
        await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=4), out_dir=str(tmp_path / "0")))
        arm.touch()
        began = time.monotonic()
        async with asyncio.timeout(120):
            with pytest.raises((TrainFailed, ChildDied), match="ended while"):
                await run(process, tmp_path, "0", "1", groups, TrainConfig())
        assert time.monotonic() - began < 100
        assert not (tmp_path / "1").exists()
        metrics = await run(process, tmp_path, "0", "1", groups, TrainConfig())
        assert metrics["updates"] == 1


async def test_an_error_of_both_is_told_once_and_the_next_call_works(tiny_model, tmp_path):
    groups = make_groups(tiny_model, groups=2, size=4)
    async with trainer(tiny_model, tmp_path, 2) as process:
        await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=4), out_dir=str(tmp_path / "0")))
        broken = files.load(tmp_path / "0")
        broken.adapter = {k: v * float("nan") for k, v in broken.adapter.items()}
        files.save(broken, tmp_path / "broken")
        with pytest.raises(TrainFailed, match="is nan"):
            await run(process, tmp_path, "broken", "1", groups, TrainConfig())
        assert (await run(process, tmp_path, "0", "1", groups, TrainConfig()))["updates"] == 1
        assert process.child.restarts == 0


@pytest.mark.parametrize("share", [True, False])
def test_each_token_is_computed_in_one_process_and_the_work_is_even(share, tiny_model):
    groups = make_groups(tiny_model, groups=1, size=12, prompt_tokens=4, tokens=12, seed=1)
    batch = build_batch(groups, TrainConfig(), vocab_size=200, context_length=512)
    plans = [plan(batch.sequences, 64, share, rank, 3) for rank in range(3)]
    tokens = [np.concatenate([s.tokens for top in p for s in top.walk()]) for p in plans]
    assert sorted(np.concatenate(tokens).tolist()) == list(range(sum(s.trained for s in batch.sequences)))
    work = [sum(s.unpadded for top in p for s in top.walk()) for p in plans]
    assert max(work) < 1.5 * min(work)
