"""The step on tiny models: exact against plain Hugging Face + PEFT, whatever the micro-batches."""

from __future__ import annotations

import copy
import json
import math

import peft
import pytest
import safetensors.torch
import torch
from training.make_batch import make_group, make_groups, make_trajectory, sample
from transformers import AutoModelForCausalLM

from art_sky.config import LoRAConfig, TrainConfig
from art_sky.errors import BaseMismatch, CorruptObject, InvalidConfig, InvalidInput, TrainFailed
from art_sky.training import passes
from art_sky.training import state as files
from art_sky.training.lora import LoRALinear
from art_sky.training.model import Policy
from art_sky.training.objective import PolicyObjective, make_parts, prepare
from art_sky.training.rows import plan
from art_sky.training.sequences import build_batch
from art_sky.training.tokens import TokenTable
from art_sky.training.trainer import train

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy(tiny_model):
    return Policy(tiny_model, "float32")


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return Policy(tiny_llama, "float32")


def random_adapter(policy: Policy, scale: float = 0.05, **lora) -> files.TrainerState:
    """An adapter that does something: B is not zero."""
    config = policy.new_adapter(LoRAConfig(**{"rank": 4, "seed": 3, **lora}), "tiny")
    generator = torch.Generator().manual_seed(7)
    for p in policy.adapter().values():
        p.data += torch.randn(p.shape, generator=generator) * scale
    return files.TrainerState.fresh(config, {k: p.detach().clone() for k, p in policy.adapter().items()})


def batch_of(policy: Policy, groups: list, **options):
    config = TrainConfig(**options)
    return build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)


def gradient(policy: Policy, state, batch, config: TrainConfig, share: bool):
    """([P] the flat gradient, the loss, the number of passes) of the batch's one part."""
    policy.load_adapter(state.adapter_config, state.adapter)
    (part,) = make_parts(batch.sequences, config, share)

    def score(segments, table):
        return passes.score(policy, segments, table, lambda: None)

    if config.kl_penalty_coef:
        with policy.base_only():
            part.reference = score(part.segments, part.table)
    prepare([part], config, score)
    objective = PolicyObjective(part, config, score)
    passes.backward(policy, part.segments, part.table, objective, lambda: None)
    made = torch.cat([p.grad.flatten() for p in policy.adapter().values()])
    for p in policy.adapter().values():
        p.grad = None
    return made, objective.loss, sum(1 for s in part.segments for _ in s.walk())


def reference_gradient(model, folder, batch, config: TrainConfig):
    """Plain rows through stock PEFT autograd, one sequence at a time, the loss written out."""
    lm = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder / "adapter", is_trainable=True
    ).eval()
    count = {}
    for s in batch.sequences:
        count[s.trajectory, s.group] = count.get((s.trajectory, s.group), 0) + s.trained
    loss = torch.zeros(())
    for s in batch.sequences:
        at = s.sampled.nonzero()[0]
        logp = plain_logprobs(lm, s, at)
        old = torch.where(torch.tensor(s.comparable)[at], torch.tensor(s.logprobs)[at], logp.detach())
        ratio = (logp - old).exp()
        if config.loss_fn == "cispo":
            each = -ratio.detach().clamp(0, 5) * s.advantage * logp
            weight = 1 / sum(count.values())
        else:
            each = -torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.28) * s.advantage)
            weight = 1 / (len(count) * count[s.trajectory, s.group])
        if config.kl_penalty_coef:
            with torch.no_grad(), lm.disable_adapter():
                base = plain_logprobs(lm, s, at)
            d = base - logp
            each = each + config.kl_penalty_coef * (d.exp() - d - 1)
        loss = loss + weight * each.sum()
    loss.backward()
    named = {n.replace(".default.", "."): p for n, p in lm.named_parameters() if p.requires_grad}
    return torch.cat([named[n].grad.flatten() for n in sorted(named)]), float(loss.detach())


