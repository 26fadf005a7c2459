"""All trained tokens of a batch as flat arrays, numbered by sequence, then place, as `rows.plan` numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from art_sky.training.sequences import TokenSequence


@dataclass(frozen=True, eq=False)
class TokenTable:
    """[N] each. Segments, losses and metrics refer to trained tokens by their index here."""

    ids: Tensor
    sampler: Tensor  # the sampler's logprob
    temperature: Tensor
    comparable: Tensor  # whether `sampler` is that of the trained distribution
    advantage: Tensor
    sequence: Tensor  # index in the batch's sequences
    trajectory: Tensor  # 0, 1, 2 ... over all groups, in order of appearance

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> TokenTable:
        at = [np.flatnonzero(s.sampled) for s in sequences]
        counts = [len(a) for a in at]
        keys = [(s.group, s.trajectory) for s in sequences]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}

        def flat(name: str, dtype: torch.dtype) -> Tensor:
            parts = [getattr(s, name)[a] for s, a in zip(sequences, at, strict=True)]
            return torch.from_numpy(np.concatenate(parts)).to(dtype)

        def each(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.repeat(values, counts)).to(dtype)

        return cls(
            ids=flat("ids", torch.long),
            sampler=flat("logprobs", torch.float32),
            temperature=flat("temperature", torch.float32),
            comparable=flat("comparable", torch.bool),
            advantage=each([s.advantage for s in sequences], torch.float32),
            sequence=each(list(range(len(sequences))), torch.long),
            trajectory=each([number[k] for k in keys], torch.long),
        )
