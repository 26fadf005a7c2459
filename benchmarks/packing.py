"""Host time from trajectories to packed rows: 1,000 trajectories of 2,000 tokens each.

    python benchmarks/packing.py [--rounds 7]

125 groups of 8; each group shares a prompt of 1,000 tokens, and half of it the first of two turns as well. The batch
is in memory as the trainer reads it from the store (ids and logprobs as arrays, `decode_batch`); timed are the checks
of every choice, the sequences, the prefix trees, the plan and the tables of trained tokens, that is all that a train
call does before the first tensor. One JSON line: `ours` is the median in seconds, the target is under 0.5.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from typing import Any

from art_sky.config import TrainConfig
from art_sky.store.batches import decode_batch, encode_batch
from art_sky.training.objective import make_parts
from art_sky.training.sequences import build_batch

GROUPS, SIZE, PROMPT, TURN, VOCABULARY = 125, 8, 1000, 500, 49152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    groups = decode_batch(encode_batch(make_groups()))
    config = TrainConfig()
    cpu, wall = [], []
    for _ in range(rounds):
        gc.collect()
        began = time.process_time(), time.perf_counter()
        batch = build_batch(groups, config, vocab_size=VOCABULARY, context_length=4096)
        parts = make_parts(batch.sequences, config, share=True)
        cpu.append(time.process_time() - began[0])
        wall.append(time.perf_counter() - began[1])
    (part,) = parts
    segments = [s for top in part.segments for s in top.walk()]
    notes = {
        "sequences": len(batch.sequences),
        "tokens": sum(map(len, batch.sequences)),
        "unique_tokens": sum(s.unpadded for s in segments),
        "segments": len(segments),
        "target": 0.5,
        "rounds": rounds,
    }
    ours = {"cpu": statistics.median(cpu), "wall": statistics.median(wall)}
    result = {"bench": "packing", "case": "1000x2000", "ours": ours, "peers": {}, "ratio": {}, "notes": notes}
    print(json.dumps(result), flush=True)


def make_groups() -> list[dict[str, Any]]:
    draw = random.Random(1)

    def ids(n: int) -> list[int]:
        return draw.choices(range(VOCABULARY), k=n)

    def choice(prompt: list[int], sampled: list[int]) -> dict[str, Any]:
        return {
            "finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "..."},
            "prompt_token_ids": prompt, "token_ids": sampled, "token_logprobs": [-1.5] * len(sampled),
            "sampling": {"temperature": 1.0, "comparable": True},
        }  # fmt: skip

    groups = []
    for _ in range(GROUPS):
        prompt, common = ids(PROMPT), ids(TURN)
        trajectories = []
        for i in range(SIZE):
            first = common if i % 2 else ids(TURN)
            items = [choice(prompt, first), choice([*prompt, *first], ids(TURN))]
            trajectories.append({"messages_and_choices": items, "reward": draw.random()})
        groups.append({"trajectories": trajectories, "exceptions": []})
    return groups


if __name__ == "__main__":
    main()
