"""A run that was stopped goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_run import TRAIN, choices, files_of, make_backend, make_model, manifests, sample, stored

import art_sky as art
from art_sky.store.batches import decode_batch


async def test_k_steps_a_restart_and_k_more_equal_2k_steps_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    async with make_backend(whole) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        for step in range(4):
            await model.train(await sample(model, seed=step, groups=2), config=TRAIN)
    store = stored(whole)
    batches = [decode_batch(store.read_blob(m.batch)) for m in manifests(whole) if m.batch]
    for first in (0, 2):
        async with make_backend(parts) as backend:
            model = make_model(tiny_model)
            await model.register(backend)
            assert await model.get_step() == first
            for batch in batches[first : first + 2]:
                groups = [art.TrajectoryGroup.model_validate(g) for g in batch]
                await model.train(groups, config=TRAIN)
    assert files_of(parts) == files_of(whole)


async def test_trained_tokens_are_those_that_were_sampled(tiny_model: Path, run_path: Path) -> None:
    """Unchanged weights: the trainer's logprobs are the sampler's, over several turns in one sequence each."""
    async with make_backend(run_path) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        await model.train(await sample(model, seed=0), config=TRAIN)
        groups = await sample(model, seed=1, turns=3)
        result = await model.train(groups, config=TRAIN)
    metrics = result.metrics
    assert metrics["policy/sampler_mismatch_abs"] < 1e-4
    assert abs(metrics["policy/sampler_mismatch_mean"]) < 1e-4
    sampled = sum(len(c.token_ids) for g in groups for t in g for c in choices(t))
    assert metrics["data/tokens_trained"] == sampled


async def test_skipped_batches_are_steps(tiny_model: Path, run_path: Path) -> None:
    async with make_backend(run_path) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        groups = await sample(model, seed=0, groups=2)
        for t in (t for g in groups for t in g):
            t.reward = 0.5
        equal = await model.train(groups, config=TRAIN)
        alone = await model.train([art.TrajectoryGroup(groups[0].trajectories[:1])], config=TRAIN)
        empty = await model.train([], config=TRAIN)
        assert [(r.step, r.updates) for r in (equal, alone, empty)] == [(1, 0), (2, 0), (3, 0)]
        assert all(r.reason for r in (equal, alone, empty))
    hashes = files_of(run_path)
    assert all(files == hashes[0] for files in hashes)


async def test_bad_batches_leave_head_and_the_next_step_works(tiny_model: Path, run_path: Path) -> None:
    async with make_backend(run_path) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        groups = await sample(model, seed=0, groups=2)
        stripped = art.TrajectoryGroup.model_validate(groups[1].model_dump())
        choice = choices(stripped.trajectories[2])[0]
        choice.token_ids = None
        choice.sampling = None
        with pytest.raises(art.errors.MissingTokens, match=r"group 1.*trajectory 2"):
            await model.train([groups[0], stripped], config=TRAIN)
        assert await model.get_step() == 0
        assert (await model.train(groups, config=TRAIN)).step == 1