def plain_logprobs(lm, s, at):
    ids = torch.tensor(s.ids, dtype=torch.long)
    logits = lm(input_ids=ids[None]).logits[0, at - 1] / torch.tensor(s.temperature)[at, None]
    return logits.log_softmax(-1).gather(1, ids[at, None])[:, 0]


def mixed_batch(model):
    """Several turns, temperatures, a greedy and a non-comparable choice, two histories, uneven lengths."""
    groups = make_groups(model, groups=2, size=4, turns=2, temperature=0.8, seed=1)
    prompt = groups[0]["trajectories"][0]["messages_and_choices"][1]["prompt_token_ids"]
    hot = sample(model, prompt, 4, 1.3, 5)
    off = sample(model, prompt, 5, 1.0, 6)
    off["sampling"]["comparable"] = False
    greedy = sample(model, prompt, 3, 0.0, 7)
    groups.append(
        make_group([make_trajectory([hot], 1.0, [[off]]), make_trajectory([greedy], 0.0), make_trajectory([hot], 0.4)])
    )
    return groups


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(loss_fn="cispo"),
        TrainConfig(loss_fn="ppo", kl_penalty_coef=0.3),
    ],
    ids=["cispo", "ppo+kl"],
)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_gradient_equals_plain_peft_for_every_split(kind, config, policy, llama, tiny_model, tiny_llama, tmp_path):
    ours, model = (policy, tiny_model) if kind == "qwen3" else (llama, tiny_llama)
    batch = batch_of(ours, mixed_batch(model))
    state = random_adapter(ours)
    files.save(state, tmp_path)
    expected, loss = reference_gradient(model, tmp_path, batch, config)
    assert expected.norm() > 0
    splits = set()
    for budget, share in ((4096, True), (4096, False), (100, True), (100, False), (16, False)):
        options = config.model_copy(update={"micro_batch_tokens": budget})
        made, value, count = gradient(ours, state, batch, options, share)
        splits.add(count)
        assert ((made - expected).norm() / expected.norm()).item() < 1e-5, (budget, share)
        assert value == pytest.approx(loss, abs=1e-5)
    assert len(splits) >= 4


