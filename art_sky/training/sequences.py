"""From trajectories to token sequences, by exact ids only (rule R1).

A turn extends the running sequence of its history if its prompt ids begin with all ids before it; else it starts
a new sequence, and that is counted as a split. All sequences of a trajectory are one sample: they share its
advantage, and their trained tokens count together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from art_sky.config import SFTConfig, TrainConfig
from art_sky.errors import InvalidInput, SequenceTooLong
from art_sky.store.batches import is_choice
from art_sky.training.advantages import advantages, skip_reason
from art_sky.training.choices import check_choice, check_reward, histories


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """T tokens as the engine saw and sampled them. A token with `sampled` is trained; the others are context."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]  # the sampler's; NaN where not sampled
    sampled: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]  # 1 where not sampled and where sampling was greedy
    comparable: npt.NDArray[np.bool_]  # the sampler's logprob is that of the trained distribution
    greedy: npt.NDArray[np.bool_]
    group: int
    trajectory: int  # index in its group
    advantage: float

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        return int(self.sampled.sum())


@dataclass
class Batch:
    """The sequences of all groups that teach something, and counts of what was left out and why."""

    sequences: list[TokenSequence] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of every trajectory, also of skipped groups
    skipped: Counter[str] = field(default_factory=Counter)  # groups by reason
    groups: int = 0
    exceptions: int = 0
    splits: int = 0
    too_long: int = 0  # sequences beyond the longest allowed: dropped, never cut
    cut_off: int = 0  # choices that ended at their token limit and are therefore context only
    without_tokens: int = 0  # trajectories that hold no choice; they are part of their group's baseline

    def reason(self, kl_penalty: bool = False) -> str | None:
        """Why there is nothing to train on, or None. With a KL penalty a sequence of advantage 0 has a gradient."""
        if any(s.advantage != 0 or kl_penalty for s in self.sequences):
            return None
        parts = [f"{n} x {reason}" for reason, n in sorted(self.skipped.items())]
        for count, what in (
            (self.too_long, "sequence too long"),
            (self.cut_off, "choice cut off at its token limit"),
            (self.without_tokens, "trajectory without a sampled choice"),
            (len(self.sequences), "sequence whose advantage is 0"),
        ):
            if count:
                parts.append(f"{count} x {what}")
        return "nothing to train on: " + (", ".join(parts) or "the batch is empty")


def build_batch(
    groups: Sequence[Mapping[str, Any]], config: TrainConfig, *, vocab_size: int, context_length: int
) -> Batch:
    """The sequences of a batch (`art_sky.store.batches.decode_batch`).

    Every choice and reward is checked, those of skipped groups too. Raises InvalidReward, MissingTokens,
    SequenceTooLong or InvalidInput naming group, trajectory and message.
    """
    batch = Batch(groups=len(groups))
    found = [
        [check_reward(t.get("reward"), f"group {g}, trajectory {i}") for i, t in enumerate(group["trajectories"])]
        for g, group in enumerate(groups)
    ]
    batch.rewards = [r for rewards in found for r in rewards]
    limit = min(context_length, config.max_sequence_tokens or context_length)
    for g, (group, rewards) in enumerate(zip(groups, found, strict=True)):
        batch.exceptions += len(group.get("exceptions") or [])
        reason = skip_reason(rewards)
        if reason is not None:
            batch.skipped[reason] += 1
        weights = advantages(rewards, config.scale_rewards, batch.rewards)
        for t, (trajectory, advantage) in enumerate(zip(group["trajectories"], weights, strict=True)):
            made, splits, cut_off = _sequences(trajectory, g, t, advantage, vocab_size, config.cut_off == "mask")
            if reason is not None:
                continue
            batch.splits += splits
            batch.cut_off += cut_off
            batch.without_tokens += not made
            batch.sequences += _allowed(
                batch, made, f"group {g}, trajectory {t}", limit, config.too_long, context_length
            )
    return batch


