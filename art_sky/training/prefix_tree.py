"""The trie of a group's sequences: what several of them begin with is one node, and is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


@dataclass(eq=False)
class Node:
    """Tokens that all sequences below have in common, up to where they differ. Only a leaf or a fork ends a node."""

    ids: Ids  # [n]
    depth: int  # distance of ids[0] from the sequence's first token
    children: dict[int, Node] = field(default_factory=dict)  # by their first id, in the order of ids
    size: int = 0  # tokens of this node and of all below

    @property
    def stop(self) -> int:
        """The depth of the first token after this node."""
        return self.depth + len(self.ids)


def prefix_tree(sequences: Sequence[Ids]) -> Node:
    """The root, which holds no token; its children are the tries of the sequences that begin alike.

    Sorted, every sequence repeats the beginning of the one before it and adds the rest, at a node of the path to
    that one; so the tree grows at its right edge only.
    """
    root = Node(np.empty(0, np.int32), 0)
    edge = [root]  # the path to the sequence before
    before: Ids = root.ids
    for ids in sorted(sequences, key=lambda s: s.astype(">i4").tobytes()):
        shared = common_length(before, ids)
        while len(edge) > 1 and edge[-1].depth >= shared:
            edge.pop()
        top = edge[-1]
        if shared < top.stop:
            below = Node(top.ids[shared - top.depth :], shared, top.children)
            top.ids, top.children = top.ids[: shared - top.depth], {int(below.ids[0]): below}
        rest = ids[shared:]
        if len(rest) and (top.children or top is root):
            edge.append(Node(rest, shared))
            top.children[int(rest[0])] = edge[-1]
        elif len(rest):  # the sequence before was the beginning of this one
            top.ids = np.concatenate([top.ids, rest])
        before = ids
    for node in reversed(list(preorder(root))):
        node.size = len(node.ids) + sum(child.size for child in node.children.values())
    return root


def preorder(root: Node) -> Iterator[Node]:
    """Every node after its parent and before its next sibling."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(node.children.values()))


def path(root: Node, ids: Ids) -> Iterator[Node]:
    """The nodes, root left out, that hold a sequence from which the tree was built; the last may go beyond it."""
    node = root
    while node.stop < len(ids):
        node = node.children[int(ids[node.stop])]
        yield node


def common_length(a: Ids, b: Ids) -> int:
    """The number of tokens with which both begin."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
