from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training.make_batch import make_choice, make_group, make_trajectory

from art_sky.config import TrainConfig
from art_sky.errors import InvalidInput, InvalidReward, MissingTokens, SequenceTooLong
from art_sky.training.advantages import advantages, skip_reason
from art_sky.training.choices import check_groups
from art_sky.training.sequences import Batch, build_batch

USER = {"role": "user", "content": "hi"}


def build(groups: list, context_length: int = 64, **options) -> Batch:
    return build_batch(groups, TrainConfig(**options), vocab_size=100, context_length=context_length)


def pair(items: list, more: list | None = None) -> list:
    """A batch of one group whose first trajectory is the one under test."""
    other = make_trajectory([make_choice([9], [9], [-1.0])], 0.0)
    return [make_group([make_trajectory(items, 1.0, more), other])]


def first(batch: Batch) -> list:
    return [s for s in batch.sequences if s.trajectory == 0]


def test_turns_extend_and_rewritten_history_splits():
    a = make_choice([1, 2], [3, 4], [-0.5, -0.25], temperature=0.7)
    b = make_choice([1, 2, 3, 4, 5], [6], [-2.0], temperature=1.3, comparable=False)
    c = make_choice([1, 2, 9], [7], [-1.0], temperature=0.0, comparable=False)
    batch = build(pair([USER, a, USER, b, USER, c]))
    one, two = first(batch)
    assert one.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.sampled.tolist() == [False, False, True, True, False, True]
    assert one.temperature[[2, 5]].tolist() == [np.float32(0.7), np.float32(1.3)]
    assert one.comparable[one.sampled].tolist() == [True, True, False]
    assert np.isnan(one.logprobs).tolist() == [True, True, False, False, True, False]
    assert (two.ids.tolist(), two.temperature[-1], two.comparable[-1], two.greedy[-1]) == (
        [1, 2, 9, 7],
        1.0,
        True,
        True,
    )
    assert batch.splits == 1


def test_arrays_are_read_as_lists_are():
    def choices(ids, logprobs):
        return [
            make_choice(ids([1]), ids([2, 3]), logprobs([-0.5, -1.5])),
            make_choice(ids([1, 2, 3, 4]), ids([5]), [-1]),
        ]

    (expected,) = first(build(pair(choices(list, list))))
    groups = pair(choices(lambda v: array("i", v), lambda v: array("d", v)))
    check_groups(groups)
    (one,) = first(build(groups))
    assert one.ids.tolist() == expected.ids.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(one.logprobs, expected.logprobs)


def test_histories_are_one_sample_and_do_not_count_as_splits():
    batch = build(pair([make_choice([1], [2], [-1.0])], [[make_choice([5], [6], [-1.0])], [USER]]))
    assert [s.ids.tolist() for s in first(batch)] == [[1, 2], [5, 6]]
    assert len({s.advantage for s in first(batch)}) == 1
    assert batch.splits == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sampled_token_is_trained_once_whatever_the_dialogue(data):
    ids: list[int] = []
    items, splits, expected = [], 0, []
    for turn in range(data.draw(st.integers(1, 6))):
        token = st.lists(st.integers(0, 9), min_size=1, max_size=4)
        keep = data.draw(st.integers(0, len(ids)))
        prompt = ids[:keep] + data.draw(token)
        if turn and prompt[: len(ids)] != ids:
            splits += 1
        sampled = data.draw(token)
        logprobs = [-float(i) - 0.5 for i in range(len(sampled))]
        items += [USER, make_choice(prompt, sampled, logprobs)]
        expected.append((prompt, sampled, logprobs))
        ids = prompt + sampled
    batch = build(pair(items))
    made = first(batch)
    assert batch.splits == splits == len(made) - 1
    assert sum(s.trained for s in made) == sum(len(s) for _, s, _ in expected)
    flat_ids = [i for s in made for i in s.ids[s.sampled].tolist()]
    flat_logprobs = [p for s in made for p in s.logprobs[s.sampled].tolist()]
    assert flat_ids == [i for _, s, _ in expected for i in s]
    assert flat_logprobs == [p for _, _, p in expected for p in p]
    for prompt, sampled, _ in expected:  # each turn's context is exactly what the engine saw
        assert any(
            s.ids[: len(prompt) + len(sampled)].tolist() == prompt + sampled
            and s.sampled[len(prompt) : len(prompt) + len(sampled)].all()
            for s in made
        )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"token_ids": None}, MissingTokens, "no token_ids"),
        ({"prompt_token_ids": []}, MissingTokens, "no prompt_token_ids"),
        ({"token_logprobs": [-1.0, -1.0]}, MissingTokens, "1 token_ids but 2"),
        ({"token_logprobs": [math.nan]}, InvalidInput, "nan"),
        ({"token_logprobs": [None]}, InvalidInput, "None"),
        ({"token_ids": [100]}, InvalidInput, "vocabulary of 100"),
        ({"token_ids": [-1]}, InvalidInput, "-1 is not a token id"),
        ({"token_ids": [True]}, InvalidInput, "True is not a token id"),
        ({"token_ids": [2**40]}, InvalidInput, "is not a token id"),
        ({"token_ids": array("i", [-1])}, InvalidInput, "-1 is not a token id"),
        ({"token_ids": array("i", [100])}, InvalidInput, "vocabulary of 100"),
        ({"token_ids": array("d", [1.0])}, InvalidInput, "1.0 is not a token id"),
        ({"prompt_token_ids": array("i")}, MissingTokens, "no prompt_token_ids"),
        ({"token_logprobs": array("d", [math.inf])}, InvalidInput, "inf"),
        ({"sampling": None}, MissingTokens, "sampling"),
        ({"sampling": {"temperature": -1, "comparable": True}}, MissingTokens, "sampling"),
    ],
)
def test_a_faulty_choice_is_refused_by_its_place(change, error, words):
    faulty = make_choice([1], [2], [-1.0]) | change
    groups = [make_group([]), *pair([make_choice([1], [2], [-1.0])], [[USER, faulty]])]
    with pytest.raises(error, match=words) as e:
        build(groups)
    assert "group 1, trajectory 0, additional history 0, message 1" in str(e.value)
    if "vocabulary" not in words:
        with pytest.raises(error, match=words):
            check_groups(groups)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None, "1", True, 10**400, 1e300])
