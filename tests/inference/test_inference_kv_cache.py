"""The KV cache as a machine: whatever is allocated, grown, freed and kept, rows stay whose they are."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from art_sky.inference.kv_cache import KVCache, KVShape, Slot, common_prefix

SHAPE = KVShape(layers=1, heads=1, head_dim=1, dtype=torch.float32)


def fill(slot: Slot, start: int, tokens: list[int]) -> None:
    """Writes the token ids themselves as keys and values."""
    slot.rows(len(tokens))[:, :, :, start:, 0] = torch.tensor(tokens[start:], dtype=torch.float32)
    slot.used = len(tokens)


def held(rows: torch.Tensor) -> list[int]:
    assert torch.equal(rows[0, 0], rows[0, 1])
    return rows[0, 0, 0, :, 0].int().tolist()


class Machine(RuleBasedStateMachine):
    running: Bundle[tuple[str, Slot]] = Bundle("running")
    adapter = st.sampled_from(["a@1", "a@2"])
    tokens = st.lists(st.integers(1, 2), max_size=3).flatmap(
        lambda start: st.integers(1, 500).map(lambda n: start + [3] * n)
    )

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(SHAPE, 4000 * SHAPE.token_bytes, 1000)
        self.live: dict[int, tuple[str, Slot, list[int]]] = {}
        self.next = 0

    @rule(target=running, adapter=adapter, tokens=tokens)
    def begin(self, adapter: str, tokens: list[int]) -> int:
        kept, length = self.cache.find(adapter, tokens)
        assert (kept is None) == (length == 0)
        if kept is not None:
            assert kept.adapter == adapter
            assert held(kept.data)[:length] == tokens[:length]
        slot = self.cache.allocate(len(tokens))
        self.next += 1
        if slot is not None:
            fill(slot, 0, tokens)
            self.live[self.next] = (adapter, slot, tokens)
        return self.next

    @rule(which=running, more=st.integers(1, 600))
    def grow(self, which: int, more: int) -> None:
        if which in self.live:
            adapter, slot, tokens = self.live[which]
            longer = (tokens + [4] * more)[:1000]
            if self.cache.grow(slot, len(longer)):
                fill(slot, len(tokens), longer)
                self.live[which] = (adapter, slot, longer)

    @rule(which=consumes(running), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        if which in self.live:
            adapter, slot, tokens = self.live.pop(which)
            if keep:
                self.cache.keep(adapter, tokens, slot)
            self.cache.free(slot)

    @rule(adapter=adapter)
    def forget(self, adapter: str) -> None:
        self.cache.forget(adapter)
        assert self.cache.find(adapter, [1, 3]) == (None, 0)

    @invariant()
    def every_sequence_has_its_rows(self) -> None:
        for _, slot, tokens in self.live.values():
            assert slot.slab.slots[slot.index] is slot
            assert held(slot.rows(len(tokens))) == tokens

    @invariant()
    def memory_is_counted_and_bounded(self) -> None:
        slabs = self.cache.slabs()
        kept = sum(k.data.numel() * 4 for k in self.cache._recent)
        assert self.cache.used == sum(s.bytes for s in slabs) + kept <= self.cache.bound

    @invariant()
    def slots_are_dense(self) -> None:
        slabs = self.cache.slabs()
        assert sum(len(s.slots) for s in slabs) == len(self.live)
        for length in {s.length for s in slabs}:
            *full, last = (s for s in slabs if s.length == length)
            assert all(len(s.slots) == s.capacity for s in full)
            assert 0 < len(last.slots) <= last.capacity


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_longest_request_can_grow_alone() -> None:
    for bound in (128, 300, 384, 767, 768, 5000):
        cache = KVCache(SHAPE, bound * SHAPE.token_bytes, 4096)
        slot = cache.allocate(1)
        assert slot is not None
        for tokens in range(1, cache.longest() + 1):
            assert cache.grow(slot, tokens)


def test_a_longer_sequence_replaces_what_it_extends() -> None:
    cache = KVCache(SHAPE, 4000 * SHAPE.token_bytes, 1000)
    for tokens in ([1, 2], [1, 2, 3], [1, 2], [5]):
        slot = cache.allocate(len(tokens))
        assert slot is not None
        fill(slot, 0, tokens)
        cache.keep("a", tokens, slot)
        cache.free(slot)
    assert cache.used == 4 * SHAPE.token_bytes
    assert cache.find("a", [1, 2, 9])[1] == 2


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
