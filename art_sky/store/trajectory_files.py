"""Reading the trajectories that a run logged, one object at a time."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from art_sky.errors import CorruptObject
from art_sky.store.batches import decode_batch
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import Store
from art_sky.store.read_ahead import read_ahead

AHEAD = 4  # objects, which may be large

# What `RunLog.write_trajectories` names its objects; the last number tells objects of one step apart.
_NAME = re.compile(
    r"trajectories/(?P<split>[a-z][a-z0-9_]*)/(?P<step>\d+)-(?P<attempt>\d+)(-(?P<part>\d+))?\.jsonl\.zst"
)


@dataclass(frozen=True)
class LoggedGroups:
    """One object: the groups of one call of `log` or `train`, as `art_sky.store.batches.decode_batch` gives them."""

    key: str
    project: str
    model: str
    split: str
    step: int
    attempt: int  # a step that was trained again after a rewind is logged once in each attempt
    groups: list[dict[str, Any]]


def iter_trajectories(
    store: Store, project: str, name: str, split: str | None = None, steps: Container[int] | None = None
) -> Iterator[LoggedGroups]:
    """What `project/name` logged, by split, step and attempt; of all splits and steps by default. Needs no server.

    Holds one object at a time, and the compressed bytes of the next few. Raises CorruptObject naming the object that
    cannot be read, and NotFound for a model that was never registered.
    """
    model = ModelStore(store, project, name)
    found = [m for m in _objects(model) if split in (None, m["split"]) and (steps is None or int(m["step"]) in steps)]
    found.sort(key=lambda m: (m["split"], int(m["step"]), int(m["attempt"]), int(m["part"] or 1)))
    objects = read_ahead(lambda match: store.get(model.key(match[0])).data, found, AHEAD)
    for match, data in zip(found, objects, strict=True):
        key = model.key(match[0])
        try:
            groups = decode_batch(data)
        except CorruptObject as e:
            raise CorruptObject(f"{key!r} in {store.url}: {e.message.partition(';')[0]}; delete it to read on") from e
        yield LoggedGroups(key, project, name, match["split"], int(match["step"]), int(match["attempt"]), groups)


def list_logged(store: Store, project: str, name: str) -> set[tuple[str, int]]:
    """Every (split, step) of which `project/name` logged trajectories. Raises NotFound for an unknown model."""
    return {(m["split"], int(m["step"])) for m in _objects(ModelStore(store, project, name))}


def _objects(model: ModelStore) -> list[re.Match[str]]:
    model.record()
    return [m for m in map(_NAME.fullmatch, model.names("trajectories/")) if m is not None]
