"""4-bit base weights and 8-bit moments by bitsandbytes: right numbers, loss falls, steps resume bit for bit."""

from __future__ import annotations

import copy
import functools
import importlib.util

import pytest
import safetensors.torch
import torch
from training.make_batch import make_groups

from art_sky.config import LoRAConfig, ServerConfig, SFTConfig, TrainConfig, TrainerConfig
from art_sky.errors import ArtSkyError, CorruptObject, InvalidConfig
from art_sky.schemas import InitTask, TrainTask
from art_sky.store.batches import encode_batch
from art_sky.training import quantization, trainer, trl
from art_sky.training import state as files
from art_sky.training.lora import dense, is_quantised
from art_sky.training.model import Policy
from art_sky.training.process import TrainerProcess
from art_sky.training.sequences import build_batch
from art_sky.training.state import TrainerState

INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not INSTALLED, reason="needs bitsandbytes")
RANK = 40  # the tiny model has matrices of more than 4096 values then, which are kept in 8 bits, and smaller ones


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def nf4(tiny_model) -> Policy:
    load = functools.partial(quantization.load, device=torch.device("cpu"))
    return Policy(tiny_model, "bfloat16", load)


def fresh(policy: Policy, rank: int = RANK, targets="all-linear") -> TrainerState:
    config = policy.new_adapter(LoRAConfig(rank=rank, target_modules=targets), "tiny")
    return TrainerState.fresh(config, {k: p.detach().clone() for k, p in policy.adapter().items()})


def batch_of(policy: Policy, model, config: TrainConfig):
    groups = make_groups(model, groups=2, size=4, turns=2, seed=2)
    return build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)


@needs_bitsandbytes
def test_a_quantised_layer_computes_what_its_dequantised_weight_does(nf4: Policy) -> None:
    fresh(nf4, 4, ["q_proj"])
    linear = {n: m for n, m in nf4._causal.named_modules() if is_quantised(m)}
    assert {n.split(".")[-1] for n in linear if "base_layer" not in n} >= {"k_proj", "down_proj"}
    assert not is_quantised(nf4._output)
    assert all(p.dtype == torch.float32 for p in nf4.adapter().values())
    generator = torch.Generator().manual_seed(0)
    for adapter in nf4.adapter().values():
        adapter.data = 0.1 * torch.randn(adapter.shape, generator=generator)
    for name in ("q_proj", "k_proj"):
        layer = next(m for n, m in nf4._causal.named_modules() if n.endswith(name))
        base = getattr(layer, "base_layer", layer)
        x = torch.randn(3, 5, base.in_features, generator=generator).bfloat16().requires_grad_()
        out = layer(x)
        (grad,) = torch.autograd.grad(out.float().sum(), x)
        weight = dense(base).detach().float()
        if base is not layer:
            low, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            weight = weight + layer.scaling["default"] * (up @ low).detach()
        expected = x.detach().float() @ weight.t()
        assert out.dtype == torch.bfloat16
        assert ((out.float() - expected).norm() / expected.norm()).item() < 0.01
        one = weight.sum(0).expand(3, 5, -1)
        assert ((grad.float() - one).norm() / one.norm()).item() < 0.01


@needs_bitsandbytes
def test_the_quantised_model_is_near_the_one_that_it_was_made_of(nf4: Policy, tiny_model) -> None:
    plain = Policy(tiny_model, "bfloat16")
    packed = sum(p.numel() for p in nf4._causal.parameters() if p.dtype == torch.uint8)
    parameters = sum(m.weight.numel() for m in plain._causal.modules() if isinstance(m, torch.nn.Linear))
    assert packed * 2 == parameters - plain._output.weight.numel()
    fresh(nf4)  # all of its linear layers are wrapped, under the names of the plain model
    named = nf4._causal.named_modules()
    matrices = {n.removesuffix(".base_layer"): m for n, m in named if type(m).__module__.startswith("bitsandbytes")}
    assert len(matrices) > 10
    for name, layer in matrices.items():
        weight = plain._causal.get_submodule(name).weight.float()
        # What rounding normally distributed values to NF4 in blocks of 64 costs.
        assert 0.05 < ((dense(layer).float() - weight).norm() / weight.norm()).item() < 0.12, name
    ids = torch.arange(1, 40)[None]
    arguments = (ids, torch.ones_like(ids), torch.arange(39)[None])
    with torch.no_grad():
        ours, theirs = (p.hidden(*arguments).float() for p in (nf4, plain))
    assert 0 < ((ours - theirs).norm() / theirs.norm()).item() < 0.5


