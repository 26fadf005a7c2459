"""Supervised fine-tuning from a file of conversations, under the names that ART uses."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from art_sky.config import SFTConfig
from art_sky.errors import InvalidInput
from art_sky.schedules import Schedule, create_lr_schedule
from art_sky.trajectories import Trajectory

if TYPE_CHECKING:
    from art_sky.client.model import TrainableModel
    from art_sky.schemas import TrainResult


def iterate_file(
    file_path: str | Path,
    epochs: int = 1,
    shuffle_buffer_size: int = 10_000,
    seed: int | None = 42,
    initial_skip: int = 0,
) -> Iterator[Trajectory]:
    """The conversations of a JSON lines file, `epochs` times, each time in another order.

    A line is `{"messages": [...], "tools": [...]}`, tools optional. Each is drawn from the next `shuffle_buffer_size`
    ones; `seed=None` keeps the file's order. `initial_skip` leaves out what an earlier run has had. Raises InvalidInput
    naming the line.
    """
    path = Path(file_path).expanduser()
    for position, trajectory in enumerate(_shuffled(path, epochs, shuffle_buffer_size, seed)):
        if position >= initial_skip:
            yield trajectory


async def train_sft_from_file(
    model: TrainableModel[Any],
    file_path: str | Path,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    *,
    updates_per_step: int = 50,
    assistant_turns: str = "all",
    shuffle_buffer_size: int = 10_000,
    seed: int | None = 42,
    request_id: str | None = None,
) -> list[TrainResult]:
    """Trains `model` on a file of conversations (see `iterate_file`), one learning rate schedule over all of it.

    Every `updates_per_step` updates are one committed step; returns their results. Called again with the same
    `request_id` and arguments after it was broken off, it goes on behind the steps that are committed.
    """
    total = epochs * await asyncio.to_thread(lambda: sum(1 for _ in iterate_file(file_path, seed=None)))
    if total == 0:
        raise InvalidInput(f"{file_path} holds no conversation; give a file of JSON lines with `messages`")
    updates = -(-total // batch_size)
    rates = create_lr_schedule(updates, peak_lr, schedule_type, int(updates * warmup_ratio))
    request = request_id or uuid4().hex
    stream = iterate_file(file_path, epochs, shuffle_buffer_size, seed)
    results = []
    for start in range(0, updates, updates_per_step):
        examples = await asyncio.to_thread(list, islice(stream, updates_per_step * batch_size))
        config: SFTConfig = SFTConfig.parse(
            {
                "batch_size": batch_size,
                "learning_rate": rates[start : start + updates_per_step],
                "assistant_turns": assistant_turns,
                "too_long": "refuse",  # a dropped one would leave a learning rate over
            }
        )
        results.append(await model.train_sft(examples, config, request_id=f"{request}-{start // updates_per_step}"))
    return results


def _shuffled(path: Path, epochs: int, buffer_size: int, seed: int | None) -> Iterator[Trajectory]:
    for epoch in range(epochs):
        if seed is None or buffer_size <= 1:
            yield from _read(path)
            continue
        draw, buffer = random.Random(f"{seed}/{epoch}"), list[Trajectory]()
        for trajectory in _read(path):
            buffer.append(trajectory)
            if len(buffer) >= buffer_size:
                yield buffer.pop(draw.randrange(len(buffer)))
        draw.shuffle(buffer)
        yield from buffer


def _read(path: Path) -> Iterator[Trajectory]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _trajectory(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"{path} cannot be read: {e}; give a file of JSON lines with `messages`") from e


def _trajectory(line: str, where: str) -> Trajectory:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise InvalidInput(f"{where} is not JSON: {e}; mend the line") from e
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list):
        raise InvalidInput(f'{where} has no list `messages`; write {{"messages": [...]}}')
    if unknown := sorted(set(row) - {"messages", "tools"}):
        raise InvalidInput(f"{where} has {', '.join(unknown)}; only messages and tools are used, leave out the others")
    try:
        return Trajectory(messages_and_choices=row["messages"], tools=row.get("tools"))
    except (InvalidInput, ValueError) as e:
        raise InvalidInput(f"{where}: {e}; mend the line") from e
