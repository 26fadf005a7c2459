"""Which checkpoints are kept: the newest, the best by our own history, and those that a ref names."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from art_sky.errors import InvalidInput, PreconditionFailed
from art_sky.schemas import FileRef, HistoryRow
from art_sky.store.deletion import delete_objects
from art_sky.store.model_store import Deletion, ModelStore, Step, blob_hash, manifest_name
from art_sky.store.writer import Writer


def delete_checkpoints(writer: Writer, best_metric: str = "val/reward") -> list[int]:
    """Deletes the files of all other steps and returns those steps' numbers, ascending.

    `best_metric` is `<split>/<metric>`; the highest is best. Only blobs that no kept step, ref or pending
    request names are deleted; manifests, batches and history stay. Raises InvalidInput, deleting nothing, when no
    step that still has its files has a value of `best_metric`.
    """
    model = writer.model
    with writer.exclusive():
        steps = model.steps()
        live = [step for step in steps if not step.deleted]
        if not live:
            return []
        best = best_step(model.history(), [step.manifest.step for step in live], best_metric)
        named = model.refs().values()
        kept = {s.key: s for s in live if s is live[-1] or s.manifest.step == best or s.key in named}
        doomed = [s for s in live if s.key not in kept]
        _needed_blobs(model, kept.values())  # a record that cannot be read stops it before anything is marked
        for step in doomed:
            # Said before it is done: a reader that comes between finds the mark, not a damaged checkpoint.
            _mark(model, step)
        # Whoever names a step looks for the mark afterwards (`add_ref`), and here the refs are read after the mark:
        # one of the two sees the other.
        named = model.refs().values()
        for step in [step for step in doomed if step.key in named]:
            model.store.delete(model.key(_mark_name(step)))
            kept[step.key] = step
            doomed.remove(step)
        needed = _needed_blobs(model, kept.values())
        # Also those of steps marked before: the process may have been killed before it deleted them.
        unneeded = _blobs(s for s in steps if s.key not in kept) - needed
        delete_objects(writer, (i.key for i in model.store.list(model.key("blobs/")) if blob_hash(i.key) in unneeded))
        return [step.manifest.step for step in doomed]


def best_step(rows: Iterable[HistoryRow], steps: Iterable[int], best_metric: str) -> int:
    """The step among `steps` with the highest `<split>/<metric>`; of equals the newest.

    Of a step that was logged in several attempts the last counts. Steps without a finite value are passed over.
    Raises InvalidInput naming the metrics there are, when no step has one.
    """
    split, _, metric = best_metric.partition("/")
    among = set(steps)
    last: dict[tuple[int, str], HistoryRow] = {}
    for row in sorted(rows, key=lambda row: row.attempt):
        if row.step in among:
            last[row.step, row.split] = row
    values = {
        step: value
        for (step, of), row in last.items()
        if of == split and (value := row.metrics.get(metric)) is not None and math.isfinite(value)
    }
    if not values:
        known = sorted(f"{r.split}/{n}" for r in last.values() for n, v in r.metrics.items() if v is not None)
        listed = ", ".join(dict.fromkeys(known)) or "none was logged yet"
        raise InvalidInput(f"no step has the metric {best_metric!r}, so nothing was deleted; known metrics: {listed}")
    return max(values, key=lambda step: (values[step], step))


def _needed_blobs(model: ModelStore, kept: Iterable[Step]) -> set[str]:
    needed = _blobs(kept)
    for key in model.refs().values():
        needed |= _hashes(model.manifest(key).files.values())
    for request in model.pending_requests():
        needed.add(request.batch.sha256)
        needed |= _hashes(model.manifest(request.head_manifest).files.values())
    return needed


def _blobs(steps: Iterable[Step]) -> set[str]:
    return {blob for step in steps for blob in _hashes(step.manifest.files.values())}


def _hashes(refs: Iterable[FileRef]) -> set[str]:
    return {ref.sha256 for ref in refs}


def _mark(model: ModelStore, step: Step) -> None:
    try:
        model.create_record(_mark_name(step), Deletion(step=step.manifest.step, deleted=time.time()))
    except PreconditionFailed:
        return  # marked before


def _mark_name(step: Step) -> str:
    return f"deleted/{manifest_name(step.manifest)}"
