"""One optimizer step on a group of rollouts, LoRA rank 8 on all linear layers, against TRL's GRPOTrainer.

    python benchmarks/grpo_step.py [--models 4-layer,smollm2] [--cases P1024,...] [--rounds 3] [--peer-python PATH]

TRL 1.16.0 runs unpatched in an environment of its own (`make bench` makes it at .venv-trl), is fed the same tokens
and advantages without the forward pass that recomputes old logprobs, and runs at the best of its micro-batches of
1, 2, 4 and 8 rows. Processes of both sides alternate; each takes one step to warm up and reports the median of the
others, in CPU seconds of one thread, wall seconds, and the peak of its memory.

    P1024, P2048  a prompt of so many tokens, 8 completions of 128
    tree          8 rollouts of 6 turns that fork at turn 3, a row each
    split         the same, each turn a sequence of its own, as where a template strips thinking
    none          8 rows that share nothing

One JSON line a case. `ratio.cpu` is TRL's time by ours; `notes.bound` what it would be if both did nothing but the
multiplications that their tokens need (linear layers, attention over visible pairs, output layer where a token is
predicted), and `notes.of_bound` their quotient.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEER = HERE.parent / ".venv-trl" / "bin" / "python"
MICRO_BATCHES = (1, 2, 4, 8)
GROUP = 8
Row = dict[str, Any]  # prompt_ids, completion_ids, mask, advantage, rollout


@dataclass(frozen=True)
class Shape:
    """What the multiplications of a model cost, in multiply-adds."""

    per_token: int
    per_pair: int
    per_prediction: int
    vocabulary: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="4-layer,smollm2")
    parser.add_argument("--cases", default="P1024,P2048,tree,split,none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each process, the first to warm up")
    parser.add_argument("--micro-batches", default=",".join(map(str, MICRO_BATCHES)))
    parser.add_argument("--micro-batch-tokens", type=int, default=None, help="ours; default: TrainConfig's")
    parser.add_argument("--peer-python", type=Path, default=PEER, help="of an environment with trl==1.16.0")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)  # the child process
    options = parser.parse_args()
    if options.ours:
        run_ours(json.loads(options.ours.read_text()))
        return
    if not options.peer_python.exists():
        parser.error(f"{options.peer_python} does not exist; run `make bench`, or give --peer-python")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models.split(","):
            folder, dtype = model_folder(name, Path(scratch))
            shape = shape_of(folder)
            for case in options.cases.split(","):
                rows = make_rows(case, shape.vocabulary)
                spec = {"model": str(folder), "dtype": dtype, "threads": 1, "steps": options.steps, "rows": rows}
                spec |= {"scratch": scratch, "micro_batch_tokens": options.micro_batch_tokens}
                measure(f"{name} {case}", spec, shape, options)


def measure(case: str, spec: dict[str, Any], shape: Shape, options: argparse.Namespace) -> None:
    ours_command = [sys.executable, str(HERE / "grpo_step.py"), "--ours"]
    trl_command = [str(options.peer_python), str(HERE / "_grpo_step_trl.py")]
    sizes = [int(n) for n in options.micro_batches.split(",")]
    first = {n: child(trl_command, spec | {"micro_batch": n, "steps": 2}) for n in sizes}
    best = min(sizes, key=lambda n: first[n]["cpu"])
    ours, trl = [], []
    for _ in range(options.rounds):
        ours.append(child(ours_command, spec))
        trl.append(child(trl_command, spec | {"micro_batch": best}))
    a, b = ({k: statistics.median(r[k] for r in side) for k in ("cpu", "wall", "peak")} for side in (ours, trl))
    bound = cost_of_rows(spec["rows"], shape) / cost_of_tree(spec["rows"], shape)
    ratio = {k: round(b[k] / a[k], 3) for k in a}
    result = {
        "bench": "grpo_step",
        "case": case,
        "ours": a,
        "peers": {"trl": b},
        "ratio": ratio,
        "notes": {
            "bound": round(bound, 3),
            "of_bound": round(ratio["cpu"] / bound, 3),
            "trl_micro_batch": best,
            "trl_cpu_by_micro_batch": {n: round(r["cpu"], 3) for n, r in first.items()},
            "trl_peak_by_micro_batch": {n: r["peak"] for n, r in first.items()},
            "rounds": options.rounds,
        },
    }
    print(json.dumps(result), flush=True)


def child(command: list[str], spec: dict[str, Any]) -> dict[str, float]:
    path = Path(spec["scratch"]) / "spec.json"
    path.write_text(json.dumps(spec))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_ours(spec: dict[str, Any]) -> None:
    import torch

    from art_sky.config import LoRAConfig, TrainConfig
    from art_sky.training.model import Policy
    from art_sky.training.sequences import build_batch
    from art_sky.training.state import TrainerState
    from art_sky.training.trainer import train

    torch.set_num_threads(spec["threads"])
    policy = Policy(Path(spec["model"]), spec["dtype"])
    state = TrainerState.fresh(policy.new_adapter(LoRAConfig(rank=8), "bench"), policy.adapter())
    tokens = {"micro_batch_tokens": spec["micro_batch_tokens"]} if spec["micro_batch_tokens"] else {}
    config = TrainConfig(**tokens)
    groups = as_groups(spec["rows"])
    steps = []
    for _ in range(spec["steps"]):
        began = time.process_time(), time.perf_counter()
        batch = build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)
        train(policy, state, batch, config, lambda *_: None)
        steps.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    timed = sorted(steps[1:] or steps)
    cpu, wall = timed[len(timed) // 2]
    print(json.dumps({"cpu": cpu, "wall": wall, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))


def as_groups(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as a client would send them: trajectories of choices with their tokens."""
    trajectories: dict[int, dict[str, Any]] = {}
    for row in rows:
        made = trajectories.setdefault(row["rollout"], {"messages_and_choices": [], "reward": row["advantage"]})
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        start = 0
        while start < len(row["mask"]):
            stop = start
            while stop < len(row["mask"]) and row["mask"][stop] == row["mask"][start]:
                stop += 1
            if row["mask"][start]:
                at = len(row["prompt_ids"]) + start
                sampled = row["completion_ids"][start:stop]
                made["messages_and_choices"].append(
                    {
                        "finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": ""},
                        "prompt_token_ids": ids[:at], "token_ids": sampled, "token_logprobs": [-5.0] * len(sampled),
                        "sampling": {"temperature": 1.0, "comparable": True},
                    }
                )  # fmt: skip
            start = stop
    return [{"trajectories": list(trajectories.values()), "exceptions": []}]


