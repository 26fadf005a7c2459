"""Where the keys and values of sequences live, under one bound of memory.

A running sequence has a *slot* of 128, 256, 512, ... tokens in a *slab*, one tensor for several slots of the same
length, so that decoding reads many sequences with one attention call. The slots of a length are kept dense: where
one becomes free, the last one moves into its place, and an emptied slab is given back at once. Finished sequences
are kept as tensors of exactly their length, least recently used out first, so that a later prompt that begins
alike copies rows instead of computing them. Slabs and kept sequences together never exceed the bound.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

SHORTEST = 128
_SLABS = 8  # a slab takes at most this fraction of the bound, so that lengths can be mixed


@dataclass(frozen=True)
class KVShape:
    layers: int
    heads: int  # key-value heads
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False)
class Slab:
    """`data` is [layer, key or value, slot, kv head, token, head_dim]; `slots` are its occupants in order."""

    length: int
    capacity: int
    data: torch.Tensor
    slots: list[Slot] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(eq=False)
class Slot:
    """The place of one running sequence. The cache may move it between steps; `used` tokens are worth moving."""

    slab: Slab
    index: int
    used: int = 0

    def rows(self, tokens: int) -> torch.Tensor:
        """[layer, key or value, kv head, tokens, head_dim], a view."""
        return self.slab.data[:, :, self.index, :, :tokens]


@dataclass(eq=False)
class Kept:
    """A finished sequence: `data` is [layer, key or value, kv head, len(tokens), head_dim]."""

    adapter: str
    tokens: list[int]
    data: torch.Tensor


class KVCache:
    def __init__(self, shape: KVShape, bound_bytes: int, context_length: int) -> None:
        self.shape = shape
        self.bound = bound_bytes
        self.used = 0
        self._slabs: dict[int, list[Slab]] = {}
        self._recent: OrderedDict[Kept, None] = OrderedDict()
        self._sorted: dict[str, list[Kept]] = {}  # by adapter, in the order of their tokens
        self.lengths = [SHORTEST]
        while self.lengths[-1] < context_length:
            self.lengths.append(self.lengths[-1] * 2)

    def longest(self) -> int:
        """The tokens of the longest sequence that is sure to fit when it runs alone (growing holds two slots)."""
        fits, before = 0, 0
        for length in self.lengths:
            if (length + before) * self.shape.token_bytes > self.bound:
                break
            fits = before = length
        return fits

    def slabs(self) -> list[Slab]:
        return [slab for length in sorted(self._slabs) for slab in self._slabs[length]]

    # --- slots ------------------------------------------------------------------------------------------

    def allocate(self, tokens: int) -> Slot | None:
        """A slot for at least `tokens`, kept sequences giving way; None when running ones hold the memory."""
        length = next(n for n in self.lengths if n >= tokens)
        slabs = self._slabs.setdefault(length, [])
        if not slabs or len(slabs[-1].slots) == slabs[-1].capacity:
            slab = self._new_slab(length)
            if slab is None:
                return None
            slabs.append(slab)
        slab = slabs[-1]
        slot = Slot(slab, len(slab.slots))
        slab.slots.append(slot)
        return slot

    def free(self, slot: Slot) -> None:
        """The last slot of the same length moves into the freed place."""
        slabs = self._slabs[slot.slab.length]
        last = slabs[-1].slots.pop()
        if last is not slot:
            slot.rows(last.used).copy_(last.rows(last.used))
            slot.slab.slots[slot.index] = last
            last.slab, last.index = slot.slab, slot.index
        if not slabs[-1].slots:
            self.used -= slabs.pop().bytes

    def grow(self, slot: Slot, tokens: int) -> bool:
        """Makes `slot` hold at least `tokens`, moving what it has; False when there is no memory for it."""
        if tokens <= slot.slab.length:
            return True
        larger = self.allocate(tokens)
        if larger is None:
            return False
        larger.rows(slot.used).copy_(slot.rows(slot.used))
        old = Slot(slot.slab, slot.index, slot.used)
        old.slab.slots[old.index] = old
        slot.slab, slot.index = larger.slab, larger.index
        slot.slab.slots[slot.index] = slot
        self.free(old)
        return True

    # --- kept sequences -----------------------------------------------------------------------------------

    def keep(self, adapter: str, tokens: list[int], slot: Slot) -> None:
        """Keeps the rows of a sequence that ends; what it extends is dropped, what already holds it is refreshed."""
        if not tokens:
            return
        held = self._sorted.get(adapter, [])
        at = bisect.bisect_left(held, tokens, key=_tokens)
        if at < len(held) and held[at].tokens[: len(tokens)] == tokens:
            self._recent.move_to_end(held[at])
            return
        if at and tokens[: len(held[at - 1].tokens)] == held[at - 1].tokens:
            self._drop(held[at - 1])
        if not self._make_room(len(tokens) * self.shape.token_bytes):
            return
        kept = Kept(adapter, tokens, slot.rows(len(tokens)).clone(memory_format=torch.contiguous_format))
        bisect.insort(self._sorted.setdefault(adapter, []), kept, key=_tokens)
        self._recent[kept] = None
        self.used += kept.data.numel() * kept.data.element_size()

    def find(self, adapter: str, tokens: list[int]) -> tuple[Kept | None, int]:
        """The kept sequence of this adapter with the longest common prefix, and the prefix's length.

        In sorted order it is one of the two neighbours of `tokens`.
        """
        held = self._sorted.get(adapter, [])
        at = bisect.bisect_left(held, tokens, key=_tokens)
        best, length = None, 0
        for kept in held[max(0, at - 1) : at + 1]:
            n = common_prefix(kept.tokens, tokens)
            if n > length:
                best, length = kept, n
        if best is not None:
            self._recent.move_to_end(best)
        return best, length

    def forget(self, adapter: str) -> None:
        """Drops what was kept for an adapter that is no longer resident."""
        for kept in list(self._sorted.get(adapter, [])):
            self._drop(kept)

    def scrub(self) -> None:
        """Makes all slots finite again after a sequence wrote NaN: masked positions are multiplied by 0."""
        for slab in self.slabs():
            slab.data.nan_to_num_(0.0, 0.0, 0.0)

    def _drop(self, kept: Kept) -> None:
        del self._recent[kept]
        held = self._sorted[kept.adapter]
        held.remove(kept)
        if not held:
            del self._sorted[kept.adapter]
        self.used -= kept.data.numel() * kept.data.element_size()

    def _make_room(self, size: int) -> bool:
        while self.used + size > self.bound and self._recent:
            self._drop(next(iter(self._recent)))
        return self.used + size <= self.bound

    def _new_slab(self, length: int) -> Slab | None:
        slot_bytes = length * self.shape.token_bytes
        wanted = max(1, self.bound // _SLABS // slot_bytes)
        self._make_room(wanted * slot_bytes)
        capacity = min(wanted, (self.bound - self.used) // slot_bytes)
        if capacity == 0:
            return None
        s = self.shape
        # Zeros, not garbage: masked positions are multiplied by 0, and 0 * NaN would be NaN.
        slab = Slab(length, capacity, torch.zeros(s.layers, 2, capacity, s.heads, length, s.head_dim, dtype=s.dtype))
        self.used += slab.bytes
        return slab


def common_prefix(a: list[int], b: list[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokens(kept: Kept) -> list[int]:
    return kept.tokens
