"""Mending what `verify_model` finds: from whole copies elsewhere, and HEAD from the steps that are there.

Blobs and records that never change are brought from another store that has the same model, blobs also from the model
of which this one is a fork; what comes is checked first. A HEAD that cannot be read, names another step than its
manifest, or names a manifest that is nowhere any more, is written again for the newest step that is whole back to
step 0. Nothing that is whole is written: each object is looked at again, under the model's lease, before it is.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from art_sky.errors import CorruptObject, NotFound, ObjectNotFound, StoreError
from art_sky.schemas import FileRef, Head, Manifest
from art_sky.store import open_store
from art_sky.store.copy import copy_blob
from art_sky.store.deletion import read_condemned
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import Lease
from art_sky.store.records import to_json
from art_sky.store.verify import Damage, check_blob, is_immutable, parse_record
from art_sky.store.writer import LEASE

_FORKED_FROM = re.compile(r"(?P<project>[^/]+)/(?P<name>[^/@]+)@\d+ in (?P<store>.+)")
_MANIFEST = re.compile(r"manifests/(?P<step>\d+)-(?P<request>[A-Za-z0-9_-]+)-(?P<generation>\d+)\.json")


@dataclass(frozen=True)
class Repair:
    """`write` makes it, when the object still needs it; to be called by the holder of the model's lease."""

    key: str
    how: str
    write: Callable[[Lease], None]


def plan_repairs(model: ModelStore, damages: Sequence[Damage], origin: ModelStore | None = None) -> list[Repair]:
    """What can be mended of `damages` (of `verify_model`), from `origin` or by the model itself. Writes nothing.

    While HEAD is damaged, what its steps need is not known: verify and plan again when it is mended. Raises NotFound
    when `origin` is another model.
    """
    if origin is not None and origin.prefix != model.prefix:
        raise NotFound(f"{origin.prefix} is not {model.prefix}; name a store that has the same model")
    model.condemned |= read_condemned(model)
    origins = [] if origin is None else [origin]
    planned = []
    for damage in damages:
        name = model.name_of(damage.key)
        if damage.ref is not None:
            repair = _bring_blob(model, damage.key, damage.ref, [*origins, *_forked_from(model)])
        elif is_immutable(name):
            repair = _bring_record(model, name, origins)
        else:
            repair = None
        if repair is not None:
            planned.append(repair)
    if _head_is_lost(model, {damage.key for damage in damages}, {repair.key for repair in planned}):
        newest = _newest_whole(model, origins)
        if newest is not None:
            planned.append(_rewrite_head(model, *newest))
    return planned


def make_repairs(model: ModelStore, planned: Sequence[Repair], owner: str, wait_seconds: float = 0.0) -> None:
    """Raises LeaseLost, naming the holder, when a server has the model. After any error it may be called again."""
    lease = model.store.acquire(model.key(LEASE), owner, wait_seconds)
    try:
        model.condemned |= read_condemned(model)
        for repair in planned:
            lease.check()
            repair.write(lease)
    finally:
        lease.release()


def _bring_blob(model: ModelStore, key: str, ref: FileRef, origins: list[ModelStore]) -> Repair | None:
    for origin in origins:
        if check_blob(origin, ref) is None:

            def write(_: Lease, origin: ModelStore = origin) -> None:
                if check_blob(model, ref) is not None:
                    copy_blob(origin, model, ref)

            return Repair(key, f"copy it from {origin.prefix} in {origin.store.url}", write)
    return None


def _bring_record(model: ModelStore, name: str, origins: list[ModelStore]) -> Repair | None:
    for origin in origins:
        data = _whole_record(origin, name)
        if data is not None:

            def write(_: Lease, data: bytes = data) -> None:
                if _whole_record(model, name) is None:
                    model.store.put(model.key(name), data)

            return Repair(model.key(name), f"copy it from {origin.store.url}", write)
    return None