def make_rows(case: str, vocabulary: int) -> list[Row]:
    draw = random.Random(7)

    def ids(n: int) -> list[int]:
        return [draw.randrange(4, vocabulary) for _ in range(n)]

    advantage = [draw.gauss(0, 1) for _ in range(GROUP)]
    if case in ("P1024", "P2048", "none"):
        prompt = ids(int(case[1:]) if case != "none" else 512)
        return [
            {
                "prompt_ids": prompt if case != "none" else ids(512), "completion_ids": ids(128), "mask": [1] * 128,
                "advantage": advantage[i], "rollout": i,
            }
            for i in range(GROUP)
        ]  # fmt: skip
    if case not in ("tree", "split"):
        sys.exit(f"no case {case}")
    prompt, common = ids(512), [(ids(64), ids(96)) for _ in range(2)]
    rows: list[Row] = []
    for i in range(GROUP):
        turns = [*common, *((ids(64), ids(96)) for _ in range(4))]
        if case == "tree":
            completion = [t for answer, reply in turns for t in (*answer, *reply)][:-96]
            mask = [m for _ in turns for m in (*[1] * 64, *[0] * 96)][:-96]
            rows.append({"prompt_ids": prompt, "completion_ids": completion, "mask": mask})
            rows[-1] |= {"advantage": advantage[i], "rollout": i}
            continue
        history = prompt
        for answer, reply in turns:
            rows.append({"prompt_ids": history, "completion_ids": answer, "mask": [1] * 64})
            rows[-1] |= {"advantage": advantage[i], "rollout": i}
            # What was thought is stripped from the history: the next prompt begins with half of the answer.
            history = [*history, *answer[:32], *reply]
    return rows


def cost_of_rows(rows: list[Row], shape: Shape) -> float:
    """Multiply-adds of the rows without padding; the completion's positions are predicted, as TRL does it."""
    lengths = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rows]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    predicted = sum(len(r["completion_ids"]) for r in rows)
    return sum(lengths) * shape.per_token + pairs * shape.per_pair + predicted * shape.per_prediction


def cost_of_tree(rows: list[Row], shape: Shape) -> float:
    """Multiply-adds of every unique prefix token once, and of every place at which a token is predicted."""
    depth: dict[tuple[int, int], int] = {}  # (number of the prefix before, id) -> number of the prefix
    tokens, pairs = 0, 0.0
    predicted: set[int] = set()
    for row in rows:
        at = 0
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        for i, token in enumerate(ids):
            if i >= len(row["prompt_ids"]) and row["mask"][i - len(row["prompt_ids"])]:
                predicted.add(at)
            if (at, token) not in depth:
                depth[at, token] = len(depth) + 1
                tokens, pairs = tokens + 1, pairs + i + 1
            at = depth[at, token]
    return tokens * shape.per_token + pairs * shape.per_pair + len(predicted) * shape.per_prediction


def model_folder(name: str, scratch: Path) -> tuple[Path, str]:
    if name == "smollm2":
        from art_sky.base_models import resolve

        return resolve("smollm2-135m"), "bfloat16"
    if name != "4-layer":
        sys.exit(f"no model {name}")
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=8192,
    )  # fmt: skip
    folder = scratch / name
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(2048)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2").save_pretrained(folder)
    return folder, "float32"


def shape_of(folder: Path) -> Shape:
    c = json.loads((folder / "config.json").read_text())
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    heads, kv, hidden, inner = (
        c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"], c["intermediate_size"],
    )  # fmt: skip
    layer = hidden * width * (2 * heads + 2 * kv) + 3 * hidden * inner
    layers = c["num_hidden_layers"]
    return Shape(layers * layer, layers * 2 * heads * width, c["vocab_size"] * hidden, c["vocab_size"])


if __name__ == "__main__":
    main()