def test_logprobs_and_entropy_agree_with_a_plain_forward(policy, tiny_model, tmp_path):
    state = random_adapter(policy, rank=8, alpha=24)
    files.save(state, tmp_path)
    lm = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    batch = batch_of(policy, make_groups(tiny_model, groups=3, size=3, turns=2, tokens=90, temperature=0.8))
    table = TokenTable.of(batch.sequences)
    segments = plan(batch.sequences, 4096, True)
    seen = {}

    def watch(tokens, logp, entropy):
        seen.update(zip(tokens.tolist(), zip(logp.tolist(), entropy.tolist(), strict=True), strict=True))
        return logp.sum()

    passes.backward(policy, segments, table, watch, lambda: None)
    with policy.base_only():
        base = passes.score(policy, segments, table, lambda: None)
    full, plain = [], []
    for s in batch.sequences:
        at = torch.from_numpy(s.sampled).nonzero()[:, 0]
        ids = torch.from_numpy(s.ids).long()
        with torch.no_grad():
            full.append((lm(input_ids=ids[None]).logits[0, at - 1] / 0.8).log_softmax(-1))
            with lm.disable_adapter():
                plain.append(plain_logprobs(lm, s, at))
    full = torch.cat(full)
    logp, entropy = (torch.tensor([seen[i][j] for i in range(len(table))]) for j in (0, 1))
    assert len(full) == len(seen) > 256
    torch.testing.assert_close(logp, full.gather(1, table.ids[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=0, atol=1e-4)
    torch.testing.assert_close(base, torch.cat(plain), rtol=0, atol=1e-5)
    assert (base - logp).abs().max() > 1e-2
    for p in policy.adapter().values():
        p.grad = None


def test_bfloat16_adapter_layers_compute_what_peft_computes(tiny_model):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    lm = peft.get_peft_model(lm, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.0))
    layer = next(m for m in lm.modules() if isinstance(m, peft.tuners.lora.Linear))
    layer.lora_B["default"].weight.data.normal_(0, 0.1)
    x = torch.randn(2, 7, layer.in_features, dtype=torch.bfloat16)
    results = []
    for ours in (False, True):
        inputs = x.clone().requires_grad_()
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        a.grad = b.grad = None
        out = LoRALinear.apply(inputs, layer.base_layer, a, b, 2.0) if ours else layer(inputs)
        (out.float() ** 2).sum().backward()
        results.append((out, inputs.grad, a.grad.clone(), b.grad.clone()))
    for theirs, mine in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert torch.equal(results[0][0], results[1][0])


def test_sampler_mismatch_and_metrics(policy, tiny_model):
    config = policy.new_adapter(LoRAConfig(), "tiny")
    state = files.TrainerState.fresh(config, policy.adapter())
    groups = make_groups(tiny_model, groups=3, size=6, tokens=20, temperature=1.3, seed=2)
    metrics = train(policy, state, batch_of(policy, groups), TrainConfig(kl_penalty_coef=0.1), lambda *_: None)
    assert metrics["policy/sampler_mismatch_abs"] < 1e-4
    assert abs(metrics["policy/sampler_mismatch_k3"]) < 1e-6
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/clip_fraction"] == 0
    assert 0 < metrics["policy/entropy"] < math.log(policy.vocab_size) + 0.1
    assert metrics["data/tokens_computed"] < metrics["data/tokens_total"]
    assert metrics["reward"] == pytest.approx(
        sum(t["reward"] for g in groups for t in g["trajectories"]) / 18, abs=1e-9
    )
    assert all(type(v) is float and math.isfinite(v) for v in metrics.values())
    assert state.updates == 1


@pytest.mark.parametrize("loss_fn", ["cispo", "ppo"])
def test_updates_raise_what_was_rewarded(loss_fn, policy, tiny_model):
    config = policy.new_adapter(LoRAConfig(), "tiny")
    state = files.TrainerState.fresh(config, {k: p.detach().clone() for k, p in policy.adapter().items()})
    groups = make_groups(tiny_model, groups=2, size=8, tokens=8, reward=lambda ids: sum(i % 2 for i in ids) / len(ids))
    batch = batch_of(policy, groups)
    # PPO's loss is minus the (bounded) gain in expected advantage: it judges both.
    before = train(policy, copy.deepcopy(state), batch, TrainConfig(loss_fn="ppo"), lambda *_: None)["loss"]
    for _ in range(4):
        train(policy, state, batch, TrainConfig(loss_fn=loss_fn, learning_rate=1e-3), lambda *_: None)
    after = train(policy, copy.deepcopy(state), batch, TrainConfig(loss_fn="ppo"), lambda *_: None)["loss"]
    assert after < before - 0.05


def test_sequences_without_advantage_are_left_out_of_the_work_but_not_of_the_mean(policy, tiny_model):
    state = random_adapter(policy)
    c = [sample(tiny_model, [5, 6, 7], 4, 1.0, s) for s in range(3)]
    group = make_group([make_trajectory([x], r) for x, r in zip(c, (0.0, 0.5, 1.0), strict=True)])
    metrics = train(policy, copy.deepcopy(state), batch_of(policy, [group]), TrainConfig(), lambda *_: None)
    assert metrics["data/sequences_without_advantage"] == 1
    assert metrics["data/tokens_trained"] == 12
    assert metrics["data/tokens_computed"] <= 14
    with_kl = train(
        policy, copy.deepcopy(state), batch_of(policy, [group]), TrainConfig(kl_penalty_coef=0.1), lambda *_: None
    )
    assert with_kl["data/tokens_computed"] > metrics["data/tokens_computed"]


def test_adapter_files_are_pefts_own(policy, tiny_model, tmp_path):
    state = random_adapter(policy)
    files.save(state, tmp_path / "ours")
    lm = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "ours/adapter")
    lm.save_pretrained(tmp_path / "theirs")
    ours = safetensors.torch.load_file(tmp_path / "ours" / files.ADAPTER)
    theirs = safetensors.torch.load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    config = json.loads((tmp_path / "ours" / files.ADAPTER_CONFIG).read_text())
    assert (config["r"], config["peft_type"], config["base_model_name_or_path"]) == (4, "LORA", "tiny")
    again = files.load(tmp_path / "ours")
    files.save(again, tmp_path / "again")
    for name in (files.ADAPTER, files.ADAPTER_CONFIG, files.OPTIMIZER, files.STATE):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_going_on_from_files_equals_going_on_in_memory_bit_for_bit(policy, tiny_model, tmp_path):
    groups = [make_groups(tiny_model, groups=2, size=4, seed=s) for s in range(4)]
    config = TrainConfig(learning_rate=1e-2, weight_decay=0.1)
    in_memory = random_adapter(policy)
    files.save(in_memory, tmp_path)
    for g in groups:
        train(policy, in_memory, batch_of(policy, g), config, lambda *_: None)
    for g in groups:
        step = files.load(tmp_path)
        random_adapter(policy, 1.0)  # whatever was in the model before
        train(policy, step, batch_of(policy, g), config, lambda *_: None)
        files.save(step, tmp_path)
    from_files = files.load(tmp_path)
    assert from_files.updates == in_memory.updates == 4
    for part in ("adapter", "exp_avg", "exp_avg_sq"):
        for name, tensor in getattr(in_memory, part).items():
            assert torch.equal(tensor, getattr(from_files, part)[name]), (part, name)


