"""The run's own history: metrics by (attempt, step, split), logged trajectories, and the user's state.

It needs no lease: every row is merged by compare-and-swap, so that a late evaluation and a resumed run may log
at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

from pydantic import TypeAdapter, ValidationError

from art_sky.errors import InvalidInput, ObjectNotFound, PreconditionFailed
from art_sky.schemas import HistoryRow, Split
from art_sky.store.read_ahead import read_ahead
from art_sky.store.records import Records, to_json

STATE = "state.json"
MAX_METRIC_NAME = 200
_SPLIT: TypeAdapter[str] = TypeAdapter(Split)


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Plain floats, NaN and infinities as None. Raises InvalidInput for other values and unprintable names."""
    clean: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not (isinstance(name, str) and name.strip() == name != "" and name.isprintable()):
            raise InvalidInput(f"metric name {ascii(name)[:80]} is not printable text; rename it, e.g. 'reward'")
        if len(name) > MAX_METRIC_NAME:
            raise InvalidInput(f"metric name {name[:40]!r}... is over {MAX_METRIC_NAME} characters; shorten it")
        if value is not None and not isinstance(value, Real):
            raise InvalidInput(f"metric {name!r} is {type(value).__name__}, not a number; give a float")
        try:
            number = math.nan if value is None else float(value)
        except OverflowError:
            number = math.inf
        clean[name] = number if math.isfinite(number) else None
    return clean


class RunLog(Records):
    """What a run wrote about itself."""

    def log_row(self, attempt: int, step: int, split: str, metrics: Mapping[str, Any]) -> HistoryRow:
        """Merges `metrics` into the row (attempt, step, split); logging the same twice changes nothing.

        Values that are not finite become null, and the row's `nonfinite` counts its nulls. Raises InvalidInput.
        """
        name = f"history/{_slot(attempt, step, split)}.json"
        clean = finite_metrics(metrics)

        def merge(old: dict[str, Any] | None) -> dict[str, Any]:
            before = self.parse(HistoryRow, name, to_json(old)).metrics if old else {}
            merged = {**before, **clean}
            if old and merged == before:
                return old
            row = HistoryRow(attempt=attempt, step=step, split=split, time=time.time(), metrics=merged)
            nonfinite = sum(v is None for v in merged.values())
            return {**(old or {}), **row.model_dump(), "nonfinite": nonfinite}

        return self.parse(HistoryRow, name, to_json(self.update(name, merge)))

    def history(self) -> list[HistoryRow]:
        """All rows, by step, attempt and split."""
        rows = read_ahead(lambda name: self.read(HistoryRow, name), self.names("history/"))
        return sorted(rows, key=lambda row: (row.step, row.attempt, row.split))

    def write_trajectories(self, split: str, step: int, attempt: int, batch: bytes) -> str:
        """Stores what `art_sky.store.batches.encode_batch` gave; returns its key.

        The same bytes again give the same key; other bytes for the same (split, step, attempt) get a suffix.
        """
        slot = f"trajectories/{_slot(attempt, step, split)}"
        n = 1
        while True:
            key = self.key(f"{slot}.jsonl.zst" if n == 1 else f"{slot}-{n}.jsonl.zst")
            try:
                self.store.create(key, batch)
                return key
            except PreconditionFailed:
                if self.store.info(key).size == len(batch) and self.store.get(key).data == batch:
                    return key
            n += 1

    def read_state(self) -> dict[str, Any] | None:
        """The user's own state, or None when none was ever written."""
        try:
            return self.parse_dict(STATE, self.store.get(self.key(STATE)).data)
        except ObjectNotFound:
            return None

    def merge_state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sets top-level keys and leaves the others; returns the whole. Raises InvalidInput for what is not JSON."""
        plain = self.parse_dict(STATE, to_json(values))
        return self.update(STATE, lambda old: {**(old or {}), **plain})

    def overwrite_state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        plain = self.parse_dict(STATE, to_json(values))
        return self.update(STATE, lambda _: plain)


def _slot(attempt: int, step: int, split: str) -> str:
    try:
        _SPLIT.validate_python(split)
    except ValidationError as e:
        raise InvalidInput(f"split {split!r}: use lower-case letters, digits and '_', for example 'val'") from e
    if step < 0 or attempt < 1:
        raise InvalidInput(f"step {step}, attempt {attempt}: steps count from 0, attempts from 1")
    return f"{split}/{step:08d}-{attempt:04d}"
