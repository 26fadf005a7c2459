"""The demo: a small chat model learns by reinforcement to answer "maybe".

The task is the smallest that needs everything: prompts that ask for one of the words yes, no and maybe; "maybe"
earns 1, "yes" 0.75, "no" 0.5, anything else nothing. The untrained model earns next to nothing. It is judged by
phrasings that it is never trained on, before and after. All of it runs through the public API, as an agent would.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

from art_sky.base_models import SMOLLM2, resolve
from art_sky.client.gather import gather_trajectory_groups
from art_sky.client.local_backend import LocalBackend
from art_sky.client.model import TrainableModel
from art_sky.config import EngineConfig, LoRAConfig, TrainerConfig
from art_sky.schemas import Checkpoint, HistoryRow
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore
from art_sky.trajectories import Trajectory, TrajectoryGroup

PROJECT = "demo"
GROUPS, SAMPLES, VALIDATION_SAMPLES = 8, 16, 16
MAX_TOKENS = 6
# "yes" is found first and earns 0.75. Sampling a little hotter than the policy, and advantages that shrink with the
# spread of a group, keep it from settling there before "maybe" was tried.
TRAINING_TEMPERATURE, VALIDATION_TEMPERATURE = 1.2, 1.0
SCALE_REWARDS = False
SYSTEM = "You answer with one word."
REWARDS = {"maybe": 1.0, "yes": 0.75, "no": 0.5}
_FORMS = ("{} with exactly one word: {}", "just {} with {}", "{} with a single word, {}")
_VERBS = ("respond", "answer", "reply")
_OPTIONS = [" or ".join(two) for two in permutations(REWARDS, 2)]
_OPTIONS += ["{}, {}, or {}".format(*three) for three in permutations(REWARDS)]
TRAINING_PROMPTS = [f.format(v, o) for f in _FORMS for v in _VERBS for o in _OPTIONS]
VALIDATION_PROMPTS = [
    "Say one of these: no, yes, maybe",
    "Choose a word: maybe, no, or yes",
    "What is it, yes or no?",
    "Please give me maybe, yes, or no",
    "Which one, no or maybe?",
    "Tell me: yes, maybe, no",
    "Your only options are no, yes, or maybe",
    "Pick yes, no or maybe and write it down",
]


@dataclass(frozen=True)
class DemoOptions:
    """`seed` fixes prompts, LoRA initialisation and every request's seed; each seed is a model of its own.

    `store` is a path or URL.
    """

    store: str = ".art-sky"
    steps: int = 20
    seed: int = 0
    learning_rate: float = 6e-4
    fresh: bool = False
    engine: Literal["cpu", "vllm"] = "cpu"
    trainer: Literal["native", "trl", "unsloth"] = "native"
    allow_untested: bool = False

    @property
    def name(self) -> str:
        return f"yes-no-maybe-{self.seed}"

    @property
    def folder(self) -> Path:
        """For logs, scratch and the picture of the curve: the store where it is a folder, else one in this place."""
        url = urlsplit(open_store(self.store).url)
        return Path(unquote(url.path)) if url.scheme == "file" else Path(".art-sky").resolve()


@dataclass(frozen=True)
class StepRow:
    """One train step; None is what an interruption kept from being logged. `skipped`: no group had a spread."""

    step: int
    reward: float | None
    seconds: float | None
    tokens_sampled: int | None
    tokens_trained: int | None
    loss: float | None
    grad_norm: float | None
    skipped: bool


@dataclass(frozen=True)
class DemoResult:
    base_model: str
    steps: list[StepRow]
    validation: dict[str, float | int]  # before, after: mean rewards; samples: of each
    seconds: float  # of this call; an earlier, interrupted one is not counted
    head: dict[str, str | int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Report(Protocol):
    """Who watches."""

    def phase(self, text: str, done: int = 0, total: int | None = None, in_bytes: bool = False) -> None:
        """What is being done now, and how much of how much: steps, or bytes."""
        ...

    def note(self, text: str) -> None: ...

    def step(self, row: StepRow) -> None: ...

    def validation(self, step: int, reward: float) -> None: ...


def run_demo(options: DemoOptions, report: Report) -> DemoResult:
    """Trains up to step `options.steps`, from HEAD where there is one. Blocks.

    Interrupted at any moment it leaves a state from which the next call goes on. Raises typed errors.
    """
    began = time.monotonic()
    # Before the event loop starts: Ctrl-C then ends a download at once.
    resolve(SMOLLM2, lambda what, done, total: report.phase(what, done, total, what.startswith("download")))
    if options.fresh:
        forget(options)
    return asyncio.run(_run(options, report, began))


def forget(options: DemoOptions) -> None:
    """Deletes the demo's model of this seed. Raises LeaseLost when a server has it."""
    store = open_store(options.store)
    model = ModelStore(store, PROJECT, options.name)
    lease_key = model.key("leases/server")
    lease = store.acquire(lease_key, "art-sky demo --fresh", store.lease_wait_seconds)
    try:
        store.delete(model.key("HEAD"))  # first, so that what is half deleted has no steps
        for info in list(store.list(model.key(""))):
            if info.key != lease_key:
                store.delete(info.key)
    finally:
        lease.release()


def score(text: str | None) -> float:
    return REWARDS.get((text or "").strip().lower().strip(".!"), 0.0)