@needs_bitsandbytes
async def test_engines_get_the_numbers_that_the_trainer_computes_with(nf4: Policy, tiny_model, tmp_path) -> None:
    made = await quantization.dense_copy(tiny_model, tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert {f.name for f in made.iterdir()} >= {f.name for f in tiny_model.iterdir()}
    fresh(nf4)
    dense_weights = {n.replace(".base_layer", ""): dense(m) for n, m in nf4._causal.named_modules() if is_quantised(m)}
    copied = safetensors.torch.load_file(made / "model.safetensors")
    assert len(dense_weights) == 28 and copied["model.norm.weight"].dtype == torch.bfloat16
    for name, weight in dense_weights.items():
        assert torch.equal(copied[f"{name}.weight"], weight), name
    ids = torch.arange(1, 40)[None]
    arguments = (ids, torch.ones_like(ids), torch.arange(39)[None])
    with torch.no_grad():
        trained, sampled, plain = (
            p.hidden(*arguments).float() for p in (nf4, Policy(made, "bfloat16"), Policy(tiny_model, "bfloat16"))
        )
    assert (trained - sampled).norm() < 0.01 * (trained - plain).norm()
    began = (made / "model.safetensors").stat().st_mtime_ns
    assert await quantization.dense_copy(tiny_model, tmp_path, {}) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == began
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with pytest.raises(ArtSkyError, match=r"could not be quantised for the engine: .*; mend that, or use"):
        await quantization.dense_copy(tmp_path / "broken", tmp_path, {})


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["native", "trl"])
def test_8_bit_updates_are_near_those_in_float32(kind, tiny_model) -> None:
    policy = Policy(tiny_model, "float32")
    config = TrainConfig(learning_rate=1e-3)
    batch = batch_of(policy, tiny_model, config)
    start = fresh(policy)
    train = trl.train if kind == "trl" else trainer.train
    found = {}
    for optimizer in ("adamw", "adamw_8bit"):
        state = copy.deepcopy(start)
        state.optimizer = optimizer
        for _ in range(3):
            train(policy, state, batch, config, lambda *_: None)
        found[optimizer] = copy.deepcopy(state)
    exact, eight = found["adamw"], found["adamw_8bit"]
    sizes = {v.dtype: v.numel() >= 4096 for v in eight.exp_avg.values()}
    assert sizes == {torch.uint8: True, torch.float32: False}
    moved = sum((exact.adapter[k] - v).norm() for k, v in start.adapter.items())
    apart = sum((exact.adapter[k] - v).norm() for k, v in eight.adapter.items())
    assert 0 < apart < 0.2 * moved
    # Back to float32, whose moments are near those that never were in 8 bits.
    eight.optimizer = "adamw"
    train(policy, eight, batch, config, lambda *_: None)
    train(policy, exact, batch, config, lambda *_: None)
    assert not eight.scales
    for k, v in exact.exp_avg.items():
        assert (eight.exp_avg[k] - v).norm() < 0.1 * v.norm(), k


