"""Plans: every token once, every ancestor seen once, within the budget."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_sky.training.attention import PackedRow
from art_sky.training.rows import Segment, plan
from art_sky.training.sequences import TokenSequence

CPU = torch.device("cpu")
GROUPS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=7), min_size=1, max_size=3
)


def sequence(ids: list[int], group: int, trained: set[int] | None = None) -> TokenSequence:
    """Trained is what is at the places `trained`, by default all after the first token."""
    n = len(ids)
    sampled = np.isin(np.arange(n), list(trained)) if trained else np.arange(n) > 0
    yes, one = np.ones(n, np.bool_), np.ones(n, np.float32)
    return TokenSequence(np.array(ids, np.int32), -one, sampled, one, yes, ~yes, group, 0, 1.0)


def ancestors(segment: Segment, above: list[Segment], at: int) -> list[int]:
    """The ids that the token at a place of a packed row sees, by spans and trunks, itself last."""
    (tree,) = [t for t in segment.trees if t.start <= at < t.end]
    seen = [i for row, n in zip(above, tree.trunk, strict=True) for i in row.ids[0, :n]]
    for span in segment.spans:
        if span.start <= at < span.end:
            seen += segment.ids[0, span.start : min(span.stop, at + 1)].tolist()
    return [int(i) for i in seen]


def walk(segments: list[Segment], above: tuple[Segment, ...] = ()):
    for s in segments:
        yield s, list(above)
        yield from walk(s.children, (*above, s))


@settings(max_examples=300, deadline=None)
@given(GROUPS, st.integers(1, 40), st.data())
def test_every_trained_token_is_predicted_once_after_exactly_its_prefix(groups, budget, data):
    sequences = []
    for g, group in enumerate(groups):
        for ids in group:
            places = st.sets(st.integers(1, len(ids) - 1), min_size=1)
            sequences.append(sequence(ids, g, data.draw(places)))
    expected = [s.ids[:t].tolist() for s in sequences for t in np.flatnonzero(s.sampled)]
    found = {}
    unique = {(s.group, *s.ids[:t]) for s in sequences for t in range(1, np.flatnonzero(s.sampled)[-1] + 1)}
    longest = max(map(len, expected))
    segments = plan(sequences, budget, True)
    for segment, above in walk(segments):
        assert segment.packed and segment.unpadded == segment.ids.size
        alive = segment.unpadded + sum(a.unpadded for a in above)
        assert alive <= max(budget, longest + max(budget // 2, 1))
        for token, at in zip(segment.tokens, segment.sources, strict=True):
            assert token not in found
            found[token] = ancestors(segment, above, at)
            assert segment.positions[0, at] == len(found[token]) - 1
    assert [found[i] for i in range(len(expected))] == expected
    assert sum(s.unpadded for s, _ in walk(segments)) == len(unique)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(1, 40))
def test_without_sharing_rows_are_sequences_padded_on_the_right(groups, budget):
    sequences = [sequence(ids, g) for g, group in enumerate(groups) for ids in group]
    found = {}
    for segment in plan(sequences, budget, False):
        rows, length = segment.ids.shape
        assert not segment.packed and not segment.children
        assert rows == 1 or rows * length <= budget
        for token, at in zip(segment.tokens, segment.sources, strict=True):
            row, place = divmod(int(at), length)
            found[token] = segment.ids[row, : place + 1].tolist()
    expected = [s.ids[:t].tolist() for s in sequences for t in range(1, len(s))]
    assert [found[i] for i in range(len(expected))] == expected


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(4, 40), st.sampled_from([None, 1, 2, 3, 5]), st.sampled_from([0, 10, 2048]))
def test_rectangles_hold_every_visible_pair_once(groups, budget, window, call_pairs):
    import art_sky.training.attention as attention

    sequences = [sequence(ids, g) for g, group in enumerate(groups) for ids in group]
    before, attention._CALL_PAIRS = attention._CALL_PAIRS, call_pairs
    try:
        check_rectangles(plan(sequences, budget, True), [], window)
    finally:
        attention._CALL_PAIRS = before


def check_rectangles(segments: list[Segment], above: list[PackedRow], window: int | None) -> None:
    for segment in segments:
        row = PackedRow(segment, above, CPU)
        offsets = np.cumsum([0, *(a.segment.unpadded for a in above)])
        seen = np.zeros((segment.unpadded, int(offsets[-1]) + segment.unpadded), np.int64)
        diagonals = np.zeros(segment.unpadded, np.int64)
        for r in row.rectangles(window):
            visible = torch.ones(r.q1 - r.q0, r.k1 - r.k0, dtype=torch.bool) if r.visible is None else r.visible
            visible = visible.tril() if r.causal else visible
            level = len(above) if r.level is None else r.level
            seen[r.q0 : r.q1, offsets[level] + r.k0 : offsets[level] + r.k1] += visible.numpy()
            if r.diagonal:
                diagonals[r.q0 : r.q1] += 1
                assert visible.any(1).all()
        depth = np.concatenate([*(a.segment.positions[0] for a in above), segment.positions[0]])
        for q in range(segment.unpadded):
            (tree,) = [t for t in segment.trees if t.start <= q < t.end]
            own = [k for s in segment.spans if s.start <= q < s.end for k in range(s.start, min(s.stop, q + 1))]
            keys = [offsets[i] + k for i, n in enumerate(tree.trunk) for k in range(n)]
            keys += [offsets[-1] + k for k in own]
            keys = [k for k in keys if window is None or segment.positions[0, q] - depth[k] < window]
            assert np.flatnonzero(seen[q]).tolist() == keys
        assert seen.max() == 1 and (diagonals == 1).all()
        check_rectangles(segment.children, [*above, row], window)


def test_a_shared_prompt_is_run_once_and_its_branches_hang_on_it_when_they_exceed_the_budget():
    prompt = list(range(40))
    sequences = [sequence([*prompt, 50 + i, i, 0], g, {41, 42}) for g in range(2) for i in range(8)]
    assert [s.unpadded for s in plan(sequences, 4096, True)] == [112]
    assert [s.unpadded for s in plan(sequences, 60, True)] == [56, 56]
    trunks = plan(sequences, 48, True)
    assert [(t.unpadded, [c.unpadded for c in t.children]) for t in trunks] == [(40, [12, 4])] * 2
    assert {s.ids.shape for s in plan(sequences, 4096, False)} == {(16, 42)}


def test_what_nothing_is_predicted_from_is_left_out():
    (segment,) = plan([sequence([1, 2, 3, 4, 5, 6], 0, {2, 3})], 100, True)
    assert segment.ids.tolist() == [[1, 2, 3]]