async def rollout(model: TrainableModel[Any], name: str, prompt: str, seed: int, temperature: float) -> Trajectory:
    """The agent: one question, one answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=name,
        messages=messages,  # type: ignore[arg-type]  # plain dicts are what agent code writes
        max_tokens=MAX_TOKENS,
        seed=seed,
        temperature=temperature,
    )
    choice = completion.choices[0]
    return Trajectory(messages_and_choices=[*messages, choice], reward=score(choice.message.content))


async def _run(options: DemoOptions, report: Report, began: float) -> DemoResult:
    async with LocalBackend(
        path=options.folder,
        store=open_store(options.store).url,
        engine=EngineConfig(kind=options.engine),
        trainer=TrainerConfig(kind=options.trainer),
        allow_untested=options.allow_untested,
    ) as backend:
        model: TrainableModel[Any] = TrainableModel(
            name=options.name, project=PROJECT, base_model=SMOLLM2, lora=LoRAConfig(seed=options.seed)
        )
        report.phase("starting the server, the engine and the trainer")
        await model.register(backend)
        first = await model.get_step()
        if first >= options.steps:
            report.note(f"step {first} is there already; --steps {first + 10} goes on, --fresh starts anew")
        elif first > 0:
            report.note(f"going on from step {first}")
        before = _reward(await backend.history(model), 0, "val")
        if before is None:
            before = await _validate(model, options, 0, report)
        report.validation(0, before)
        rows = _rows(await backend.history(model), await backend.checkpoints(model))
        for row in rows:
            report.step(row)
        for step in range(first + 1, options.steps + 1):
            await _train_step(backend, model, options, step, report)
            rows = _rows(await backend.history(model), await backend.checkpoints(model))
            report.step(rows[-1])
        last = await model.get_step()
        after = _reward(await backend.history(model), last, "val") if last else before
        if after is None:
            after = await _validate(model, options, last, report)
        report.validation(last, after)
        status = await backend.status(model)
    samples = len(VALIDATION_PROMPTS) * VALIDATION_SAMPLES
    return DemoResult(
        base_model=SMOLLM2,
        steps=rows,
        validation={"before": before, "after": after, "samples": samples},
        seconds=time.monotonic() - began,
        head={"step": status.step, "manifest": status.manifest},
    )


async def _train_step(
    backend: LocalBackend, model: TrainableModel[Any], options: DemoOptions, step: int, report: Report
) -> None:
    began = time.monotonic()
    prompts = random.Random(f"{options.seed}/{step}").sample(TRAINING_PROMPTS, GROUPS)
    report.phase(f"step {step} of {options.steps}: rollouts", step - 1, options.steps)
    groups = await _sample(model, options.seed, step - 1, "train", prompts, SAMPLES)
    sampled = time.monotonic() - began
    report.phase(f"step {step} of {options.steps}: training", step - 1, options.steps)
    result = await backend.train(model, groups, learning_rate=options.learning_rate, scale_rewards=SCALE_REWARDS)
    own = {
        "data/tokens_sampled": float(_tokens_sampled(groups)),
        "time/rollout_seconds": sampled,
        "time/step_seconds": time.monotonic() - began,
    }
    await model.log(groups, "train", metrics={**result.metrics, **own}, step=result.step)


async def _validate(model: TrainableModel[Any], options: DemoOptions, step: int, report: Report) -> float:
    report.phase(f"validation at step {step}, on phrasings never trained on")
    groups = await _sample(model, options.seed, step, "val", VALIDATION_PROMPTS, VALIDATION_SAMPLES)
    await model.log(groups, "val", step=step)
    rewards = [t.reward for group in groups for t in group.trajectories]
    return sum(rewards) / len(rewards)


async def _sample(
    model: TrainableModel[Any], seed: int, step: int, split: str, prompts: Sequence[str], samples: int
) -> list[TrajectoryGroup]:
    """One group a prompt, sampled by the adapter of `step`."""
    name = model.get_inference_name(step)
    temperature = TRAINING_TEMPERATURE if split == "train" else VALIDATION_TEMPERATURE
    return await gather_trajectory_groups(
        (
            TrajectoryGroup(
                rollout(model, name, prompt, _seed(seed, split, step, group, sample), temperature)
                for sample in range(samples)
            )
            for group, prompt in enumerate(prompts)
        ),
        pbar_desc=None,
    )


def _seed(*parts: object) -> int:
    """A request's own seed, the same in every run."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4]) >> 1


def _tokens_sampled(groups: Sequence[TrajectoryGroup]) -> int:
    choices = (t.messages_and_choices[-1] for group in groups for t in group.trajectories)
    return sum(len(getattr(choice, "token_ids", [])) for choice in choices)


def _reward(history: Sequence[HistoryRow], step: int, split: str) -> float | None:
    return next((r.metrics.get("reward") for r in history if (r.step, r.split) == (step, split)), None)


def _rows(history: Sequence[HistoryRow], checkpoints: Sequence[Checkpoint]) -> list[StepRow]:
    """All steps so far. The checkpoint has what the trainer said, the history row also what was logged after."""
    logged = {row.step: row.metrics for row in history if row.split == "train"}
    rows = []
    for checkpoint in sorted(checkpoints, key=lambda c: c.step):
        if checkpoint.step == 0:
            continue
        metrics = {**checkpoint.metrics, **logged.get(checkpoint.step, {})}
        rows.append(
            StepRow(
                step=checkpoint.step,
                reward=metrics.get("reward"),
                seconds=metrics.get("time/step_seconds"),
                tokens_sampled=_whole(metrics.get("data/tokens_sampled")),
                tokens_trained=_whole(metrics.get("data/tokens_trained")) if checkpoint.updates else 0,
                loss=metrics.get("loss"),
                grad_norm=metrics.get("grad_norm"),
                skipped=checkpoint.updates == 0,
            )
        )
    return rows


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