def test_a_reward_that_is_no_number_is_refused_by_its_place(reward):
    groups = [make_group([make_trajectory([], 1.0), make_trajectory([], reward)])]
    for check in (build, check_groups):
        with pytest.raises(InvalidReward, match="group 0, trajectory 1"):
            check(groups)


def test_long_sequences_are_dropped_and_counted_never_cut():
    long = make_choice(list(range(60)), [1, 2, 3, 4, 5], [-1.0] * 5)
    batch = build(pair([make_choice([1], [2], [-1.0])], [[long]]))
    assert (batch.too_long, [len(s) for s in first(batch)]) == (1, [2])
    only_long = build([make_group([make_trajectory([long], 1.0), make_trajectory([long], 0.0)])])
    assert only_long.reason() == "nothing to train on: 2 x sequence too long"
    assert build([make_group([make_trajectory([long], 1.0), make_trajectory([long], 0.0)])], 65).reason() is None


def test_long_sequences_can_be_refused_and_limited_below_the_context():
    groups = pair([make_choice([1, 2, 3], [4, 5], [-1.0] * 2)])
    assert build(groups, too_long="refuse", max_sequence_tokens=5).too_long == 0
    with pytest.raises(SequenceTooLong, match="group 0, trajectory 0: a sequence of 5 tokens is longer than 4"):
        build(groups, too_long="refuse", max_sequence_tokens=4)
    assert build(groups, max_sequence_tokens=4).too_long == 1
    assert build(groups, context_length=4, max_sequence_tokens=9).too_long == 1


def test_choices_cut_off_at_their_limit_can_be_context_only():
    a = make_choice([1, 2], [3, 4], [-0.5, -0.25]) | {"finish_reason": "length"}
    b = make_choice([1, 2, 3, 4, 5], [6], [-2.0])
    assert first(build(pair([a, b])))[0].trained == 3
    batch = build(pair([a, b]), cut_off="mask")
    (one,) = first(batch)
    assert (one.sampled.tolist(), batch.cut_off) == ([False] * 5 + [True], 1)
    only = build([make_group([make_trajectory([a], 1.0), make_trajectory([a], 0.0)])], cut_off="mask")
    assert only.reason() == "nothing to train on: 2 x choice cut off at its token limit"


def test_groups_that_teach_nothing_are_skipped_with_the_reason():
    def t(r):
        return make_trajectory([make_choice([1], [2], [-1.0])], r)

    assert build([]).reason() == "nothing to train on: the batch is empty"
    batch = build([make_group([]), make_group([t(1)], exceptions=7), make_group([t(0.5), t(0.5 + 1e-8)])])
    assert batch.sequences == []
    assert batch.reason() == "nothing to train on: 1 x all rewards equal, 1 x no trajectory, 1 x only one trajectory"
    assert (batch.exceptions, len(batch.rewards)) == (7, 3)
    silent = build([make_group([make_trajectory([USER], 1.0), make_trajectory([], 0.0)])])
    assert silent.reason() == "nothing to train on: 2 x trajectory without a sampled choice"


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=0, max_size=12),
    st.sampled_from(["group", "batch", "none"]),
    st.lists(st.floats(-1e6, 1e6), max_size=5),
)
def test_advantages_against_a_reference(rewards, scale, others):
    made = advantages(rewards, scale, [*rewards, *others])
    if len(rewards) < 2 or max(rewards) - min(rewards) < 1e-6:
        assert skip_reason(rewards) and made == [0.0] * len(rewards)
        return
    r = np.array(rewards, np.float64)
    std = {"group": r.std() + 1e-6, "batch": np.array([*rewards, *others]).std() + 1e-6, "none": 1.0}[scale]
    expected = (r - r.mean()) / std
    assert skip_reason(rewards) is None
    np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-9 * max(1, abs(r).max()))