def test_the_same_seed_makes_the_same_adapter_in_both_dtypes(tiny_model, policy):
    policy.new_adapter(LoRAConfig(seed=5), "tiny")
    one = {k: p.detach().clone() for k, p in policy.adapter().items()}
    other = Policy(tiny_model, "bfloat16")
    other.new_adapter(LoRAConfig(seed=5), "tiny")
    two = other.adapter()
    assert all(p.dtype == torch.float32 for p in two.values())
    assert all(torch.equal(one[k], two[k]) for k in one)
    other.new_adapter(LoRAConfig(seed=6), "tiny")
    assert not all(torch.equal(one[k], p) for k, p in other.adapter().items())


def test_nan_is_refused(policy, tiny_model):
    state = random_adapter(policy)
    name = next(iter(state.adapter))
    state.adapter[name] = torch.full_like(state.adapter[name], math.nan)
    with pytest.raises(TrainFailed, match="nothing was committed"):
        train(policy, state, batch_of(policy, make_groups(tiny_model)), TrainConfig(), lambda *_: None)


def test_lora_targets_must_be_linear_layers_inside_the_model(policy):
    for targets in (["no_such_layer"], ["embed_tokens"], ["lm_head"]):
        with pytest.raises(InvalidConfig, match=targets[0]):
            policy.new_adapter(LoRAConfig(target_modules=targets), "tiny")
    policy.new_adapter(LoRAConfig(target_modules=["q_proj"]), "tiny")
    assert len(policy.adapter()) == 8


def test_a_foreign_adapter_or_folder_is_refused(policy, tmp_path):
    state = random_adapter(policy)
    name = next(iter(state.adapter))
    made_for = {**state.adapter_config, "base_model_name_or_path": "somewhere/else"}
    with pytest.raises(BaseMismatch, match=r"made for the base model 'somewhere/else', .* is \(1,\) in the adapter"):
        policy.load_adapter(made_for, state.adapter | {name: torch.zeros(1)})
    with pytest.raises(BaseMismatch, match="is not there in the adapter"):
        policy.load_adapter(made_for, {k: v for k, v in state.adapter.items() if k != name})
    with pytest.raises(BaseMismatch, match="c_attn"):
        policy.load_adapter({**made_for, "target_modules": ["c_attn"]}, state.adapter)
    with pytest.raises(CorruptObject, match="cannot be read"):
        files.load(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        Policy(tmp_path, "float32")


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="more to its logits"):
        Policy(tmp_path, "float32")
