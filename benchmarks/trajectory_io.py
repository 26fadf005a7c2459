"""Batches of trajectories, written to a file and read back whole, against parquet through pyarrow.

    python benchmarks/trajectory_io.py [--rounds 9] [--only write,read,write_turns,read_turns]

256 trajectories (32 groups of 8 with a common prompt) with 256,000 sampled tokens and their logprobs; `write` and
`read` with one answer of 1,000 tokens each, `write_turns` and `read_turns` with four of 250, whose prompts hold all
turns before. Every file holds all of every trajectory, and each side's file is read back and compared before the race.

Ours starts from groups as a train call hands them to `encode_batch`, after its checks, and ends at groups as the
trainer gets them: dicts with token ids and logprobs as arrays. A peer starts from and ends at its own rows of dicts and
lists (`from_pylist`, `to_pylist`); to bring groups into that form, and back, is in no figure. All parquet is zstd:

    nested       nested parquet of the same information: a row a trajectory, in it a list of message structs, in a
                 choice the list `tokens` of structs {id, logprob}, and its prompt's ids as a list. `ratio` is to this
    openai       the same, with the structs of `choice.logprobs.content`, where ART keeps sampled ids and logprobs
    lists        the same, with a list of ids and a list of logprobs for each choice: no struct for a token
    columns      not nested: the trajectories as JSON text beside flat columns of numbers, from and to numpy arrays, so
                 that no side makes Python numbers: our own layout, in parquet

Ours from and to lists, with what it takes to turn them into arrays and back, is in `notes`, as are the sizes.
One JSON line a case: `ours` and `peers` are medians of interleaved rounds in seconds, `cpu` with all threads; `ratio`
is the time of `nested` by ours, and `notes` has those to all layouts.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_sky.store.batches import NUMBERS, decode_batch, encode_batch, is_choice
from art_sky.trajectories import WITH_ARRAYS, TrajectoryGroup, plain

SEED = 20261
GROUPS, PER_GROUP, SAMPLED = 32, 8, 1000
PROMPT_TOKENS, TURN_TOKENS, VOCABULARY = 300, 60, 49152
Timing = tuple[float, float]  # wall and CPU seconds
Rows = list[dict[str, Any]]


class Data:
    """Made groups: ids and words with long tails, logprobs that are float32."""

    def __init__(self, turns: int) -> None:
        self.draw = random.Random(SEED)
        self.words = ["".join(self.draw.choices("etaoinshrdlucm", k=self.draw.randint(2, 8))) for _ in range(5000)]
        self.turns = turns
        # Through JSON, as the lists of a client are that come from a reply.
        self.groups: list[dict[str, Any]] = json.loads(json.dumps([self.group(i) for i in range(GROUPS)]))

    def group(self, index: int) -> dict[str, Any]:
        question, prompt = self.text(PROMPT_TOKENS), self.ids(PROMPT_TOKENS)
        trajectories = [self.trajectory(question, prompt) for _ in range(PER_GROUP)]
        return {"trajectories": trajectories, "exceptions": [], "metadata": {"task": index}, "metrics": {}, "logs": []}

    def trajectory(self, question: str, prompt: list[int]) -> dict[str, Any]:
        items: list[dict[str, Any]] = [{"role": "user", "content": question}]
        ids = prompt
        for turn in range(self.turns):
            if turn:
                items.append({"role": "user", "content": self.text(TURN_TOKENS)})
                ids = ids + self.ids(TURN_TOKENS)
            items.append(self.choice(ids, SAMPLED // self.turns))
            ids = ids + items[-1]["token_ids"]
        reward = self.draw.random()
        return {
            "messages_and_choices": items, "tools": None, "additional_histories": [], "reward": reward,
            "metrics": {"correct": reward > 0.5, "duration": reward * 10}, "metadata": {}, "logs": [],
        }  # fmt: skip

    def choice(self, prompt: list[int], count: int) -> dict[str, Any]:
        logprobs = [-self.draw.expovariate(2) for _ in range(count)]
        return {
            "finish_reason": "stop", "index": 0, "logprobs": None,
            "message": {"role": "assistant", "content": self.text(count)},
            "prompt_token_ids": prompt, "token_ids": self.ids(count),
            "token_logprobs": list(struct.unpack(f"{count}f", struct.pack(f"{count}f", *logprobs))),
            "sampling": {
                "completion_id": f"chatcmpl-{self.draw.getrandbits(128):032x}", "model": "agent@3", "temperature": 1.0,
                "comparable": True,
            },
        }  # fmt: skip

    def ids(self, count: int) -> list[int]:
        return [min(int(self.draw.paretovariate(0.35)), VOCABULARY - 1) for _ in range(count)]

    def text(self, tokens: int) -> str:
        return " ".join(self.draw.choices(self.words, k=tokens * 2 // 3))


class Ours:
    def __init__(self, data: Data, folder: Path) -> None:
        self.expected = data.groups
        self.groups = with_arrays(data.groups)
        self.path = folder / f"ours-{data.turns}.jsonl.zst"

    def write(self) -> None:
        self.path.write_bytes(encode_batch(self.groups))

    def read(self) -> Rows:
        return decode_batch(self.path.read_bytes())

    def check(self) -> None:
        assert plain(self.read()) == self.expected


class OursLists(Ours):
    def __init__(self, data: Data, folder: Path) -> None:
        super().__init__(data, folder)
        self.groups = data.groups

    def read(self) -> Rows:
        groups = super().read()
        for choice in _choices(groups):
            for name in NUMBERS:
                choice[name] = choice[name].tolist()
        return groups


class Parquet:
    def __init__(self, data: Data, folder: Path, layout: str) -> None:
        self.rows = to_rows(data.groups, layout)
        self.path = folder / f"{layout}-{data.turns}.parquet"

    def write(self) -> None:
        pq.write_table(pa.Table.from_pylist(self.rows), self.path, compression="zstd")

    def read(self) -> Rows:
        rows: Rows = pq.read_table(self.path).to_pylist()
        return rows

    def check(self) -> None:
        """All is there; parquet fills every record with null for the fields of the others."""
        assert [_full(row) for row in self.read()] == [_full(row) for row in self.rows]


class Columns:
    """A row a group: the JSON text of all but the numbers, and columns of these, of all choices end to end."""

    def __init__(self, data: Data, folder: Path) -> None:
        self.expected = data.groups
        self.groups = with_arrays(data.groups)
        self.path = folder / f"columns-{data.turns}.parquet"

    def write(self) -> None:
        columns: dict[str, Any] = {"group": [json.dumps(_with_lengths(group)) for group in self.groups]}
        for name in NUMBERS:
            numbers = [np.concatenate([c[name] for c in _choices([group])]) for group in self.groups]
            offsets = np.cumsum([0, *map(len, numbers)], dtype=np.int32)
            columns[name] = pa.ListArray.from_arrays(offsets, np.concatenate(numbers))
        pq.write_table(pa.table(columns), self.path, compression="zstd")

    def read(self) -> Rows:
        table = pq.read_table(self.path)
        groups = [json.loads(text) for text in table["group"].to_pylist()]
        for name in NUMBERS:
            values, at = table[name].combine_chunks().values.to_numpy(), 0
            for choice in _choices(groups):
                at, start = at + choice[name], at
                choice[name] = values[start:at]
        return groups

    def check(self) -> None:
        assert plain(self.read()) == self.expected


def with_arrays(groups: Rows) -> Rows:
    """As a train call turns groups into what it encodes."""
    return [TrajectoryGroup.model_validate(group).model_dump(context=WITH_ARRAYS) for group in groups]


def _choices(groups: Rows) -> list[dict[str, Any]]:
    return [i for g in groups for t in g["trajectories"] for i in t["messages_and_choices"] if is_choice(i)]


def _with_lengths(group: dict[str, Any]) -> dict[str, Any]:
    def short(item: dict[str, Any]) -> dict[str, Any]:
        return {k: len(v) if k in NUMBERS else v for k, v in item.items()}

    trajectories = [
        {**t, "messages_and_choices": [short(item) for item in t["messages_and_choices"]]}
        for t in group["trajectories"]
    ]
    return {**group, "trajectories": trajectories}


def to_rows(groups: list[dict[str, Any]], layout: str) -> Rows:
    rows = []
    for g, group in enumerate(groups):
        of_group = {f"group_{k}": json.dumps(v) for k, v in group.items() if k != "trajectories"}
        for t, trajectory in enumerate(group["trajectories"]):
            items = [_laid_out(item, layout) for item in trajectory["messages_and_choices"]]
            # Their types differ from row to row, so that they cannot be columns.
            free = {k: json.dumps(trajectory[k]) for k in ("additional_histories", "metadata", "tools")}
            rows.append({"group": g, "index": t, **of_group, **trajectory, **free, "messages_and_choices": items})
    return rows


def _laid_out(item: dict[str, Any], layout: str) -> dict[str, Any]:
    if layout == "lists" or not is_choice(item):
        return item
    moved = {k: v for k, v in item.items() if k not in ("token_ids", "token_logprobs", "logprobs")}
    pairs = zip(item["token_ids"], item["token_logprobs"], strict=True)
    if layout == "nested":
        return {**moved, "tokens": [{"id": i, "logprob": p} for i, p in pairs]}
    content = [{"token": f"token_id:{i}", "bytes": None, "logprob": p, "top_logprobs": []} for i, p in pairs]
    return {**moved, "logprobs": {"content": content}}


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v for k, v in ((k, _full(v)) for k, v in value.items()) if v not in (None, {})}
    return [_full(v) for v in value] if isinstance(value, list) else value


def race(case: str, direction: str, data: Data, folder: Path, rounds: int) -> None:
    sides: dict[str, Ours | Parquet | Columns] = {"ours": Ours(data, folder)}
    sides |= {layout: Parquet(data, folder, layout) for layout in ("nested", "openai", "lists")}
    sides |= {"columns": Columns(data, folder), "ours_lists": OursLists(data, folder)}
    for side in sides.values():
        side.write()
        side.check()
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            timings[name].append(_timed(getattr(side, direction)))
    medians = {name: _median(t) for name, t in timings.items()}
    ours, ours_lists = medians.pop("ours"), medians.pop("ours_lists")
    ratios = {name: {k: round(peer[k] / ours[k], 2) for k in ours} for name, peer in medians.items()}
    sizes = {name: side.path.stat().st_size for name, side in sides.items()}
    prompts = sum(len(choice["prompt_token_ids"]) for choice in _choices(data.groups))
    notes = (
        f"256 trajectories, 256,000 sampled and {prompts:,} prompt tokens, {data.turns} turns, {rounds} rounds; "
        f"bytes {json.dumps(sizes)}; size by nested's {sizes['ours'] / sizes['nested']:.2f}; "
        f"times by ours {json.dumps(ratios)}; ours from and to lists {json.dumps(ours_lists)}; pyarrow {pa.__version__}"
    )
    line = {"bench": "trajectory_io", "case": case, "ours": ours, "peers": medians, "ratio": ratios["nested"]}
    print(json.dumps({**line, "notes": notes}), flush=True)


def _timed(run: Callable[[], Any]) -> Timing:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = run()
    taken = time.perf_counter() - wall, time.process_time() - cpu
    del kept  # not within the time: to free what was read is the reader's matter
    return taken


def _median(timings: list[Timing]) -> dict[str, float]:
    return {k: round(statistics.median(t[i] for t in timings), 5) for i, k in enumerate(("wall", "cpu"))}


CASES = {"write": ("write", 1), "read": ("read", 1), "write_turns": ("write", 4), "read_turns": ("read", 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(CASES), help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    if unknown := set(options.only) - CASES.keys():
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            direction, turns = CASES[name]
            race(name, direction, Data(turns), Path(folder), options.rounds)


try:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:
    sys.exit("this benchmark compares with pyarrow: pip install 'art-sky[bench]'")

if __name__ == "__main__":
    main()
