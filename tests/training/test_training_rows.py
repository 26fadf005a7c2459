from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from art_sky.training.rows import plan
from art_sky.training.sequences import TokenSequence


def sequence(ids: list[int], group: int) -> TokenSequence:
    n = len(ids)
    yes, one = np.ones(n, np.bool_), np.ones(n, np.float32)
    return TokenSequence(np.array(ids, np.int32), -one, yes, one, yes, ~yes, group, 0, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6), max_size=3),
    st.integers(4, 40),
    st.booleans(),
)
def test_rows_hold_every_sequence_and_each_token_sees_exactly_its_prefix(groups, budget, can_share):
    sequences = [sequence(ids, g) for g, group in enumerate(groups) for ids in group]
    micro_batches = plan(sequences, budget, can_share)
    found = []
    for micro_batch in micro_batches:
        assert len({row.mask is None for row in micro_batch.rows}) == 1
        assert len(micro_batch.rows) == 1 or len(micro_batch.rows) * micro_batch.length <= budget
        for row in micro_batch.rows:
            assert row.mask is None or len(row) <= budget or len(row.members) == 1
            mask = np.tril(np.ones((len(row),) * 2, np.bool_)) if row.mask is None else row.mask
            for member, place in zip(row.members, row.places, strict=True):
                found.append(member)
                ids = sequences[member].ids
                assert row.ids[place].tolist() == ids.tolist()
                assert row.positions[place].tolist() == list(range(len(ids)))
                for depth, at in enumerate(place):
                    assert set(np.flatnonzero(mask[at])) == set(place[: depth + 1])
    assert sorted(found) == list(range(len(sequences)))


def test_a_shared_prompt_is_run_once():
    prompt = list(range(40))
    sequences = [sequence([*prompt, 50 + g, i], g) for g in range(2) for i in range(8)]
    (micro_batch,) = plan(sequences, 4096, True)
    assert [len(row) for row in micro_batch.rows] == [49, 49]
    assert all(row.mask is None for m in plan(sequences, 4096, False) for row in m.rows)
    unlike = [sequence([i, *prompt], 0) for i in range(4)]
    assert all(row.mask is None for m in plan(unlike, 4096, True) for row in m.rows)
