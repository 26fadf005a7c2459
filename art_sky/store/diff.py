"""What differs between two steps: settings, versions and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_sky.schemas import Manifest
from art_sky.store.model_store import ModelStore


@dataclass(frozen=True)
class Difference:
    name: str  # dotted, e.g. "lora.rank" or "val/reward"
    a: Any
    b: Any


@dataclass(frozen=True)
class StepDiff:
    config: list[Difference]  # only what differs
    metrics: list[Difference]  # all, equal ones too: a reader compares them
    same_files: bool


def diff_steps(a: tuple[ModelStore, Manifest], b: tuple[ModelStore, Manifest]) -> StepDiff:
    """Compares two steps of one model or of two. Metrics are the manifest's and those logged for the step."""
    settings = [_settings(*side) for side in (a, b)]
    metrics = [_metrics(*side) for side in (a, b)]
    return StepDiff(
        config=[d for d in _pair(*settings) if d.a != d.b],
        metrics=_pair(*metrics),
        same_files=_hashes(a[1]) == _hashes(b[1]),
    )


def _settings(model: ModelStore, manifest: Manifest) -> dict[str, Any]:
    record = model.record()
    return _flat(
        {
            "base_model": record.base_model,
            "lora": record.lora.model_dump(),
            "options": record.options.model_dump(),
            "user": record.config,
            "train": manifest.config,
            "versions": manifest.versions,
        }
    )


def _metrics(model: ModelStore, manifest: Manifest) -> dict[str, float | None]:
    found: dict[str, float | None] = {f"train/{name}": value for name, value in manifest.metrics.items()}
    attempt = model.head().attempt
    for row in sorted(model.history(), key=lambda row: row.attempt):
        if row.step == manifest.step and row.attempt <= attempt:
            found |= {f"{row.split}/{name}": value for name, value in row.metrics.items()}
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _pair(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    return [Difference(name, a.get(name), b.get(name)) for name in sorted({*a, *b})]


def _hashes(manifest: Manifest) -> dict[str, str]:
    return {name: ref.sha256 for name, ref in manifest.files.items()}
