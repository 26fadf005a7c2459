"""The trainer as the server runs it: a child process behind a channel."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from training.make_batch import make_group, make_groups, make_trajectory, sample

from art_sky.config import LoRAConfig, TrainConfig
from art_sky.errors import ChildDied, CorruptObject, InvalidConfig, InvalidReward, MissingTokens
from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.store.batches import encode_batch
from art_sky.training import state as files
from art_sky.training.process import TrainerProcess

NAMES = (files.ADAPTER, files.ADAPTER_CONFIG, files.OPTIMIZER, files.STATE)


@contextlib.asynccontextmanager
async def trainer(model, tmp_path):
    process = TrainerProcess(model, "float32", 1, tmp_path / "trainer.log")
    try:
        yield process
    finally:
        await process.close()


def task(tmp_path, parent: str, out: str, groups: list, **config) -> TrainTask:
    path = tmp_path / f"{out}.batch"
    path.write_bytes(encode_batch(groups))
    return TrainTask(
        request_id=out, base_model="tiny", parent_dir=str(tmp_path / parent), batch_path=str(path),
        out_dir=str(tmp_path / out), config=TrainConfig(**{"learning_rate": 1e-2, **config}),
    )  # fmt: skip


async def run(process: TrainerProcess, task: TrainTask) -> tuple[list[dict], TrainOutcome]:
    *events, outcome = [m async for m in process.train(task)]
    assert isinstance(outcome, TrainOutcome)
    return events, outcome


async def init(process: TrainerProcess, tmp_path, **lora) -> None:
    await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=4, **lora), out_dir=str(tmp_path / "0")))


async def test_two_steps_a_kill_and_two_more_equal_four_steps(tiny_model, tmp_path):
    batches = [make_groups(tiny_model, groups=2, size=4, seed=s) for s in range(4)]
    async with trainer(tiny_model, tmp_path) as process:
        await init(process, tmp_path)
        for k, groups in enumerate(batches):
            events, outcome = await run(process, task(tmp_path, str(k), str(k + 1), groups))
            assert events[0]["micro_batch"] == 0 and events[-1]["micro_batch"] == events[-1]["of"] == len(events) - 1
            assert (outcome.updates, outcome.reason) == (1, None)
        assert process.child.restarts == 0
    async with trainer(tiny_model, tmp_path) as process:
        for k, groups in enumerate(batches):
            if k == 2:
                process.child.kill()
                while process.child.restarts == 0:  # a child has no event for its end
                    await asyncio.sleep(0.01)
            await run(process, task(tmp_path, str(k) if k == 0 else f"again{k}", f"again{k + 1}", groups))
    for name in NAMES:
        assert (tmp_path / "4" / name).read_bytes() == (tmp_path / "again4" / name).read_bytes(), name
    assert (tmp_path / "4" / files.ADAPTER).read_bytes() != (tmp_path / "3" / files.ADAPTER).read_bytes()
    left = {p.relative_to(tmp_path / "4").as_posix() for p in (tmp_path / "4").rglob("*") if p.is_file()}
    assert left == set(NAMES)


async def test_errors_are_typed_and_the_process_goes_on(tiny_model, tmp_path):
    good = make_groups(tiny_model)
    choice = sample(tiny_model, [5, 6], 2, 1.0, 0)
    other = make_trajectory([choice], 0.0)
    async with trainer(tiny_model, tmp_path) as process:
        with pytest.raises(InvalidConfig, match="nothing_here"):
            await init(process, tmp_path, target_modules=["nothing_here"])
        await init(process, tmp_path)
        pid = process.child.pid
        lost = make_group([make_trajectory([choice | {"token_logprobs": None}], 1.0), other])
        with pytest.raises(MissingTokens, match="group 0, trajectory 0, message 0"):
            await run(process, task(tmp_path, "0", "a", [lost]))
        with pytest.raises(InvalidReward, match="group 0, trajectory 0"):
            await run(process, task(tmp_path, "0", "b", [make_group([make_trajectory([choice], None), other])]))
        with pytest.raises(CorruptObject, match="unpack it"):
            await run(process, task(tmp_path, "absent", "c", good))
        broken = task(tmp_path, "0", "d", good)
        (tmp_path / "d.batch").write_bytes(b"no batch")
        with pytest.raises(CorruptObject):
            await run(process, broken)
        assert not any((tmp_path / out).exists() for out in "abcd")
        assert (await run(process, task(tmp_path, "0", "e", good)))[1].updates == 1
        assert process.child.pid == pid


async def test_nothing_to_learn_is_skipped_at_once_and_writes_nothing(tiny_model, tmp_path):
    equal = make_groups(tiny_model, reward=lambda _: 0.5)
    async with trainer(tiny_model, tmp_path) as process:
        await init(process, tmp_path)
        began = time.monotonic()
        events, outcome = await run(process, task(tmp_path, "0", "1", equal))
        assert time.monotonic() - began < 2
    assert (events, outcome.updates, outcome.reason) == ([], 0, "nothing to train on: 2 x all rewards equal")
    assert (outcome.metrics["reward"], outcome.metrics["data/groups_skipped"]) == (0.5, 2.0)
    assert not (tmp_path / "1").exists()


async def test_a_cancelled_call_stops_between_micro_batches(tiny_model, tmp_path):
    groups = make_groups(tiny_model, groups=4, size=8, tokens=2, prompt_tokens=60)
    slow = task(tmp_path, "0", "1", groups, micro_batch_tokens=16)
    async with trainer(tiny_model, tmp_path) as process:
        await init(process, tmp_path)
        stream = process.train(slow)
        assert (await anext(stream))["micro_batch"] == 0
        await stream.aclose()
        # Calls run one after another: when this one is done, the cancelled one was left.
        assert (await run(process, task(tmp_path, "0", "2", make_groups(tiny_model))))[1].updates == 1
        assert process.child.restarts == 0
    assert not (tmp_path / "1").exists()


async def test_killed_in_the_middle_of_a_step_it_leaves_no_files(tiny_model, tmp_path, monkeypatch):
    groups = make_groups(tiny_model)
    monkeypatch.setenv("ART_SKY_FAILPOINT", "trainer-mid-step")
    async with trainer(tiny_model, tmp_path) as process:
        await init(process, tmp_path)
        with pytest.raises(ChildDied):
            await run(process, task(tmp_path, "0", "1", groups))
        assert not (tmp_path / "1").exists()
