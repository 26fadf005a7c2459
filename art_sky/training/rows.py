"""How sequences become the rows of a forward pass: each token that several sequences of a group share is run once.

Sorted, the sequences of a group form a tree of prefixes: every sequence repeats the beginning of the one before it
and adds the rest. A shared row holds the tokens of that tree; a mask lets each see its own ancestors, so values and
gradients are those of separate sequences. Where little is shared the dense mask costs more than it saves, and a
row is one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_sky.training.sequences import TokenSequence

Ints = npt.NDArray[np.int64]

# Tokens over unique tokens from which a shared row is the faster one (measured on CPUs: 1.2 loses, 2.4 wins 1.7).
MIN_SHARED = 1.5


@dataclass(frozen=True, eq=False)
class Row:
    """L tokens run together. `members` are sequences by their index in the batch, with `places[i]` [T], where in the
    row each token of member i stands."""

    ids: Ints  # [L]
    positions: Ints  # [L], distance from the sequence's first token
    mask: npt.NDArray[np.bool_] | None  # [L, L], who sees whom; None: plainly causal
    members: list[int]
    places: list[Ints]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows run in one forward and backward pass, padded on the right to the longest."""

    rows: list[Row]

    @property
    def length(self) -> int:
        return max(map(len, self.rows))


def plan(sequences: Sequence[TokenSequence], budget: int, can_share: bool) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens, padding included; a row longer than that is one by itself.

    All rows of a micro-batch have masks, or none has.
    """
    plain, shared = [], []
    groups: dict[int, list[int]] = {}
    for i, s in enumerate(sequences):
        groups.setdefault(s.group, []).append(i)
    for members in groups.values():
        rows = list(_tree_rows(sequences, members, budget)) if can_share and len(members) > 1 else []
        total = sum(len(sequences[i]) for i in members)
        if rows and total >= MIN_SHARED * sum(map(len, rows)):
            shared += rows
        else:
            plain += [_plain_row(sequences[i], i) for i in members]
    return [*_pack(shared, budget), *_pack(plain, budget)]


def _plain_row(sequence: TokenSequence, index: int) -> Row:
    places = np.arange(len(sequence))
    return Row(sequence.ids.astype(np.int64), places, None, [index], [places])


def _tree_rows(sequences: Sequence[TokenSequence], members: list[int], budget: int) -> Iterator[Row]:
    """The group's prefix tree, cut into rows of at most `budget` tokens between sequences."""
    order = sorted(members, key=lambda i: sequences[i].ids.astype(">i4").tobytes())
    start, size = 0, 0
    for at, index in enumerate(order):
        new = len(sequences[index]) - (_common(sequences[order[at - 1]], sequences[index]) if at > start else 0)
        if at > start and size + new > budget:
            yield _tree_row(sequences, order[start:at])
            start, size, new = at, 0, len(sequences[index])
        size += new
    yield _tree_row(sequences, order[start:])


def _tree_row(sequences: Sequence[TokenSequence], order: list[int]) -> Row:
    ids: list[Ints] = []
    positions: list[Ints] = []
    places: list[Ints] = []
    begins: list[int] = []  # per member, from which of its own tokens on it is new in the row
    size = 0
    for at, index in enumerate(order):
        sequence = sequences[index]
        begin = _common(sequences[order[at - 1]], sequence) if at else 0
        new = np.arange(size, size + len(sequence) - begin)
        ids.append(sequence.ids[begin:].astype(np.int64))
        positions.append(np.arange(begin, len(sequence)))
        places.append(np.concatenate([places[-1][:begin], new]) if at else new)
        begins.append(begin)
        size += len(new)
    mask = np.zeros((size, size), np.bool_)
    for place, begin in zip(places, begins, strict=True):
        own = np.arange(begin, len(place))
        mask[np.ix_(place[begin:], place)] = own[:, None] >= np.arange(len(place))[None]
    return Row(np.concatenate(ids), np.concatenate(positions), mask, order, places)


def _common(a: TokenSequence, b: TokenSequence) -> int:
    """The number of tokens with which both begin."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a.ids[:n] != b.ids[:n])
    return int(differ[0]) if len(differ) else n


def _pack(rows: list[Row], budget: int) -> Iterator[MicroBatch]:
    """Rows of like length together, so that little is padding."""
    batch: list[Row] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > budget:
            yield MicroBatch(batch)
            batch = []
        batch.append(row)
    if batch:
        yield MicroBatch(batch)
