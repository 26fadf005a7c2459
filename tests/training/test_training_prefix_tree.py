"""Packed prefix trees give the gradients of plain rows: layer by layer, whatever the tree and the budget."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_sky.config import LoRAConfig
from art_sky.training import passes
from art_sky.training.attention import PackedRow, _flex
from art_sky.training.model import Policy
from art_sky.training.rows import plan
from art_sky.training.sequences import TokenSequence
from art_sky.training.tokens import TokenTable

torch.set_num_threads(1)

VOCABULARY = 23
SHAPE = dict(  # noqa: C408
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.1,
)  # fmt: skip


def make(kind: str, **options):
    import transformers as t

    torch.manual_seed(0)
    if kind == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SHAPE, **options))
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, **options))
    if kind == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**SHAPE, sliding_window=6, **options))
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return t.Gemma3ForCausalLM(
        t.Gemma3TextConfig(**SHAPE, sliding_window=5, layer_types=layers, query_pre_attn_scalar=8, **options)
    )


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @cache
    def policy(kind: str) -> Policy:
        folder = Path(tmp_path_factory.mktemp(kind))
        make(kind).save_pretrained(folder)
        made = Policy(folder, "float32")
        assert made.not_packed is None
        made.new_adapter(LoRAConfig(rank=3), "tiny")
        generator = torch.Generator().manual_seed(1)
        for p in made.adapter().values():
            p.data += torch.randn(p.shape, generator=generator) * 0.05
        return made

    return policy


def sequence(ids: list[int], sampled: np.ndarray, group: int, trajectory: int) -> TokenSequence:
    n = len(ids)
    yes, temperature = np.ones(n, np.bool_), np.full(n, 0.7 + 0.3 * (trajectory % 2), np.float32)
    return TokenSequence(
        np.array(ids, np.int32), np.full(n, -1, np.float32), sampled, temperature, yes, ~yes, group, trajectory, 0.0
    )


@st.composite
def groups(draw) -> list[TokenSequence]:
    """Dialogues that fork, are repeated, begin others, consist of two tokens, or have a second history."""
    made = []
    for group in range(draw(st.integers(1, 2))):
        known: list[list[int]] = [[]]
        for trajectory in range(draw(st.integers(1, 6))):
            for _history in range(draw(st.integers(1, 2))):
                start = draw(st.sampled_from(known))
                keep = draw(st.integers(0, len(start)))
                seed, length = draw(st.integers(0, 5)), draw(st.integers(0, 25))
                ids = start[:keep] + np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
                ids = ids if len(ids) > 1 else [1, 2]
                known.append(ids)
                first = draw(st.integers(1, len(ids) - 1))
                sampled = (np.arange(len(ids)) >= first) & (np.arange(len(ids)) % draw(st.integers(2, 9)) != 0)
                sampled[first] = True
                made.append(sequence(ids, sampled, group, trajectory))
    return made


def gradients(policy: Policy, sequences: list[TokenSequence], budget: int, share: bool) -> dict[str, torch.Tensor]:
    table = TokenTable.of(sequences)
    weight = 0.5 + torch.rand(len(table), generator=torch.Generator().manual_seed(2))
    segments = plan(sequences, budget, share)
    passes.backward(policy, segments, table, lambda t, logp, _: (weight[t] * logp).sum(), lambda: None)
    found = {k: p.grad.clone() for k, p in policy.adapter().items()}
    for p in policy.adapter().values():
        p.grad = None
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3", "mistral"])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequences=groups())
def test_gradients_equal_those_of_plain_rows(load, kind, sequences):
    policy = load(kind)
    expected = gradients(policy, sequences, 4096, share=False)
    for budget in (4096, 40, 16):
        found = gradients(policy, sequences, budget, share=True)
        largest = max(g.norm() for g in expected.values())
        for name, gradient in expected.items():
            # Of one token alone, queries and keys have the gradient 0: there only rounding is to be seen.
            size = gradient.norm() if gradient.norm() > 0.01 * largest else largest
            assert (found[name] - gradient).norm() <= 1e-5 * size, (name, budget)


def test_a_deep_tree_and_long_windows(load):
    """Six turns that fork at the third, with spans longer than the window and than the masks' blocks."""
    draw = np.random.default_rng(3)
    trunk = draw.integers(0, VOCABULARY, 90).tolist()
    sequences = []
    for branch in range(4):
        ids = trunk + draw.integers(0, VOCABULARY, 60 + branch).tolist()
        sequences.append(sequence(ids, np.arange(len(ids)) % 15 > 7, 0, branch))
    for kind in ("qwen3", "gemma3"):
        policy = load(kind)
        expected = gradients(policy, sequences, 4096, share=False)
        for budget in (4096, 120):
            found = gradients(policy, sequences, budget, share=True)
            assert all((found[k] - g).norm() <= 1e-5 * g.norm() for k, g in expected.items())


