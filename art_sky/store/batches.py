"""How the groups of one train or log call become one immutable object, and back.

The object is a zstd frame of JSON lines (a header, then one group a line, in the JSON form of
`art_sky.trajectories.TrajectoryGroup`) and behind it the long lists of numbers, in a *skippable* frame: `zstdcat`
and `zstdgrep` show messages, rewards and metrics and pass over the numbers.

    zstd frame        {"format": 2, "kind": "art-sky.groups", "ids": [count, bytes], "logprobs": [count, bytes]}
                      {"trajectories": [...], ...}        a group a line
    skippable frame   two columns (`art_sky.store.number_lists`): all token ids, all logprobs

In a line, the value of `prompt_token_ids`, `token_ids` and `token_logprobs` of a choice is `{"at": [start, length,
...]}`: one or more pieces of the column. Token ids that a prompt shares with the turn before it, or with another
choice of its group, are there once. A value that does not fit into a column stays as it is; a dict becomes
`{"json": dict}`, so that nothing can be taken for a reference that is none.

In memory these lists are arrays (`array.array`, "i" and "d"), from the client's checks to the trainer's sequences: a
Python object for each number would cost more than all the rest. Lists are written as well; what is read are arrays.

JSON is written in ASCII, so that lone surrogates survive, and NaN or infinity cannot be written. Format 1 had no
second frame and its numbers in the lines; it is still read. The trainer works on this form and needs no client
classes, and the client that writes it needs no numpy.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import zstandard

from art_sky.errors import CorruptObject, InvalidInput
from art_sky.store import number_lists
from art_sky.store.number_lists import Kind

FORMAT = 2
KIND = "art-sky.groups"
MAX_BYTES = 4 << 30  # of JSON; this and the next are stops against decompression bombs
MAX_NUMBERS = 1 << 28  # in the lists of a batch
# The lists of a choice that become columns, one for each kind, in the order of writing.
NUMBERS: dict[str, Kind] = {"prompt_token_ids": "i", "token_ids": "i", "token_logprobs": "d"}
_SKIPPABLE = (0x184D2A50).to_bytes(4, "little")
_SKIPPABLE_HEAD = 8  # the magic number and the length
_UNREADABLE = (
    zstandard.ZstdError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip

Group = dict[str, Any]


def encode_batch(groups: Iterable[Mapping[str, Any]]) -> bytes:
    """Raises InvalidInput naming the group that holds something JSON cannot say."""
    # What holds itself is refused without the check of every object too: as a RecursionError.
    to_json = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
    writer = _NumbersWriter()
    lines = [""]
    for i, group in enumerate(groups):
        try:
            lines.append(to_json(writer.take(group)))
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidInput(f"group {i} cannot be written as JSON: {e}; give plain values") from e
    ids, logprobs = (number_lists.compress(column) for column in (writer.ids, writer.logprobs))
    counts = {"ids": [len(writer.ids), len(ids)], "logprobs": [len(writer.logprobs), len(logprobs)]}
    lines[0] = to_json({"format": FORMAT, "kind": KIND, **counts})
    text = ("\n".join(lines) + "\n").encode()
    if len(text) > MAX_BYTES or writer.taken > MAX_NUMBERS:
        raise InvalidInput(
            f"a batch of {len(text):,} bytes and {writer.taken:,} numbers is too large; send fewer groups"
        )
    size = len(ids) + len(logprobs)
    frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(text)
    return b"".join((frame, _SKIPPABLE, size.to_bytes(4, "little"), ids, logprobs))


def decode_batch(data: bytes) -> list[Group]:
    """The groups, with the long lists of numbers as arrays, each one's own (`art_sky.trajectories.plain` makes lists
    of them). Raises CorruptObject for anything that `encode_batch` does not write."""
    try:
        head, lines = _read_text(data)
        groups = [json.loads(line) for line in lines]
        if not all(isinstance(g, dict) and isinstance(g.get("trajectories"), list) for g in groups):
            raise CorruptObject("the batch holds something that is not a group; send it again")
        if head["format"] == FORMAT:
            reader = _NumbersReader(data, head)
            groups = [reader.put_back(group) for group in groups]
    except _UNREADABLE as e:
        raise CorruptObject(f"the batch cannot be read: {e}; send it again") from e
    return groups


def is_choice(item: Mapping[str, Any]) -> bool:
    """Whether an entry of `messages_and_choices` is an OpenAI Choice (trained), not a message (context)."""
    return "role" not in item and isinstance(item.get("message"), Mapping)


class _NumbersWriter:
    """Takes the long lists out of groups and collects them."""

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.logprobs: array[float] = array("d")
        self.taken = 0  # numbers, those that are shared counted each time
        self._prompts: dict[bytes, list[int]] = {}  # of this group: ids -> pieces
        self._running = b""  # of this history: the ids of its last choice, prompt and answer
        self._running_at: list[int] = []

    def take(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        self._prompts = {}
        return _with_items(group, self._take_history)

    def _take_history(self, items: list[Any]) -> list[Any]:
        self._running, self._running_at = b"", []
        return [self._take_item(item) if _has_numbers(item) else item for item in items]

    def _take_item(self, item: dict[str, Any]) -> dict[str, Any]:
        taken = dict(item)
        for name, kind in NUMBERS.items():
            value = item.get(name)
            if type(value) is dict:
                taken[name] = {"json": value}
            elif numbers := number_lists.to_array(value, kind):
                taken[name] = {"at": self._store(name, numbers)}
                self.taken += len(numbers)
        return taken

    def _store(self, name: str, numbers: array[Any]) -> list[int]:
        """Returns the pieces at which the list can be found."""
        if name == "prompt_token_ids":
            return self._store_prompt(numbers.tobytes())
        if name == "token_ids":
            return self._store_answer(numbers.tobytes())
        self.logprobs += numbers
        return [len(self.logprobs) - len(numbers), len(numbers)]

    def _store_prompt(self, ids: bytes) -> list[int]:
        if self._running and ids.startswith(self._running):
            at = _joined(self._running_at, self._append(ids[len(self._running) :]))
        elif ids in self._prompts:
            at = self._prompts[ids]
        else:
            at = self._prompts[ids] = self._append(ids)
        self._running, self._running_at = ids, at
        return at

    def _store_answer(self, ids: bytes) -> list[int]:
        at = self._append(ids)
        self._running += ids
        self._running_at = _joined(self._running_at, at)
        return at

    def _append(self, ids: bytes) -> list[int]:
        start = len(self.ids)
        self.ids.frombytes(ids)
        return [start, len(self.ids) - start] if ids else []


class _NumbersReader:
    """Puts the lists back where a `_NumbersWriter` took them out."""

    def __init__(self, data: bytes, head: Mapping[str, Any]) -> None:
        (ids, id_bytes), (logprobs, logprob_bytes) = head["ids"], head["logprobs"]
        size = id_bytes + logprob_bytes
        if min(ids, id_bytes, logprobs, logprob_bytes) < 0 or max(ids, logprobs) > MAX_NUMBERS:
            raise ValueError("its header is not one that a batch has")
        start = len(data) - size
        if start < _SKIPPABLE_HEAD or data[start - _SKIPPABLE_HEAD : start] != _SKIPPABLE + size.to_bytes(4, "little"):
            raise ValueError("its numbers are missing or cut short")
        self._columns: dict[Kind, array[Any]] = {
            "i": number_lists.decompress(data[start : start + id_bytes], "i", ids),
            "d": number_lists.decompress(data[start + id_bytes :], "d", logprobs),
        }
        self._room = MAX_NUMBERS  # still to be put back; pieces may overlap

    def put_back(self, group: Group) -> Group:
        return dict(_with_items(group, self._put_back_history))

    def _put_back_history(self, items: list[Any]) -> list[Any]:
        return [self._put_back_item(item) if _has_numbers(item) else item for item in items]

    def _put_back_item(self, item: dict[str, Any]) -> dict[str, Any]:
        for name, kind in NUMBERS.items():
            value = item.get(name)
            if type(value) is dict:
                item[name] = value["json"] if "json" in value else self._pieces(kind, value["at"])
        return item

    def _pieces(self, kind: Kind, at: list[int]) -> array[Any]:
        values = self._columns[kind]
        found = array(kind)
        for start, count in zip(at[::2], at[1::2], strict=True):
            self._room -= count
            if not (0 <= start <= start + count <= len(values)) or self._room < 0:
                raise ValueError("it refers to numbers that it does not hold")
            found += values[start : start + count]
        return found


def _with_items(group: Mapping[str, Any], change: Callable[[list[Any]], list[Any]]) -> Mapping[str, Any]:
    """A copy of the group with every list `messages_and_choices` changed; what has another shape stays."""
    trajectories = group.get("trajectories")
    if type(trajectories) is not list:
        return group
    return {**group, "trajectories": [_with_changed_items(t, change) for t in trajectories]}


def _with_changed_items(trajectory: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    if type(trajectory) is not dict:
        return trajectory
    changed = dict(trajectory)
    items, others = trajectory.get("messages_and_choices"), trajectory.get("additional_histories")
    if type(items) is list:
        changed["messages_and_choices"] = change(items)
    if type(others) is list:
        changed["additional_histories"] = [_with_changed_items(history, change) for history in others]
    return changed


def _has_numbers(item: Any) -> bool:
    return type(item) is dict and not NUMBERS.keys().isdisjoint(item)


def _joined(at: list[int], more: list[int]) -> list[int]:
    """Pieces one after the other; those that touch become one."""
    joined = list(at)
    for start, count in zip(more[::2], more[1::2], strict=True):
        if joined and joined[-2] + joined[-1] == start:
            joined[-1] += count
        else:
            joined += [start, count]
    return joined


def _read_text(data: bytes) -> tuple[dict[str, Any], Iterator[bytes]]:
    """The header and the lines behind it."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= MAX_BYTES:
        raise CorruptObject(f"the batch is not one, or over {MAX_BYTES >> 30} GiB; send it again, or fewer groups")
    header, *lines = zstandard.ZstdDecompressor().decompress(data).splitlines()
    head = json.loads(header)
    if head.get("kind") != KIND or head.get("format") not in (1, FORMAT):
        raise CorruptObject(f"not a batch of this release: {head}; install the art-sky that wrote it")
    return head, iter(lines)
