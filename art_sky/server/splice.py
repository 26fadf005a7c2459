"""Prompts that begin with what was sampled get the sampled ids for that part (rule R1).

A third of free-text replies are not the tokenisation that their text would get, so a next turn tokenised from text
would not extend its sequence. Where a rendered prompt begins with the exact text of a recorded exchange, up to a
token that ends a turn, the recorded ids are sent and only the rest is tokenised.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_IDS = 8_000_000  # 4 bytes each


@dataclass(frozen=True)
class Recorded:
    ids: array[int]  # prompt and reply, without the token that ended the turn
    end_id: int | None  # the token that ended it; None where the length or a stop string did


class Splice(NamedTuple):
    """The first `length` characters of a prompt are `ids`."""

    ids: list[int]
    length: int


class SpliceIndex:
    """Recorded exchanges by the hash of their text; the least recently used go first when it is full.

    `spliced` counts prompts that extended a recorded exchange, `split` those that hold an assistant's turn and
    extended none.
    """

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._entries: OrderedDict[tuple[str, bytes], Recorded] = OrderedDict()
        self._max_ids = max_ids
        self._ids = 0
        self._lock = threading.Lock()  # prompts are made in threads
        self.spliced = 0
        self.split = 0

    def add(self, scopes: list[str], text: str, recorded: Recorded) -> None:
        """`text` is the rendered prompt and the reply's raw text, as they would stand in a later prompt."""
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            for scope in scopes:
                old = self._entries.pop((scope, key), None)
                self._ids += len(recorded.ids) - (len(old.ids) if old else 0)
                self._entries[scope, key] = recorded
            while self._ids > self._max_ids and self._entries:
                self._ids -= len(self._entries.popitem(last=False)[1].ids)

    def find(self, scopes: list[str], text: str, ends: dict[str, int]) -> Splice | None:
        """The longest recorded beginning of `text` that one of `ends` (text to id) follows.

        `scopes` in order of preference: the same rollout, then the same model.
        """
        cuts = list(_cuts(text, ends))
        with self._lock:
            for scope in scopes:
                for at, key, end in reversed(cuts):
                    entry = self._entries.get((scope, key))
                    if entry is None:
                        continue
                    self._entries.move_to_end((scope, key))
                    self.spliced += 1
                    ids = entry.ids.tolist()
                    if entry.end_id == ends[end]:
                        return Splice([*ids, ends[end]], at + len(end))
                    return Splice(ids, at)
        return None


def _cuts(text: str, ends: dict[str, int]) -> Iterator[tuple[int, bytes, str]]:
    """Where a turn ends in `text`: (position, hash of all text before, the text that ends it)."""
    if not ends:
        return
    running, done = hashlib.sha256(), 0
    at = -1
    while True:
        found = min(((p, e) for e in ends if (p := text.find(e, at + 1)) >= 0), default=None)
        if found is None:
            return
        at, end = found
        running.update(text[done:at].encode())
        done = at
        yield at, running.copy().digest(), end
