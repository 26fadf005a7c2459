"""One optimizer step on a GPU: the prefix tree against plain rows, with random weights in the shapes of Qwen3.

    python benchmarks/gpu_step.py [--models 0.6B,4B] [--tokens 4096,16384] [--seconds 380]
    python benchmarks/gpu_step.py --tiny        # the same on a CPU with a model of a few layers, as its test runs it

Needs torch, transformers, peft, what these bring (pydantic comes with transformers) and art-sky's sources
(`PYTHONPATH=.`), no network and no files. Base in bfloat16, LoRA of rank 16 on all linear layers. A case is a group of
8 completions of one prompt, as many tokens long as the case says when each unique token counts once, trained as one
packed row (`tree`) and as a plain row a completion in micro-batches of the same number of tokens (`rows`), alternately
in this process after one step of each to warm up.

One JSON line a case, as soon as it is known: `ours` is the tree, the peer plain rows, both medians of `steps`; a side
that does not fit into the memory says so, and the next one goes on. At the end the table of docs/performance.md stands
on standard error. Without a GPU one line says so.

    tokens_per_second         of all sequences, padding left out: what the batch holds
    unique_tokens_per_second  that were computed: equal to the above for `rows`
    mfu                       multiply-adds that the computed tokens need (forward, and backward to the activations; the
                              frozen weights have no gradient; the adapter is left out) by the peak of bfloat16
    peak_mib                  of tensors on the GPU; on a CPU, of the process since it began

No case and no step begins when `--seconds` have gone, so that the whole stays below 8 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("zstandard") is None:
    # Of the store's files, of which there are none here.
    sys.modules["zstandard"] = types.SimpleNamespace(ZstdError=ValueError)  # type: ignore[assignment]

from art_sky.config import LoRAConfig, TrainConfig
from art_sky.training.device import begin_peak, choose_device, peak_mib
from art_sky.training.model import Policy
from art_sky.training.sequences import Batch, build_batch
from art_sky.training.state import TrainerState
from art_sky.training.trainer import train

GROUP = 8
# Of the shapes on the Hugging Face hub: hidden, inner, layers, heads, key-value heads, head width, vocabulary.
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936),
    "tiny": (64, 128, 2, 4, 2, 16, 512),
}
# bfloat16 without sparsity, in FLOP a second, from NVIDIA's data sheets; a name is found by a part of it.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "L4": 121e12}


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int  # unique ones of the group
    prompt: int
    completion: int

    @classmethod
    def of(cls, model: str, tokens: int) -> Case:
        """Half of the unique tokens are the prompt, as in a group of short answers to a long task."""
        completion = tokens // (2 * GROUP)
        return cls(model, tokens, tokens - GROUP * completion, completion)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6B,4B")
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=380.0, help="after which no case begins")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.models, options.tokens, options.steps = "tiny", "256", 1
    device = choose_device()
    if device.type == "cpu" and not options.tiny:
        empty: dict[str, Any] = {"ours": {}, "peers": {}, "ratio": {}}
        notes = {"skipped": "torch sees no GPU here; --tiny runs on a CPU"}
        print(json.dumps({"bench": "gpu_step", "case": "none", **empty, "notes": notes}))
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    deadline = time.monotonic() + options.seconds
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models.split(","):
            if time.monotonic() > deadline:
                break
            policy = Policy(make_model(model, Path(scratch)), "bfloat16", device=device)
            state = TrainerState.fresh(policy.new_adapter(LoRAConfig(rank=16, alpha=32), model), policy.adapter())
            for tokens in map(int, options.tokens.split(",")):
                if time.monotonic() < deadline:
                    case = Case.of(model, tokens)
                    found = measure(policy, state, case, options.steps, deadline)
                    lines.append(report(case, found, name, peak))
                    print(json.dumps(lines[-1]), flush=True)
            del policy, state
            free()
    print(table(lines), file=sys.stderr)


def measure(
    policy: Policy, state: TrainerState, case: Case, steps: int, deadline: float
) -> dict[str, list[dict[str, float]]]:
    """What each step of each side took; the first of each is left out, unless time is up after it. Of a side that does
    not fit into the memory: nothing."""
    config = TrainConfig(micro_batch_tokens=case.tokens)
    batch = build_batch(
        [group(case, SHAPES[case.model][-1])],
        config,
        vocab_size=policy.vocab_size,
        context_length=policy.context_length,
    )
    if policy.not_packed is not None:
        raise SystemExit(f"packed rows are not exact here: {policy.not_packed}")
    found: dict[str, list[dict[str, float]]] = {"tree": [], "rows": []}
    fits = dict.fromkeys(found, True)
    for n in range(steps + 1):
        for side, seen in found.items():
            if n and time.monotonic() > deadline:
                return found
            try:
                if fits[side]:
                    seen.append(one_step(policy, state, batch, config, plain=side == "rows"))
            except torch.OutOfMemoryError:
                fits[side] = False
            if not fits[side]:
                seen.clear()
                free()  # after the exception, which holds what its frames do
            elif n == 1:
                del seen[0]
    return found


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def one_step(policy: Policy, state: TrainerState, batch: Batch, config: TrainConfig, plain: bool) -> dict[str, float]:
    policy.not_packed = "for the comparison" if plain else None
    begin_peak(policy.device)
    began = time.perf_counter()
    metrics = train(policy, state, batch, config, lambda *_: None)  # its loss is read at the end: the GPU is done
    seconds = time.perf_counter() - began
    policy.not_packed = None
    return {
        "seconds": seconds,
        "peak_mib": peak_mib(policy.device),
        "computed": metrics["data/tokens_computed"] or 0.0,
        "total": metrics["data/tokens_total"] or 0.0,
        "loss": metrics["loss"] or 0.0,
    }


def report(case: Case, found: dict[str, list[dict[str, float]]], gpu: str, peak: float | None) -> dict[str, Any]:
    tree, rows = (summary(case, side, found[side], peak) for side in ("tree", "rows"))
    return {
        "bench": "gpu_step",
        "case": f"{case.model} {case.tokens}",
        "ours": tree,
        "peers": {"rows": rows},
        "ratio": {"seconds": round(rows["seconds"] / tree["seconds"], 3)} if "seconds" in tree.keys() & rows else {},
        "notes": {"gpu": gpu, "torch": torch.__version__, "steps": min(map(len, found.values()))},
    }


def summary(case: Case, side: str, steps: list[dict[str, float]], peak: float | None) -> dict[str, Any]:
    if not steps:
        return {"out_of_memory": True}
    each = {k: statistics.median(step[k] for step in steps) for k in steps[0]}
    rate = flops_of(case, plain=side == "rows") / each["seconds"]
    return {
        "seconds": round(each["seconds"], 4),
        "tokens_per_second": round(each["total"] / each["seconds"], 1),
        "unique_tokens_per_second": round(each["computed"] / each["seconds"], 1),
        "tflops": round(rate / 1e12, 6),
        "mfu": None if peak is None else round(rate / peak, 4),
        "peak_mib": round(each["peak_mib"]),
        "loss": each["loss"],
    }


def table(lines: list[dict[str, Any]]) -> str:
    """For docs/performance.md."""
    columns = ("tokens_per_second", "unique_tokens_per_second", "mfu", "peak_mib")
    machines = {f"{line['notes']['gpu']}, torch {line['notes']['torch']}" for line in lines}
    rows = [f"{datetime.date.today():%d %B %Y}: {'; '.join(machines)}", ""]
    rows += ["| case | side | tokens/s | unique tokens/s | MFU | peak MiB |", "|---|---|---|---|---|---|"]
    for line in lines:
        for side, found in (("tree", line["ours"]), ("rows", line["peers"]["rows"])):
            cells = ["out of memory", "", "", ""] if "out_of_memory" in found else [str(found[c]) for c in columns]
            rows.append(f"| {line['case']} | {side} | {' | '.join(cells)} |")
    return "\n".join(rows)


def flops_of(case: Case, plain: bool) -> float:
    """Two a multiply-add; forward once, and once more for the gradient of the activations. Attention has four matrix
    products backward where it has two forward. The output layer works where a token is predicted."""
    hidden, inner, layers, heads, kv, width, vocabulary = SHAPES[case.model]
    per_token = layers * (hidden * width * 2 * (heads + kv) + 3 * hidden * inner)
    prompt, completion = case.prompt, case.completion
    alone = prompt * (prompt + 1) / 2
    below = GROUP * (completion * prompt + completion * (completion + 1) / 2)
    tokens = prompt * (GROUP if plain else 1) + GROUP * completion
    pairs = alone * (GROUP if plain else 1) + below
    linear = tokens * per_token + GROUP * completion * hidden * vocabulary
    return 2 * (2 * linear + 3 * pairs * layers * 2 * heads * width)


def group(case: Case, vocabulary: int) -> dict[str, Any]:
    """The group as a client would send it."""
    draw = random.Random(7)
    prompt = [draw.randrange(vocabulary) for _ in range(case.prompt)]
    trajectories = []
    for i in range(GROUP):
        ids = [draw.randrange(vocabulary) for _ in range(case.completion)]
        choice = {
            "finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": ""},
            "prompt_token_ids": prompt, "token_ids": ids, "token_logprobs": [-10.0] * len(ids),
            "sampling": {"temperature": 1.0, "comparable": True},
        }  # fmt: skip
        trajectories.append({"messages_and_choices": [choice], "reward": float(i)})
    return {"trajectories": trajectories, "exceptions": []}


def make_model(name: str, scratch: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, inner, layers, heads, kv, width, vocabulary = SHAPES[name]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=width, max_position_embeddings=40960,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = scratch / name
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with choose_device():  # billions of random numbers: there they take a second
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
