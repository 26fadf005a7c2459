"""What works where, and how that is known: one table, from which docs/capabilities.md is made.

    python -m art_sky.capabilities > docs/capabilities.md

What no machine of the project could run is `untested`: it is written after the sources of what it drives, and starts
only with `allow_untested` (`--allow-untested`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art_sky.errors import InvalidConfig

Status = Literal["tested", "untested", "no"]

CPU, GPU = "CPU", "NVIDIA GPU"


@dataclass(frozen=True)
class Capability:
    """`what` of `part` on `where`; `note` says how it is tested, or what happens instead."""

    part: str
    what: str
    where: str
    status: Status
    note: str = ""


TABLE: tuple[Capability, ...] = (
    Capability("engine cpu", "sampling, several adapters in a batch", CPU, "tested", "default test suite"),
    Capability("engine cpu", "sampling", GPU, "no", "it runs on the CPU of such a machine"),
    Capability("engine cpu", "sliding windows, DoRA, rsLoRA", CPU, "no", "refused when model or adapter is loaded"),
    Capability("engine cpu", "the numbers of the trainer's 4-bit base", CPU, "tested", "held in bfloat16"),
    Capability("engine vllm", "sampling, several adapters in a batch", CPU, "tested", "`make test-vllm`, vLLM 0.32.0"),
    Capability("engine vllm", "restart and adapters loaded anew after its death", CPU, "tested", "`make test-vllm`"),
    Capability("engine vllm", "sampling", GPU, "untested"),
    Capability("engine vllm", "asleep while the trainer computes on the same GPU", GPU, "untested"),
    Capability(
        "engine vllm", "asleep while the trainer computes", CPU, "no", "vLLM ignores it there; both fit side by side"
    ),
    Capability("engine vllm", "the numbers of the trainer's 4-bit base", GPU, "untested", "held in bfloat16"),
    Capability("engine vllm", "half of the GPUs, tensor parallel; the trainer has the rest", GPU, "untested"),
    Capability(
        "engine vllm", "logprobs without filters under top_p, top_k, min_p", CPU, "no", "such tokens have ratio 1"
    ),
    Capability("trainer", "one process", CPU, "tested", "default test suite"),
    Capability("trainer", "one process", GPU, "untested", "with engine vllm; docs/performance.md says what is tested"),
    Capability("trainer", "several processes", CPU, "tested", "gloo; default test suite"),
    Capability("trainer", "several processes", GPU, "untested", "NCCL, a GPU each"),
    Capability("trainer", "8-bit optimizer", CPU, "tested", "default test suite, bitsandbytes 0.50.2"),
    Capability("trainer", "8-bit optimizer", GPU, "untested"),
    Capability("trainer", "4-bit base (NF4)", CPU, "tested", "default test suite, bitsandbytes 0.50.2"),
    Capability("trainer", "4-bit base (NF4)", GPU, "untested"),
    Capability("trainer trl", "training", CPU, "tested", "default test suite, TRL 1.15.0"),
    Capability("trainer trl", "training", GPU, "untested"),
    Capability("trainer unsloth", "training", CPU, "tested", "`make test-unsloth`, Unsloth 2026.10.9"),
    Capability("trainer unsloth", "training", GPU, "untested"),
    Capability("trainer unsloth", "4-bit base (NF4)", CPU, "no", "use the trainer native, which quantises there"),
    Capability("trainer unsloth", "4-bit base (NF4)", GPU, "untested"),
)


def require(part: str, what: str, where: str, allow_untested: bool) -> None:
    """Raises InvalidConfig for a row that is `no`, and for one that is `untested` unless that is allowed."""
    row = next(c for c in TABLE if (c.part, c.what, c.where) == (part, what, where))
    if row.status == "no":
        raise InvalidConfig(f"{part}: {what} does not work on a {where}; {row.note or 'choose another'}")
    if row.status == "untested" and not allow_untested:
        raise InvalidConfig(
            f"{part}: {what} on a {where} was never run by art-sky's tests; give --allow-untested to use it"
        )


def markdown() -> str:
    lines = [
        "# Capabilities",
        "",
        "Made by `python -m art_sky.capabilities`. What is *untested* no machine of the project could run; it needs",
        "`--allow-untested`. *no* is refused, or does what the note says.",
        "",
        "| part | what | where | status | note |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {c.part} | {c.what} | {c.where} | {c.status} | {c.note} |" for c in TABLE]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
