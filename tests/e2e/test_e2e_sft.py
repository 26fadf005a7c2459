"""Supervised fine-tuning through the real client, server and trainer, and RL behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_run import TRAIN, files_of, make_backend, make_model, manifests, sample

import art_sky as art

SFT = art.SFTConfig(learning_rate=1e-2, batch_size=2, epochs=2)


def conversation(i: int) -> art.Trajectory:
    user = {"role": "user", "content": f"what is {i}"}
    return art.Trajectory(messages_and_choices=[user, {"role": "assistant", "content": f"a {i} is {i * 111}"}])


async def test_sft_then_rl_then_sft_again(tiny_model: Path, run_path: Path) -> None:
    examples = [conversation(i) for i in range(6)]
    async with make_backend(run_path) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        first = await model.train_sft(examples, config=SFT, request_id="warm-up")
        again = await model.train_sft(examples, config=SFT, request_id="warm-up")
        assert (first.step, first.updates, again.manifest) == (1, 6, first.manifest)
        with pytest.raises(art.errors.Conflict):
            await model.train_sft(examples[1:], config=SFT, request_id="warm-up")
        groups = await sample(model, seed=0)
        rl = await model.train(groups, config=TRAIN)
        assert (rl.step, rl.updates) == (2, 1)
        assert rl.metrics["policy/sampler_mismatch_abs"] < 1e-4  # the engine sampled with what was fine-tuned
        # What was sampled here, told by rewards: the best of each group.
        best = [max(g, key=lambda t: t.reward) for g in groups]
        kept = await backend.train_sft(model, [art.TrajectoryGroup(best)], learning_rate=1e-3)
        tokens = sum(len(t.messages_and_choices[-1].token_ids) for t in best)
        assert (kept.step, kept.metrics["data/tokens_trained"]) == (3, tokens)
        assert kept.metrics["loss"] < first.metrics["loss_first"]
        assert first.metrics["loss_last"] < first.metrics["loss_first"] - 0.5
        rows = {(r.step, r.split): r.metrics for r in await backend.history(model)}
        assert rows[1, "sft"]["loss"] == first.metrics["loss"]
    assert [m.config.get("method") for m in manifests(run_path)] == [None, "sft", None, "sft"]


async def test_a_file_broken_off_and_gone_on_with_equals_the_whole(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": conversation(i).messages_and_choices}) + "\n" for i in range(5)))

    async def train(path: Path, broken_off: bool = False) -> list[art.TrainResult]:
        async with make_backend(path) as backend:
            model = make_model(tiny_model)
            await model.register(backend)
            train_sft = model.train_sft

            async def once(*args, **options):
                result = await train_sft(*args, **options)
                raise KeyError(result.step)

            if broken_off:
                model.train_sft = once
            return await art.train_sft_from_file(
                model, file, epochs=2, peak_lr=1e-2, updates_per_step=2, request_id="file"
            )

    whole = await train(tmp_path / "whole")
    assert [(r.step, r.updates) for r in whole] == [(1, 2), (2, 2), (3, 1)]
    with pytest.raises(KeyError):
        await train(tmp_path / "parts", broken_off=True)
    assert [r.step for r in await train(tmp_path / "parts")] == [1, 2, 3]
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


async def test_bad_examples_are_named_and_nothing_is_committed(tiny_model: Path, run_path: Path) -> None:
    async with make_backend(run_path) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        mute = art.Trajectory(messages_and_choices=[{"role": "user", "content": "x"}])
        with pytest.raises(art.errors.InvalidInput, match="group 0, trajectory 1: no assistant speaks"):
            await model.train_sft([conversation(0), mute])
        thinks = conversation(1)
        thinks.messages_and_choices[1]["reasoning_content"] = "hm"
        with pytest.raises(art.errors.InvalidInput, match=r"trajectory 0, message 1: .*reasoning"):
            await model.train_sft([thinks])
        with pytest.raises(art.errors.InvalidConfig, match="2 learning rates for 1 updates"):
            await model.train_sft([conversation(0)], config=art.SFTConfig(learning_rate=[1e-3, 1e-3]))
        assert await model.get_step() == 0
        assert (await model.train_sft([conversation(0)])).step == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"prompt": "x"}', "line 2 has no list `messages`"),
        ('{"messages": [], "weight": 1}', "line 2 has weight"),
        ('{"messages": [3]}', "line 2: .*neither a message"),
    ],
)
def test_bad_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n' + line + "\n")
    with pytest.raises(art.errors.InvalidInput, match=message):
        list(art.iterate_file(file))


def test_a_file_is_shuffled_and_skipped_into_the_same_order(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    lines = [json.dumps({"messages": conversation(i).messages_and_choices}) for i in range(20)]
    file.write_text("\n".join(lines))

    def said(**options) -> list[str]:
        return [t.messages_and_choices[1]["content"] for t in art.iterate_file(file, 2, **options)]

    plain = said(seed=None)
    mixed = said(shuffle_buffer_size=5)
    assert plain[:20] == plain[20:] and mixed[:20] != mixed[20:] != plain[20:]
    assert sorted(mixed[:20]) == sorted(mixed[20:]) == sorted(plain[:20])
    assert said(shuffle_buffer_size=5, initial_skip=23) == mixed[23:]
