"""TRL's GRPOTrainer as a trainer of its own: the same update as ours, resumable, and nothing ignored."""

from __future__ import annotations

import copy

import pytest
import torch
from training.make_batch import make_group, make_groups, make_trajectory, sample

from art_sky.config import LoRAConfig, TrainConfig, TrainerConfig
from art_sky.errors import InvalidConfig, TrainFailed
from art_sky.schemas import InitTask, TrainTask
from art_sky.store.batches import encode_batch
from art_sky.training import state as files
from art_sky.training import trainer, trl
from art_sky.training.model import Policy
from art_sky.training.process import TrainerProcess
from art_sky.training.sequences import build_batch
from art_sky.training.state import TrainerState


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    torch.set_num_threads(1)
    return Policy(tiny_model, "float32")


@pytest.fixture
def state(policy: Policy) -> TrainerState:
    made = TrainerState.fresh(policy.new_adapter(LoRAConfig(rank=4), "tiny"), {})
    generator = torch.Generator().manual_seed(3)
    adapter = {k: p.detach() + 0.02 * torch.randn(p.shape, generator=generator) for k, p in policy.adapter().items()}
    return TrainerState.fresh(made.adapter_config, adapter)


def batch_of(policy: Policy, model, config: TrainConfig, turns: int = 2):
    groups = make_groups(model, groups=2, size=5, turns=turns, temperature=0.8, seed=2)
    hot, greedy = sample(model, [5, 6, 7], 5, 1.3, 5), sample(model, [5, 6, 7], 3, 0.0, 7)
    off = sample(model, [5, 6, 7], 4, 1.0, 6)
    off["sampling"]["comparable"] = False
    rewards = (1.0, 0.0, 0.25)
    groups.append(make_group([make_trajectory([c], r) for c, r in zip((hot, greedy, off), rewards, strict=True)]))
    return build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)


OPTIONS = {
    "cispo": {},
    "ppo": {"loss_fn": "ppo", "kl_penalty_coef": 0.1},
    "gspo": {"loss_fn": "gspo"},
    "dr_grpo": {"loss_fn": "dr_grpo", "normalize_tokens": 50, "kl_penalty_coef": 0.1, "kl_bias_correction": True},
    "dapo, two epochs": {"loss_fn": "dapo", "epochs": 2, "lr_schedule": "linear", "lr_schedule_updates": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_update_is_ours(name, policy, state, tiny_model):
    config = TrainConfig(learning_rate=1e-3, max_grad_norm=0.5, micro_batch_tokens=64, **OPTIONS[name])
    batch = batch_of(policy, tiny_model, config)
    mine, theirs = copy.deepcopy(state), copy.deepcopy(state)
    seen = []
    expected = trainer.train(policy, mine, batch, config, lambda *_: None)
    found = trl.train(policy, theirs, batch, config, lambda *p: seen.append(p))
    assert theirs.updates == mine.updates == config.epochs
    for moment in ("exp_avg", "exp_avg_sq"):
        one, two = (torch.cat([v.flatten() for v in getattr(s, moment).values()]) for s in (mine, theirs))
        assert ((one - two).norm() / one.norm()).item() < 1e-4, moment
        assert one.norm() > 0
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert found["learning_rate"] == pytest.approx(expected["learning_rate"])
    assert found["updates"] == expected["updates"]
    assert seen[-1][0] == seen[-1][1] == config.epochs * found["data/micro_batches"]
    assert found["data/micro_batches"] > 1
    # The model is as it was: ours trains on as if TRL had not been there.
    again = copy.deepcopy(state)
    trainer.train(policy, again, batch, config, lambda *_: None)
    assert all(torch.equal(again.adapter[k], v) for k, v in mine.adapter.items())


def test_nothing_is_ignored(policy, state, tiny_model):
    for options, message in (
        ({"minibatches": 2}, "has no minibatches"),
        ({"importance_correction": "token_mask"}, "has no importance_correction"),
        ({"normalize": "token"}, "has no normalize"),
        ({"kl_penalty_coef": 0.1, "kl_penalty_in": "advantage"}, "has no kl_penalty_in"),
        ({"epsilon": 0.5}, "no lower bound"),
    ):
        config = TrainConfig(**options)
        with pytest.raises(InvalidConfig, match=message):
            trl.train(policy, state, batch_of(policy, tiny_model, config), config, lambda *_: None)
    two = sample(tiny_model, [5, 6], 3, 1.0, 1), sample(tiny_model, [9, 8], 3, 1.0, 2)
    group = make_group([make_trajectory([*two], 1.0), make_trajectory([two[0]], 0.0)])
    config = TrainConfig(loss_fn="ppo")
    split = build_batch([group], config, vocab_size=policy.vocab_size, context_length=policy.context_length)
    with pytest.raises(InvalidConfig, match="group 0, trajectory 0 has 2 sequences"):
        trl.train(policy, state, split, config, lambda *_: None)
    with pytest.raises(InvalidConfig, match="runs in one process"):
        TrainerConfig.parse({"kind": "trl", "processes": 2})


def test_nan_is_an_error(policy, state, tiny_model):
    config = TrainConfig()
    state.adapter = {k: v * float("nan") for k, v in state.adapter.items()}
    with pytest.raises(TrainFailed, match="is nan"):
        trl.train(policy, state, batch_of(policy, tiny_model, config), config, lambda *_: None)


async def test_as_a_process_it_resumes_bit_for_bit(tiny_model, tmp_path):
    batches = [make_groups(tiny_model, groups=2, size=4, seed=s) for s in range(3)]

    async def run(start: int, folder, parent) -> None:
        settings = TrainerConfig(kind="trl")
        process = TrainerProcess(tiny_model, "float32", 1, tmp_path / "trainer.log", settings=settings)
        try:
            if parent is None:
                parent = folder / "0"
                await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=4), out_dir=str(parent)))
            for k in range(start, 3):
                path = tmp_path / "batch"
                path.write_bytes(encode_batch(batches[k]))
                out = folder / str(k + 1)
                task = TrainTask(
                    request_id="r", base_model="tiny", parent_dir=str(parent), batch_path=str(path), out_dir=str(out),
                    config=TrainConfig(learning_rate=1e-2),
                )  # fmt: skip
                *events, outcome = [m async for m in process.train(task)]
                assert (outcome.updates, events[-1]["micro_batch"]) == (1, events[-1]["of"])
                parent = out
        finally:
            await process.close()

    await run(0, tmp_path / "a", None)
    await run(1, tmp_path / "b", tmp_path / "a" / "1")
    for name in (files.ADAPTER, files.OPTIMIZER, files.STATE):
        assert (tmp_path / "a" / "3" / name).read_bytes() == (tmp_path / "b" / "3" / name).read_bytes()