def _whole_record(model: ModelStore, name: str) -> bytes | None:
    try:
        data = model.store.get(model.key(name)).data
        parse_record(model, name, data)
    except (ObjectNotFound, CorruptObject):
        return None
    return data


def _forked_from(model: ModelStore) -> Iterator[ModelStore]:
    """The model that this one is a fork of: it has the blobs of step 0."""
    try:
        found = _FORKED_FROM.fullmatch(model.record().forked_from or "")
    except CorruptObject:
        return
    if found is not None:
        yield ModelStore(open_store(found["store"]), found["project"], found["name"])


def _head_is_lost(model: ModelStore, damaged: set[str], mended: set[str]) -> bool:
    if model.key("HEAD") in damaged:
        return True
    try:
        return model.head().manifest in damaged - mended
    except NotFound:
        return False


def _rewrite_head(model: ModelStore, step: int, manifest: str) -> Repair:
    def write(lease: Lease) -> None:
        try:
            etag = model.store.get(model.key("HEAD")).etag
        except ObjectNotFound:
            etag = None
        if _leads_to_a_step(ModelStore(model.store, model.project, model.name)):
            return
        generations = (found["generation"] for found in _manifests(model))
        attempts = (name.rpartition("-")[2].removesuffix(".json") for name in model.names("history/"))
        head = Head(
            step=step,
            manifest=manifest,
            generation=max(lease.generation, *map(int, generations)) + 1,
            nonce=uuid.uuid4().hex,
            attempt=max(map(int, attempts), default=1),
        )
        data = to_json(head)
        try:
            if etag is None:
                model.store.create(model.key("HEAD"), data)
            else:
                model.store.swap(model.key("HEAD"), data, etag)
        except StoreError as e:
            if not model.holds("HEAD", data, e):
                raise

    return Repair(model.key("HEAD"), f"write it again for step {step} ({manifest})", write)


def _leads_to_a_step(model: ModelStore) -> bool:
    try:
        return next(model.head_chain(model.head()), None) is not None
    except NotFound:
        return True  # that of a model which has no step yet
    except CorruptObject:
        return False


def _newest_whole(model: ModelStore, origins: list[ModelStore]) -> tuple[int, str] | None:
    """Step and manifest of the newest step of which everything is here or can be brought, back to step 0.

    Of several with one number, which competing servers left, it is the one that an attempt says was committed, else
    the one that came last.
    """
    found = [(int(m["step"]), _standing(model, m), int(m["generation"]), model.key(m[0])) for m in _manifests(model)]
    for step, standing, _, key in sorted(found, reverse=True):
        if standing >= 0 and key not in model.condemned and _is_whole(model, key, origins):
            return step, key
    return None


def _manifests(model: ModelStore) -> list[re.Match[str]]:
    return [found for found in map(_MANIFEST.fullmatch, model.names("manifests/")) if found is not None]


def _standing(model: ModelStore, manifest: re.Match[str]) -> int:
    """By the attempts at its request: 1 committed, -1 given up, 0 not known, as when its server was killed."""
    try:
        attempts = model.attempts(manifest["request"])
    except CorruptObject:
        return 0
    if any(a.outcome == "committed" and a.manifest in (None, model.key(manifest[0])) for a in attempts):
        return 1
    return -1 if attempts and attempts[-1].outcome in ("failed", "cancelled") else 0


def _is_whole(model: ModelStore, key: str, origins: list[ModelStore]) -> bool:
    try:
        newest = below = _read_manifest([model, *origins], key)
        while below.parent is not None:
            above, below = below, _read_manifest([model, *origins], below.parent)
            if below.step != above.step - 1:
                return False
    except CorruptObject:
        return False
    places = [model, *origins, *_forked_from(model)]
    return below.step == 0 and all(any(check_blob(m, ref) is None for m in places) for ref in newest.files.values())


def _read_manifest(places: Sequence[ModelStore], key: str) -> Manifest:
    for place in places[:-1]:
        try:
            return place.manifest(key)
        except CorruptObject:
            continue
    return places[-1].manifest(key)
