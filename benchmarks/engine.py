"""The CPU engine against `transformers.generate`, both with one unmerged LoRA adapter (issue: at least 1.5 times).

    python benchmarks/engine.py [--rounds 3] [--only mixed,equal,single,join,prefix] [--threads 2]

Ours is the scheduler driven directly in this process, as the worker's main loop drives it; the peer is the PEFT
model's `generate` on left-padded batches of 16 and of 64 in arrival order, sampling at temperature 1. Both run on
SmolLM2-135M-Instruct in bfloat16 with the same adapter (rank 8, all linear layers, B not zero), the same prompts,
the same forced lengths and the same number of threads, in turn within one process. One JSON line a case: `ours`
and `peers` are medians over the rounds in useful tokens a second, by wall and by CPU time; `ratio` is ours over
the best peer (`join` and `prefix` count steps and tokens, so their numbers do not depend on the machine).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from art_sky import base_models
from art_sky.config import EngineConfig
from art_sky.inference.protocol import GenerateRequest
from art_sky.inference.scheduler import Sampled, Scheduler
from art_sky.inference.worker import make_scheduler
from art_sky.schemas import AdapterRef

Task = tuple[list[int], int]  # prompt, number of tokens to sample
Timing = tuple[float, float]  # useful tokens a second of wall and of CPU time
SEED = 20261
PAD = 2


def mixed_tasks(count: int = 128) -> list[Task]:
    """Prompts of 20-120 tokens, lengths log-uniform in 8-256."""
    draw = random.Random(SEED)
    tasks = []
    for _ in range(count):
        prompt = [draw.randrange(100, 49000) for _ in range(draw.randint(20, 120))]
        tasks.append((prompt, round(8 * (256 / 8) ** draw.random())))
    return tasks


def equal_tasks(count: int = 64, length: int = 64) -> list[Task]:
    return [(prompt, length) for prompt, _ in mixed_tasks(count)]


class Bench:
    def __init__(self, threads: int, folder: Path) -> None:
        torch.set_num_threads(threads)
        self.base = base_models.resolve("smollm2-135m")
        self.config = EngineConfig(threads=threads)
        self.adapter = AdapterRef(name="bench@1", path=str(_make_adapter(self.base, folder)))
        self.scheduler = make_scheduler(self.base, self.config)
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)
        self.peer: PeftModel = PeftModel.from_pretrained(model, self.adapter.path, autocast_adapter_dtype=True).eval()
        self.threads = threads

    def requests(self, tasks: list[Task]) -> list[GenerateRequest]:
        return [
            GenerateRequest(prompt_ids=p, adapter=self.adapter, max_tokens=n, seed=i) for i, (p, n) in enumerate(tasks)
        ]

    def ours(self, tasks: list[Task]) -> Timing:
        self.scheduler.cache.forget(self.adapter.name)  # nothing is reused from an earlier round

        def run() -> None:
            for request in self.requests(tasks):
                self.scheduler.add(request)
            sampled = 0
            while not self.scheduler.idle:
                sampled += sum(isinstance(e, Sampled) for e in self.scheduler.step())
            assert sampled == sum(n for _, n in tasks)

        return _timed(run, tasks)

    def theirs(self, tasks: list[Task], batch: int) -> Timing:
        def run() -> None:
            for start in range(0, len(tasks), batch):
                part = tasks[start : start + batch]
                width = max(len(p) for p, _ in part)
                ids = torch.tensor([[PAD] * (width - len(p)) + p for p, _ in part])
                mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
                longest = max(n for _, n in part)
                out = self.peer.generate(
                    input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    min_new_tokens=longest, max_new_tokens=longest, pad_token_id=PAD,
                )  # fmt: skip
                assert out.shape[1] == width + longest

        with torch.inference_mode():
            return _timed(run, tasks)

    def race(self, case: str, tasks: list[Task], batches: list[int], rounds: int, notes: str) -> None:
        ours: list[Timing] = []
        peers: dict[str, list[Timing]] = {f"transformers.generate batch {b}": [] for b in batches}
        for _ in range(rounds):
            ours.append(self.ours(tasks))
            for b in batches:
                peers[f"transformers.generate batch {b}"].append(self.theirs(tasks, b))
        us, them = _median(ours), {name: _median(t) for name, t in peers.items()}
        ratio = {k: round(us[k] / max(t[k] for t in them.values()), 2) for k in ("wall", "cpu")}
        notes = f"{notes}; useful tokens a second, {rounds} rounds, {self.threads} threads, bfloat16, LoRA rank 8"
        _report(case, us, them, ratio, notes)


def case_mixed(bench: Bench, rounds: int) -> None:
    bench.race("mixed", mixed_tasks(), [16, 64], rounds, "128 requests, prompts 20-120, lengths log-uniform 8-256")


def case_equal(bench: Bench, rounds: int) -> None:
    bench.race("equal", equal_tasks(), [16, 64], rounds, "64 requests, prompts 20-120, 64 tokens each")


def case_single(bench: Bench, rounds: int) -> None:
    bench.race("single", equal_tasks(1, 128), [1], rounds, "one stream of 128 tokens")


def case_join(bench: Bench, rounds: int) -> None:
    """Steps until a request that joins 16 running ones has its first token."""
    scheduler = _idle(bench)
    for request in bench.requests([(p, 40) for p, _ in mixed_tasks(16)]):
        scheduler.add(request)
    while any(s.pending > 1 for s in scheduler.running) or scheduler.waiting:
        scheduler.step()
    late = scheduler.add(bench.requests([(mixed_tasks(17)[16][0], 4)])[0])
    steps = 0
    while not late.sampled:
        scheduler.step()
        steps += 1
    while not scheduler.idle:
        scheduler.step()
    _report(
        "join", {"steps": steps}, {}, {}, f"prompt of {len(late.request.prompt_ids)} tokens joins 16 running requests"
    )


def case_prefix(bench: Bench, rounds: int) -> None:
    """Prompt tokens computed for eight equal prompts, then for a second turn of one of them."""
    scheduler = _idle(bench)
    prompt = mixed_tasks(1)[0][0]
    before = scheduler.counters.tokens_prefilled
    eight = [scheduler.add(r) for r in bench.requests([(prompt, 12)] * 8)]
    while not scheduler.idle:
        scheduler.step()
    together = scheduler.counters.tokens_prefilled - before
    new = list(range(1000, 1020))
    scheduler.add(bench.requests([(eight[0].tokens + new, 4)])[0])
    while not scheduler.idle:
        scheduler.step()
    ours = {
        "prefilled_by_eight": together,
        "prefilled_by_turn_2": scheduler.counters.tokens_prefilled - before - together,
    }
    notes = (
        f"eight prompts of {len(prompt)} tokens (each copy computes its last one); turn 2 adds {len(new)} tokens "
        "to the last sampled one, which was never fed"
    )
    _report("prefix", ours, {}, {}, notes)


CASES: dict[str, Callable[[Bench, int], None]] = {
    "mixed": case_mixed,
    "equal": case_equal,
    "single": case_single,
    "join": case_join,
    "prefix": case_prefix,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(CASES), help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    if unknown := set(options.only) - CASES.keys():
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    if "OMP_WAIT_POLICY" not in os.environ:
        # As CpuEngine starts its worker: on busy cores, spinning threads make both sides tens of times slower.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "passive"})
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.threads, Path(folder))
        bench.ours(equal_tasks(2, 4))
        bench.theirs(equal_tasks(2, 4), 2)
        for name in options.only:
            CASES[name](bench, options.rounds)


def _make_adapter(base: Path, folder: Path) -> Path:
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    peft = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    peft.save_pretrained(folder)
    return folder


def _idle(bench: Bench) -> Scheduler:
    bench.scheduler.cache.forget(bench.adapter.name)
    return bench.scheduler


def _timed(run: Callable[[], None], tasks: list[Task]) -> Timing:
    useful = sum(n for _, n in tasks)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return useful / (time.perf_counter() - wall), useful / (time.process_time() - cpu)


def _median(timings: list[Timing]) -> dict[str, float]:
    return {k: round(statistics.median(t[i] for t in timings), 1) for i, k in enumerate(("wall", "cpu"))}


def _report(case: str, ours: Any, peers: Any, ratio: dict[str, float], notes: str) -> None:
    line = {"bench": "engine", "case": case, "ours": ours, "peers": peers, "ratio": ratio, "notes": notes}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