@needs_bitsandbytes
@pytest.mark.parametrize(("kind", "processes"), [("native", 1), ("native", 2), ("trl", 1)])
async def test_qlora_learns_and_resumes_bit_for_bit(kind, processes, tiny_model, tmp_path) -> None:
    settings = TrainerConfig(kind=kind, processes=processes, optimizer="adamw_8bit", quantization="nf4")
    path = tmp_path / "batch"
    path.write_bytes(encode_batch(make_groups(tiny_model, groups=2, size=4, seed=1)))
    losses = []

    async def run(start: int, folder, parent) -> None:
        process = TrainerProcess(tiny_model, "bfloat16", processes, tmp_path / "trainer.log", settings=settings)
        try:
            if parent is None:
                parent = folder / "0"
                await process.init(InitTask(base_model="tiny", lora=LoRAConfig(rank=RANK), out_dir=str(parent)))
            for k in range(start, 3):
                out = folder / str(k + 1)
                config = TrainConfig(learning_rate=1e-2) if kind == "trl" or k == 2 else SFTConfig(learning_rate=1e-2)
                task = TrainTask(
                    request_id="r", base_model="tiny", parent_dir=str(parent), batch_path=str(path), out_dir=str(out),
                    config=config,
                )  # fmt: skip
                *_, outcome = [m async for m in process.train(task)]
                losses.append(outcome.metrics["loss"])
                parent = out
        finally:
            await process.close()

    await run(0, tmp_path / "a", None)
    if kind == "native":
        assert losses[1] < losses[0]
    await run(1, tmp_path / "b", tmp_path / "a" / "1")
    for name in (files.ADAPTER, files.OPTIMIZER, files.STATE):
        assert (tmp_path / "a" / "3" / name).read_bytes() == (tmp_path / "b" / "3" / name).read_bytes()
    kept = safetensors.torch.load_file(tmp_path / "a" / "3" / files.OPTIMIZER)
    assert {v.dtype for k, v in kept.items() if k.startswith("exp_avg")} == {torch.uint8, torch.float32}
    assert {k for k in kept if k.startswith("code.")} == {"code.exp_avg", "code.exp_avg_sq"}


@needs_bitsandbytes
def test_scales_that_do_not_fit_their_moments_are_corrupt(tiny_model, tmp_path) -> None:
    policy = Policy(tiny_model, "float32")
    config = TrainConfig(learning_rate=1e-3)
    state = fresh(policy)
    state.optimizer = "adamw_8bit"
    trainer.train(policy, state, batch_of(policy, tiny_model, config), config, lambda *_: None)
    files.save(state, tmp_path)
    assert {k: v.dtype for k, v in files.load(tmp_path).scales.items()} == dict.fromkeys(state.scales, torch.float32)
    name = next(k for k in state.scales if k.startswith("absmax."))
    state.scales[name] = state.scales[name][:-1]
    files.save(state, tmp_path)
    with pytest.raises(CorruptObject, match="scales of another size"):
        files.load(tmp_path)
    del state.scales[name]
    files.save(state, tmp_path)
    with pytest.raises(CorruptObject, match="absmax"):
        files.load(tmp_path)


def test_what_cannot_run_is_refused_before_the_model_is_read(tmp_path, monkeypatch) -> None:
    with pytest.raises(InvalidConfig, match="computes in bfloat16"):
        ServerConfig.parse({"state_dir": "x", "engine": {"dtype": "float32"}, "trainer": {"quantization": "nf4"}})
    for settings, dtype, message in (
        (TrainerConfig(quantization="nf4"), "float32", "use dtype bfloat16"),
        (TrainerConfig(kind="unsloth", quantization="nf4"), "bfloat16", "use the trainer native"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        with pytest.raises(InvalidConfig, match=message):
            quantization.check_bitsandbytes(settings, dtype, gpu=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for settings in (TrainerConfig(quantization="nf4"), TrainerConfig(optimizer="adamw_8bit")):
        with pytest.raises(InvalidConfig, match=r"pip install 'art-sky\[bnb\]'"):
            quantization.check_bitsandbytes(settings, "bfloat16", gpu=False)
    quantization.check_bitsandbytes(TrainerConfig(), "float32", gpu=False)
