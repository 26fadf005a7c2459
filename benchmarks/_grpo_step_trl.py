"""The side of benchmarks/grpo_step.py that runs in TRL's own environment: `python _grpo_step_trl.py SPEC` with the
JSON file that grpo_step.py writes. Prints one JSON object. TRL is unpatched: the subclass only hands it rows.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class RowTrainer(GRPOTrainer):
    """Rows with their tokens and advantages, sampled elsewhere by the policy as it is (so no old logprobs)."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt_ids", "completion_ids", "mask", "advantage"]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        def padded(name: str, left: bool, ones: bool = False) -> torch.Tensor:
            rows = [torch.ones(len(x[name]), dtype=torch.long) if ones else torch.tensor(x[name]) for x in inputs]
            return torch.nn.utils.rnn.pad_sequence(rows, True, 0, "left" if left else "right")

        mask = padded("mask", False)
        return {
            "prompt_ids": padded("prompt_ids", True), "prompt_mask": padded("prompt_ids", True, ones=True),
            "completion_ids": padded("completion_ids", False),
            "completion_mask": padded("completion_ids", False, ones=True), "tool_mask": mask,
            "advantages": torch.tensor([x["advantage"] for x in inputs]), "num_items_in_batch": mask.sum(),
        }  # fmt: skip


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []  # CPU and wall seconds

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        # From one end to the next: `on_step_begin` comes before each micro-batch.
        now = time.process_time(), time.perf_counter()
        self.steps.append((now[0] - self._began[0], now[1] - self._began[1]))
        self._began = now


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    low = spec["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=torch.bfloat16 if low else torch.float32, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    rows, size = spec["rows"], spec["micro_batch"]
    args = GRPOConfig(
        spec["scratch"], report_to=[], use_cpu=True, bf16=low, save_strategy="no", logging_strategy="no",
        disable_tqdm=True, loss_type="cispo", epsilon_high=5.0, learning_rate=5e-6, max_steps=spec["steps"],
        per_device_train_batch_size=size, gradient_accumulation_steps=len(rows) // size, num_generations=len(rows),
        max_completion_length=max(len(r["completion_ids"]) for r in rows), gradient_checkpointing=False,
        shuffle_dataset=False,
    )  # fmt: skip
    # TRL reads the whole batch anew for each micro-batch, and makes rows of the first reading.
    read = rows * spec["steps"] * (len(rows) // size)
    clock = Clock()
    trainer = RowTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args, Dataset.from_list(read),
        processing_class=tokenizer, callbacks=[clock],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    assert len(clock.steps) == spec["steps"], clock.steps
    best = sorted(clock.steps[1:] or clock.steps)  # the first warms up
    cpu, wall = best[len(best) // 2]
    print(json.dumps({"cpu": cpu, "wall": wall, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))


if __name__ == "__main__":
    main()