def test_scores_equal_those_of_plain_rows_in_bfloat16(tmp_path):
    make("qwen3").save_pretrained(tmp_path)
    policy = Policy(tmp_path, "bfloat16")
    assert policy.not_packed is None
    policy.new_adapter(LoRAConfig(rank=3), "tiny")
    trunk = list(range(20))
    sequences = [sequence([*trunk, i, *range(i, 20)], np.arange(41 - i) > 19, 0, i) for i in range(4)]
    table = TokenTable.of(sequences)
    expected, *found = (
        passes.score(policy, plan(sequences, budget, share), table, lambda: None)
        for budget, share in ((999, False), (999, True), (30, True))
    )
    for f in found:
        assert (f - expected).abs().mean() < 0.05
    assert expected.std() > 0.05


@pytest.mark.parametrize("window", [None, 5])
def test_the_block_mask_of_gpus_sees_what_the_rectangles_see(window):
    draw = np.random.default_rng(0)
    trunk = draw.integers(0, 9, 12).tolist()
    sequences = [sequence([*trunk, i, *range(i, 9)], np.arange(22 - i) > 0, 0, i) for i in range(5)]
    (top,) = plan(sequences, 30, True)
    assert top.children
    parent = PackedRow(top, [], torch.device("cpu"))
    for row in (parent, PackedRow(top.children[0], [parent], torch.device("cpu"))):
        n = row.segment.unpadded
        q, k, v = (torch.randn(1, h, n, 8) for h in (4, 2, 2))
        above = [torch.randn(1, 2, a.segment.unpadded, 8) for a in row.above for _ in "kv"]
        from art_sky.training.attention import _Rectangles

        expected = _Rectangles.apply(q, k, v, row.rectangles(window), 0.3, *above)
        torch.testing.assert_close(_flex(q, k, v, above, row.block_mask(window), 0.3), expected)


def test_a_model_that_cannot_be_packed_falls_back_to_plain_rows(tmp_path, caplog, monkeypatch):
    import art_sky.training.attention as attention

    make("qwen3").save_pretrained(tmp_path)
    right = attention._cover

    def wrong(segment):  # no token sees the trunks
        return (r for r in right(segment) if r.level is None)

    monkeypatch.setattr(attention, "_cover", wrong)
    policy = Policy(tmp_path, "float32")
    assert policy.not_packed.startswith("packed rows differ from plain ones by")
    assert "plain rows" in caplog.text
    policy.new_adapter(LoRAConfig(rank=3), "tiny")
    sequences = [sequence([1, 2, 3], np.array([False, True, True]), 0, 0)]
    assert all(g.isfinite().all() for g in gradients(policy, sequences, 64, share=False).values())


def test_layers_that_are_no_attention_are_not_packed(tmp_path):
    from transformers import Lfm2Config, Lfm2ForCausalLM

    shape = Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    Lfm2ForCausalLM(shape).save_pretrained(tmp_path)
    assert Policy(tmp_path, "float32").not_packed == "its layers of conv, full_attention cannot be packed"


def test_learned_positions_are_packed_by_depth(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    assert Policy(tmp_path, "float32").not_packed is None
