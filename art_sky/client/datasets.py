"""Goes through a dataset of scenarios epoch by epoch, in an order that a resumed run repeats."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from art_sky.client.progress import progress_bar
from art_sky.errors import InvalidInput

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DatasetBatch(Generic[T]):
    """`step` counts over all epochs, `epoch_step` within one. Unpacks as `items, epoch, step, epoch_step`."""

    items: list[T]
    step: int
    epoch: int
    epoch_step: int

    def __iter__(self) -> Iterator[Any]:
        return iter((self.items, self.epoch, self.step, self.epoch_step))


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Iterator[DatasetBatch[T]]:
    """Yields batches of `groups_per_step` items, shuffled anew in each epoch; an epoch's last may be smaller.

    The order depends on the epoch's number and the dataset's length only, and Python's global random state is
    left alone; so `initial_step=await model.get_step()` goes on where a run stopped. `use_tqdm` shows a bar.
    """
    for name, value, least in (
        ("groups_per_step", groups_per_step, 1),
        ("num_epochs", num_epochs, 0),
        ("initial_step", initial_step, 0),
    ):
        if value < least:
            raise InvalidInput(f"{name}={value} is too small; give at least {least}")
    return _batches(dataset, groups_per_step, num_epochs, initial_step, use_tqdm)


def _batches(dataset: Sequence[T], size: int, epochs: int, initial: int, show: bool) -> Iterator[DatasetBatch[T]]:
    per_epoch = -(-len(dataset) // size)
    with progress_bar("dataset" if show else None, per_epoch * epochs) as bar:
        for epoch in range(initial // per_epoch if per_epoch else epochs, epochs):
            order = list(range(len(dataset)))
            random.Random(epoch).shuffle(order)
            first = initial % per_epoch if epoch == initial // per_epoch else 0
            for epoch_step in range(first, per_epoch):
                step = epoch * per_epoch + epoch_step
                bar.update(done=step, text=f"epoch {epoch}")
                chosen = order[epoch_step * size : (epoch_step + 1) * size]
                yield DatasetBatch(items=[dataset[i] for i in chosen], step=step, epoch=epoch, epoch_step=epoch_step)