def build_examples(
    groups: Sequence[Mapping[str, Any]], config: SFTConfig, *, vocab_size: int, context_length: int
) -> Batch:
    """The sequences of a batch for supervised fine-tuning (`art_sky.server.examples`): trajectories are numbered
    through, have advantage 1, and count as one group, whose shared beginnings are computed once.

    Raises MissingTokens, SequenceTooLong or InvalidInput naming group, trajectory and message.
    """
    batch = Batch(groups=len(groups))
    limit = min(context_length, config.max_sequence_tokens or context_length)
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group["trajectories"]):
            made, splits, _ = _sequences(trajectory, g, t, 1.0, vocab_size, False)
            batch.splits += splits
            kept = _allowed(batch, made, f"group {g}, trajectory {t}", limit, config.too_long, context_length)
            batch.sequences += [replace(s, group=0, trajectory=len(batch.rewards)) for s in kept]
            batch.rewards.append(0.0)
    return batch


def _allowed(
    batch: Batch, made: list[TokenSequence], where: str, limit: int, too_long: str, context_length: int
) -> list[TokenSequence]:
    """Those with trained tokens that are at most `limit` long; the others are counted or refused."""
    beyond = [s for s in made if len(s) > limit]
    if beyond and too_long == "refuse":
        raise SequenceTooLong(
            f"{where}: a sequence of {len(beyond[0])} tokens is longer than {limit}; drop such trajectories "
            f"(too_long='drop' does it), or raise max_sequence_tokens up to the model's {context_length}"
        )
    batch.too_long += len(beyond)
    return [s for s in made if len(s) <= limit and s.trained]


def _sequences(
    trajectory: Mapping[str, Any], group: int, index: int, advantage: float, vocab_size: int, mask_cut_off: bool
) -> tuple[list[TokenSequence], int, int]:
    """The sequences, how often a turn did not extend the one before, and how many choices were masked."""
    made: list[TokenSequence] = []
    splits = cut_off = 0
    for history, items in histories(trajectory):
        running: _Running | None = None
        for m, item in enumerate(items):
            if not is_choice(item):
                continue
            where = f"group {group}, trajectory {index}{history}, message {m}"
            check_choice(item, where)
            prompt, sampled = (np.asarray(item[name], np.int32) for name in ("prompt_token_ids", "token_ids"))
            largest = max(prompt.max(), sampled.max())
            if largest >= vocab_size:
                raise InvalidInput(
                    f"{where}: token id {largest} is outside the model's vocabulary of {vocab_size}; train the model "
                    f"that sampled this choice"
                )
            if running is None or not running.extends(prompt):
                if running is not None:
                    made.append(running.finish(group, index, advantage))
                    splits += 1
                running = _Running()
            masked = mask_cut_off and item.get("finish_reason") == "length"
            cut_off += masked
            running.add(prompt, sampled, item, not masked)
        if running is not None:
            made.append(running.finish(group, index, advantage))
    return made, splits, cut_off


class _Running:
    """A sequence under construction."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        # (index of the first sampled token, choice, whether it is trained)
        self._turns: list[tuple[int, Mapping[str, Any], bool]] = []

    def extends(self, prompt: npt.NDArray[np.int32]) -> bool:
        return np.array_equal(prompt[: len(self._ids)], self._ids)

    def add(
        self,
        prompt: npt.NDArray[np.int32],
        sampled: npt.NDArray[np.int32],
        choice: Mapping[str, Any],
        trained: bool,
    ) -> None:
        self._ids = np.concatenate([prompt, sampled])
        self._turns.append((len(prompt), choice, trained))

    def finish(self, group: int, trajectory: int, advantage: float) -> TokenSequence:
        n = len(self._ids)
        logprobs = np.full(n, np.nan, np.float32)
        sampled, comparable, greedy = (np.zeros(n, np.bool_) for _ in range(3))
        temperature = np.ones(n, np.float32)
        for start, choice, trained in self._turns:
            if not trained:
                continue
            turn = slice(start, start + len(choice["token_ids"]))
            how = choice["sampling"]
            logprobs[turn] = choice["token_logprobs"]
            sampled[turn] = True
            # Greedy tokens carry logprobs at temperature 1, which compare; that they are off-policy is counted.
            greedy[turn] = how["temperature"] == 0
            temperature[turn] = how["temperature"] or 1.0
            comparable[turn] = how["comparable"] or how["temperature"] == 0
        return TokenSequence(
            self._ids, logprobs, sampled, temperature, comparable, greedy, group, trajectory, float(advantage)
        )
