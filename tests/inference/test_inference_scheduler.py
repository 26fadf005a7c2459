"""Continuous batching against plain transformers and PEFT, and who runs when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inference_engines import Answer, MakeScheduler, Reference, collect, make_adapter, prompt, run, step

from art_sky.errors import Busy, InvalidInput, PromptTooLong
from art_sky.inference.protocol import GenerateRequest
from art_sky.inference.scheduler import PREFILL_TOKENS, Sequence
from art_sky.schemas import AdapterRef


def ask(prompt_ids: list[int], adapter: AdapterRef, max_tokens: int = 8, **options: object) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt_ids, adapter=adapter, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_ragged_batch_is_greedy_like_transformers(
    kind: str, tiny_model: Path, tiny_llama: Path, engine: MakeScheduler, tmp_path: Path
) -> None:
    model = {"qwen3": tiny_model, "llama": tiny_llama}[kind]
    folder = make_adapter(model, tmp_path / "adapter", 5)
    reference = Reference(model, folder)
    ref = AdapterRef(name="a@1", path=str(folder))
    prompts = [prompt(n, n) for n in (1, 2, 17, 60, 125, 300)]
    answers = run(engine(model), [ask(p, ref, 12, temperature=0) for p in prompts])
    for p, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference.greedy(p, 12)
        assert answer.end == "length"


def test_adapters_share_a_batch(tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    p = prompt(30)
    answers = run(engine(), [ask(p, a, 10, temperature=0) for a in adapters for _ in range(2)])
    for i, adapter in enumerate(adapters):
        want = Reference(tiny_model, Path(adapter.path)).greedy(p, 10)
        assert answers[2 * i].tokens == want
        assert answers[2 * i + 1].tokens == want
    assert Reference(tiny_model).greedy(p, 10) == answers[-1].tokens, "an untrained adapter is the base model"
    assert len({round(a.logprobs[0], 4) for a in answers}) == 4, "the adapters differ"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sampled_logprobs_are_the_trainers(
    temperature: float, tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    prompts = [prompt(20 + 3 * i, i) for i in range(10)]
    answers = run(engine(), [ask(p, adapters[0], 100, temperature=temperature) for p in prompts])
    reference = Reference(tiny_model, Path(adapters[0].path))
    off = []
    for p, answer in zip(prompts, answers, strict=True):
        rows = reference.logprobs(p + answer.tokens, temperature)[len(p) - 1 : -1]
        off.append(rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] - torch.tensor(answer.logprobs))
    assert torch.cat(off).numel() == 1000
    assert torch.cat(off).abs().mean() < 1e-4


def test_a_late_request_gets_its_first_token_within_two_steps(
    engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    scheduler = engine()
    answers: dict[Sequence, Answer] = {}
    for i in range(8):
        scheduler.add(ask(prompt(20, i), adapters[i % 2], 60))
    for _ in range(5):
        step(scheduler, answers)
    late = scheduler.add(ask(prompt(100), adapters[2]))
    first, second = step(scheduler, answers), step(scheduler, answers)
    assert late in first + second
    assert min(len(first), len(second)) >= 8, "the others go on meanwhile"


def test_a_short_prompt_passes_a_long_one_and_neither_starves(
    engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    scheduler = engine(context_length=512)
    answers: dict[Sequence, Answer] = {}
    long = scheduler.add(ask(prompt(500, 1), adapters[0], 4))
    step(scheduler, answers)
    short = scheduler.add(ask(prompt(40, 2), adapters[0], 4))
    before = long.computed
    assert step(scheduler, answers) == [short, long] or short in answers
    assert long.computed - before >= PREFILL_TOKENS // 2
    collect(scheduler, answers)
    assert answers[long].end == "length"


def test_equal_prompts_prefill_once(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    scheduler, p = engine(), prompt(70)
    answers = run(scheduler, [ask(p, adapters[0], 6, seed=i) for i in range(8)])
    assert scheduler.counters.tokens_prefilled == 70 + 7  # each copy computes its last prompt token
    assert sorted(a.cached for a in answers) == [0] + [69] * 7
    alone = run(engine(), [ask(p, adapters[0], 6, seed=3)])[0]
    assert answers[3].tokens == alone.tokens
    assert answers[3].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_turn_that_extends_another_prefills_only_what_is_new(
    tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    scheduler, first = engine(), prompt(40)
    turn = run(scheduler, [ask(first, adapters[0], 10)])[0]
    before = scheduler.counters.tokens_prefilled
    second = first + turn.tokens + prompt(15, 9)
    answer = run(scheduler, [ask(second, adapters[0], 12, temperature=0)])[0]
    assert answer.cached == 40 + 10 - 1  # the last sampled token was never fed
    assert scheduler.counters.tokens_prefilled - before == 15 + 1
    assert answer.tokens == Reference(tiny_model, Path(adapters[0].path)).greedy(second, 12)


def test_nothing_is_reused_across_adapters(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    scheduler, p = engine(), prompt(40)
    run(scheduler, [ask(p, adapters[0])])
    assert run(scheduler, [ask(p, adapters[1])])[0].cached == 0
    assert run(scheduler, [ask(p, adapters[0])])[0].cached == 39


def test_what_is_kept_goes_with_its_adapter(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    scheduler, p = engine(max_adapters=1), prompt(40)
    run(scheduler, [ask(p, adapters[0])])
    run(scheduler, [ask(p, adapters[1])])
    assert scheduler.adapters.names() == [adapters[1].name]
    assert run(scheduler, [ask(p, adapters[0])])[0].cached == 0


def test_requests_for_more_adapters_than_places_take_turns(
    tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    scheduler, p = engine(max_adapters=2), prompt(20)
    answers = run(scheduler, [ask(p, a, 6, temperature=0) for a in adapters])
    for adapter, answer in zip(adapters, answers, strict=True):
        assert answer.tokens == Reference(tiny_model, Path(adapter.path)).greedy(p, 6)
    assert len(scheduler.adapters.names()) == 2
    scheduler.add(ask(p, adapters[0], 6))
    scheduler.add(ask(p, adapters[1], 6))
    scheduler.step()
    with pytest.raises(Busy, match="max_adapters"):
        scheduler.load(adapters[2])


def test_a_seed_gives_a_stream_whatever_else_runs(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    request = ask(prompt(25), adapters[0], 30, seed=7)
    alone = run(engine(), [request])[0].tokens
    others = [ask(prompt(30 + i, i), adapters[i % 3], 40, seed=7 if i == 4 else None) for i in range(9)]
    assert run(engine(), [*others, request])[-1].tokens == alone
    assert run(engine(), [ask(prompt(25), adapters[0], 30, seed=8)])[0].tokens != alone
    unseeded = [ask(prompt(25), adapters[0], 30)] * 2
    first, second = run(engine(), unseeded)
    assert first.tokens != second.tokens


def test_sequences_outgrow_their_slots(tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    requests = [ask(prompt(90 + i, i), adapters[0], 350, temperature=0, seed=i) for i in range(3)]
    answers = run(engine(context_length=512), requests)
    reference = Reference(tiny_model, Path(adapters[0].path))
    for request, answer in zip(requests, answers, strict=True):
        rows = reference.logprobs(request.prompt_ids + answer.tokens)[len(request.prompt_ids) - 1 : -1]
        want = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert torch.allclose(want, torch.tensor(answer.logprobs), atol=1e-4)


def test_scarce_memory_delays_requests_and_changes_nothing(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    requests = [ask(prompt(60 + i, i), adapters[0], 150, seed=i) for i in range(6)]
    plenty = run(engine(context_length=512), requests)
    scheduler = engine(context_length=512)
    token_bytes = scheduler.cache.shape.token_bytes
    scheduler.cache.bound = 800 * token_bytes
    scarce = run(scheduler, requests)
    assert scheduler.counters.preempted > 0
    assert scheduler.cache.used <= scheduler.cache.bound
    for a, b in zip(plenty, scarce, strict=True):
        assert a.tokens == b.tokens
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_stop_tokens_end_a_sequence_and_are_part_of_it(
    tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    p = prompt(30)
    free = run(engine(), [ask(p, adapters[0], 20, seed=1)])[0].tokens
    stop = free[5]
    answer = run(engine(), [ask(p, adapters[0], 20, seed=1, stop_token_ids=[stop, 101])])[0]
    assert answer.tokens == free[: free.index(stop) + 1]
    assert answer.end == "stop"


def test_a_cancelled_request_leaves_at_once(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    scheduler = engine(max_batch=2)
    answers: dict[Sequence, Answer] = {}
    first, second, third = (scheduler.add(ask(prompt(30, i), adapters[0], 50)) for i in range(3))
    step(scheduler, answers)
    assert scheduler.waiting == [third]
    assert [e.reason for e in scheduler.cancel(first)] == ["abort"]
    assert scheduler.cancel(first) == []
    step(scheduler, answers)
    assert scheduler.running == [second, third]
    scheduler.cancel(third)
    scheduler.cancel(second)
    assert scheduler.idle and scheduler.step() == []
    assert not scheduler.cache.slabs()


def test_a_bad_adapter_fails_its_own_request_only(
    engine: MakeScheduler, adapters: list[AdapterRef], tmp_path: Path
) -> None:
    bad = AdapterRef(name="p/agent@9", path=str(tmp_path / "missing"))
    good, failed = run(engine(), [ask(prompt(20), adapters[0], 5), ask(prompt(20), bad, 5)])
    assert good.end == "length"
    assert isinstance(failed.end, InvalidInput) and "adapter_config.json" in failed.end.message


def test_an_adapter_that_overflows_fails_its_own_requests_only(
    tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef], tmp_path: Path
) -> None:
    huge = make_adapter(tiny_model, tmp_path / "huge", 6, b_std=1e30)
    bad = AdapterRef(name="p/agent@9", path=str(huge))
    scheduler = engine()
    requests = [ask(prompt(20 + i, i), bad if i % 2 else adapters[0], 30, seed=i) for i in range(4)]
    answers = run(scheduler, requests)
    alone = run(engine(), [requests[0], requests[2]])
    assert all(isinstance(a.end, InvalidInput) and "NaN" in a.end.message for a in answers[1::2])
    assert [a.tokens for a in answers[0::2]] == [a.tokens for a in alone]
    assert run(scheduler, [requests[0]])[0].tokens == alone[0].tokens


def test_requests_that_never_fit_are_refused_with_both_numbers(
    engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    scheduler = engine(context_length=512)
    with pytest.raises(PromptTooLong, match=r"512 tokens and the context length is 512"):
        scheduler.add(ask(prompt(512), adapters[0]))
    with pytest.raises(PromptTooLong, match=r"500 tokens and max_tokens 20 .* 512"):
        scheduler.add(ask(prompt(500), adapters[0], 20))
    scheduler.cache.bound = 500 * scheduler.cache.shape.token_bytes
    with pytest.raises(InvalidInput, match=r"300 tokens .* at most 256"):
        scheduler.add(ask(prompt(280), adapters[0], 20))
    with pytest.raises(InvalidInput, match=r"token 5000 .* 102"):
        scheduler.add(ask([5, 5000], adapters[0]))
    assert scheduler.idle


def test_a_request_does_not_wait_for_ever(engine: MakeScheduler, adapters: list[AdapterRef]) -> None:
    scheduler = engine(max_batch=1)
    now = 0.0
    scheduler.clock = lambda: now
    answers: dict[Sequence, Answer] = {}
    running, waiting = (scheduler.add(ask(prompt(20, i), adapters[0], 50)) for i in range(2))
    step(scheduler, answers)
    now = 601.0
    step(scheduler, answers)
    assert isinstance(answers[waiting].end, Busy)
    assert scheduler.running == [running]


def test_top_logprobs_are_of_the_distribution_sampled_from(
    tiny_model: Path, engine: MakeScheduler, adapters: list[AdapterRef]
) -> None:
    p = prompt(30)
    answer = run(engine(), [ask(p, adapters[0], 4, temperature=0.7, top_logprobs=5)])[0]
    rows = Reference(tiny_model, Path(adapters[0].path)).logprobs(p + answer.tokens, 0.7)[len(p) - 1 : -1]
    for row, top in zip(rows, answer.tops, strict=True):
        values, ids = row.topk(5)
        assert [t for t, _ in top] == ids.tolist()
        assert [v for _, v in top] == pytest.approx(values.tolist(), abs=1e-4)
