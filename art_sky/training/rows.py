"""How sequences become forward and backward passes: every token that sequences of a group share is run once.

A *segment* is what one pass computes. It holds whole subtrees of the groups' prefix trees, packed without padding
into one row. A subtree that exceeds the token budget is cut: the trunk on which its branches hang becomes a segment,
the branches become child segments, which attend to the trunk's keys and values while its activations wait; the
trunk's own backward pass runs when all its children have added to the gradient of these. So a prefix is run once
however many branches it has, and memory is bounded: activations of at most `budget` tokens are alive, or of the
longest sequence and half the budget beyond it where that is more.

Without sharing (`share=False`, for models that cannot be packed) a segment is a batch of padded rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from art_sky.training.prefix_tree import Ids, Node, common_length, path, prefix_tree
from art_sky.training.sequences import TokenSequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a packed row which all have the same ancestors; those below them reach up to `end`."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class Tree:
    """Subtrees next to each other in a packed row, as tokens [start, end), that hang on the same place.

    `trunk[i]` says how many tokens of the i-th segment above are their ancestors, counted from the topmost segment.
    """

    start: int
    end: int
    trunk: tuple[int, ...]


@dataclass(eq=False)
class Segment:
    """One forward and backward pass over B rows of L tokens. A packed one (B = 1) has spans and trees.

    `tokens` [N] are the trained tokens that it predicts, by their number in the batch (`TokenTable`), and `sources`
    [N] the places in the flattened rows at which each is predicted: that of the token before it.
    """

    ids: Ints  # [B, L]
    positions: Ints  # [B, L], distance from the sequence's first token
    spans: list[Span] = field(default_factory=list)  # in preorder: one after that below which it is
    trees: list[Tree] = field(default_factory=list)
    children: list[Segment] = field(default_factory=list)
    tokens: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sources: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    unpadded: int = 0  # tokens that are not padding

    @property
    def packed(self) -> bool:
        return bool(self.spans)

    def walk(self) -> Iterator[Segment]:
        """This segment and all below it, in the order in which they run forward."""
        yield self
        for child in self.children:
            yield from child.walk()


def plan(sequences: Sequence[TokenSequence], budget: int, share: bool, rank: int = 0, ranks: int = 1) -> list[Segment]:
    """Segments that together predict every trained token once, in one of `ranks` processes. The number of a token in
    the batch is by sequence, then place, in every process alike.

    What comes after a sequence's last trained token, that token included, is an input to nothing and is left out.
    """
    numbered = _numbered(sequences)
    if ranks > 1:
        numbered = _own(numbered, rank, ranks)
    return _Packer(budget).plan(numbered) if share else list(_padded(numbered, budget))


@dataclass(frozen=True, eq=False)
class _Numbered:
    ids: Ids  # [T], up to the last place at which a token is predicted
    group: int
    sources: Ints  # [N] places, ascending
    first: int  # the number of its first trained token

    @property
    def tokens(self) -> Ints:
        return np.arange(self.first, self.first + len(self.sources))


def _numbered(sequences: Sequence[TokenSequence]) -> list[_Numbered]:
    numbered, first = [], 0
    for s in sequences:
        sources = np.flatnonzero(s.sampled) - 1
        numbered.append(_Numbered(s.ids[: sources[-1] + 1], s.group, sources, first))
        first += len(sources)
    return numbered


def _own(numbered: list[_Numbered], rank: int, ranks: int) -> list[_Numbered]:
    """What one process computes: neighbours in the groups' order, which share most, and about as many unique tokens as
    the others have."""
    ordered = sorted(numbered, key=lambda s: (s.group, s.ids.astype(">i4").tobytes()))
    cost = [len(s.ids) for s in ordered]
    for i, (before, s) in enumerate(pairwise(ordered), 1):
        if before.group == s.group:
            cost[i] -= common_length(before.ids, s.ids)
    middle = np.cumsum(cost) - np.array(cost) / 2
    owner = (middle * ranks / max(sum(cost), 1)).astype(int)
    return [s for s, at in zip(ordered, owner, strict=True) if at == rank]


class _Packer:
    """Cuts the groups' prefix trees into segments."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._places: dict[Node, tuple[Segment, int]] = {}  # where the first token of a node stands

    def plan(self, sequences: list[_Numbered]) -> list[Segment]:
        groups: dict[int, list[_Numbered]] = {}
        for s in sequences:
            groups.setdefault(s.group, []).append(s)
        roots = {g: prefix_tree([s.ids for s in members]) for g, members in groups.items()}
        hanging = [(node, ()) for root in roots.values() for node in root.children.values()]
        segments = self._cut(hanging, self._budget, self._budget // 4)
        self._predict(sequences, roots)
        return segments

    def _cut(self, hanging: Sequence[tuple[Node, tuple[int, ...]]], room: int, spare: int) -> list[Segment]:
        """Segments for subtrees that hang on the given trunks: those that fit are packed together, in order."""
        segments: list[Segment] = []
        packed: list[tuple[Node, tuple[int, ...]]] = []
        used = 0
        for node, trunk in hanging:
            if node.size > room:
                segments.append(self._trunk(node, trunk, room, spare))
                continue
            if packed and used + node.size > room:
                segments.append(self._forest(packed))
                packed, used = [], 0
            packed.append((node, trunk))
            used += node.size
        if packed:
            segments.append(self._forest(packed))
        return segments

    def _trunk(self, node: Node, trunk: tuple[int, ...], room: int, spare: int) -> Segment:
        """A node whose subtree does not fit, with all that hangs on it.

        Short nodes below it are added along the heaviest path. Branches that hang further up wait for these without
        need, so they are `spare` tokens at most along all segments above each other.
        """
        nodes, used = [node], len(node.ids)
        hanging: list[tuple[Node, tuple[int, ...]]] = []
        below = list(node.children.values())
        while below:
            heaviest = max(below, key=lambda n: n.size)
            fits = heaviest.size <= self._left(room - used)
            if fits or used + len(heaviest.ids) > spare:
                break
            hanging += [(n, (*trunk, used)) for n in below if n is not heaviest]
            nodes.append(heaviest)
            used += len(heaviest.ids)
            below = list(heaviest.children.values())
        hanging += [(n, (*trunk, used)) for n in below]
        segment = _packed_row(nodes, [Span(0, used, used)], [Tree(0, used, trunk)])
        starts = np.cumsum([0, *(len(n.ids) for n in nodes)]).tolist()
        self._places |= {n: (segment, start) for n, start in zip(nodes, starts, strict=False)}
        segment.children = self._cut(hanging, self._left(room - used), spare - used if len(nodes) > 1 else spare)
        return segment

    def _left(self, room: int) -> int:
        """However full the budget is, branches are run some at a time."""
        return max(room, self._budget // 4, 1)

    def _forest(self, roots: list[tuple[Node, tuple[int, ...]]]) -> Segment:
        nodes: list[Node] = []
        starts: list[int] = []
        spans: list[Span] = []
        trees: list[Tree] = []
        size = 0
        for root, trunk in roots:
            if trees and trees[-1].trunk == trunk:
                trees[-1] = Tree(trees[-1].start, size + root.size, trunk)
            else:
                trees.append(Tree(size, size + root.size, trunk))
            waiting = [root]
            while waiting:
                node = waiting.pop()
                nodes.append(node)
                starts.append(size)
                spans.append(Span(size, size + len(node.ids), size + node.size))
                size += len(node.ids)
                waiting.extend(reversed(node.children.values()))
        segment = _packed_row(nodes, spans, trees)
        self._places |= {n: (segment, start) for n, start in zip(nodes, starts, strict=True)}
        return segment

    def _predict(self, sequences: list[_Numbered], roots: dict[int, Node]) -> None:
        """Tells every segment which trained tokens it predicts, and where."""
        found: dict[Segment, list[tuple[Ints, Ints]]] = {}
        for s in sequences:
            for node in path(roots[s.group], s.ids):
                here = slice(*np.searchsorted(s.sources, (node.depth, node.stop)))
                if here.start < here.stop:
                    segment, start = self._places[node]
                    found.setdefault(segment, []).append((s.tokens[here], s.sources[here] + (start - node.depth)))
        for segment, parts in found.items():
            tokens, sources = (np.concatenate(p) for p in zip(*parts, strict=True))
            order = np.argsort(sources, kind="stable")
            segment.tokens, segment.sources = tokens[order], sources[order]


def _packed_row(nodes: list[Node], spans: list[Span], trees: list[Tree]) -> Segment:
    ids = np.concatenate([n.ids for n in nodes]).astype(np.int64)
    positions = np.concatenate([np.arange(n.depth, n.stop) for n in nodes])
    return Segment(ids[None], positions[None], spans, trees, unpadded=len(ids))


def _padded(sequences: list[_Numbered], budget: int) -> Iterator[Segment]:
    """Rows of like length together, so that little is padding; a row longer than the budget is alone."""
    batch: list[_Numbered] = []
    for s in sorted(sequences, key=lambda s: len(s.ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].ids) > budget:
            yield _padded_rows(batch)
            batch = []
        batch.append(s)
    if batch:
        yield _padded_rows(batch)


def _padded_rows(batch: list[_Numbered]) -> Segment:
    length = len(batch[0].ids)
    ids = np.zeros((len(batch), length), np.int64)
    for row, s in zip(ids, batch, strict=True):
        row[: len(s.ids)] = s.ids
    return Segment(
        ids,
        np.broadcast_to(np.arange(length), ids.shape),
        tokens=np.concatenate([s.tokens for s in batch]),
        sources=np.concatenate([r * length + s.sources for r, s in enumerate(batch)]),
        unpadded=sum(len(s.ids) for s in batch),
    )
