"""Reading again and hashing everything a model needs: what is damaged, which steps it touches, how to mend it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from art_sky.errors import ArtSkyError, CorruptObject, ObjectNotFound
from art_sky.schemas import AttemptRecord, FileRef, Head, HistoryRow, Manifest, ModelRecord, Record, TrainRequestRecord
from art_sky.store.batches import decode_batch
from art_sky.store.history import STATE
from art_sky.store.model_store import ModelStore, Ref
from art_sky.store.progress import Meter, Moved, Progress
from art_sky.store.reachable import NeededBlob, Reachable, find_reachable

THREADS = 8
READ_TRIES = 2  # a block may be changed on its way, too

# What a record's name begins with -> its type.
RECORDS: dict[str, type[Record]] = {"history/": HistoryRow, "refs/": Ref}


@dataclass(frozen=True)
class Damage:
    key: str
    problem: Literal["missing", "damaged"]
    detail: str
    steps: list[int]  # that cannot be used, or trained again, without it
    needed_by: list[str]
    mend: str  # what to do
    ref: FileRef | None = None  # of a blob


@dataclass
class Verification:
    objects: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)


def verify_model(model: ModelStore, threads: int = THREADS, progress: Progress | None = None) -> Verification:
    """Checks every record and every blob that HEAD, refs and waiting requests lead to, also those of other models.

    Needs no lease and writes nothing. Raises NotFound for an unknown model, StoreError when the store cannot be
    read, or was written by a newer art-sky; damage is not raised but returned.
    """
    broken: list[CorruptObject] = []
    names = _names(model)
    if "model.json" not in names:
        model.record()  # raises, unless it has come since
    report = Verification()
    with ThreadPoolExecutor(threads) as pool:
        broken += [e for e in pool.map(lambda name: check_record(model, name), names) if e is not None]
        found = find_reachable(model, broken=broken)
        total = sum(blob.ref.size for blob in found.blobs.values())
        meter = Meter(total, progress)

        def check(blob: NeededBlob) -> tuple[NeededBlob, ArtSkyError | None]:
            return blob, check_blob(model, blob.ref, meter.add)

        bad = [(blob, e) for blob, e in pool.map(check, found.blobs.values()) if e is not None]
    report.bytes = total
    report.objects = len(names) + len(found.blobs)
    report.damages = [*_records(model, broken, found), *(_blob(model, blob, e, found, bad) for blob, e in bad)]
    return report


def _names(model: ModelStore) -> list[str]:
    """The records, without those that nobody needs."""
    names = [model.name_of(info.key) for info in model.store.list(f"{model.prefix}/")]
    kinds = ("requests/", "trajectories/", *RECORDS)
    return [n for n in names if n in ("model.json", "HEAD", STATE) or n.startswith(kinds)]


def check_record(model: ModelStore, name: str) -> CorruptObject | None:
    """What is wrong with a record; None also when it was deleted meanwhile."""
    try:
        parse_record(model, name, model.store.get(model.key(name)).data)
    except CorruptObject as e:
        return e
    except ObjectNotFound:
        return None  # deleted since it was listed
    return None


def parse_record(model: ModelStore, name: str, data: bytes) -> None:
    """Raises CorruptObject unless `data` is what the record `name` may hold."""
    if name.endswith(".zst"):
        try:
            decode_batch(data)
        except CorruptObject as e:
            raise model.corrupt(name, e.message) from e
    elif name == STATE:
        model.parse_dict(name, data)
    elif (kind := _kind(name)) is not None:
        model.parse(kind, name, data)


def _kind(name: str) -> type[Record] | None:
    if name in ("model.json", "HEAD"):
        return ModelRecord if name == "model.json" else Head
    if name.startswith("manifests/"):
        return Manifest
    if name.startswith("requests/"):
        return AttemptRecord if name.count(".") == 2 else TrainRequestRecord
    return next((kind for begin, kind in RECORDS.items() if name.startswith(begin)), None)


def is_immutable(name: str) -> bool:
    """Whether a record never changes, so that any whole copy of it is as good."""
    return name.startswith(("manifests/", "trajectories/")) or (name.startswith("requests/") and name.count(".") == 1)


def check_blob(model: ModelStore, ref: FileRef, moved: Moved = lambda _: None) -> ArtSkyError | None:
    """ObjectNotFound or CorruptObject, None when its bytes are right. `moved` hears of the bytes as they are read."""
    error: ArtSkyError | None = None
    counted = 0
    for _ in range(READ_TRIES):
        read = 0
        try:
            for block in model.blob_blocks(ref):
                read += len(block)
                if read > counted:  # what is read once more counts once
                    moved(read - counted)
                    counted = read
            return None
        except ObjectNotFound as e:
            return e
        except CorruptObject as e:
            error = e
    return error


def _records(model: ModelStore, broken: list[CorruptObject], found: Reachable) -> list[Damage]:
    damages = {}
    for error in broken:
        key = str(error.details.get("key", model.prefix))
        name = model.name_of(key)
        steps: list[int] = []
        needed_by = ["the model"]
        if name == "HEAD":
            how = f"let it be written again from the newest whole step: art-sky repair {model.prefix}"
            needed_by = ["every step"]
        elif name.startswith("manifests/"):
            oldest = found.steps[0].manifest.step if found.steps else 0
            steps = list(range(oldest))  # nobody reaches those below it
            needed_by = [f"steps 0 to {oldest - 1}"] if steps else ["HEAD or a ref"]
            how = _elsewhere(model)
        elif is_immutable(name):
            how = _elsewhere(model)
        else:
            how = "restore it from a backup of the store, or delete it"
        problem: Literal["missing", "damaged"] = "missing" if "missing" in error.message else "damaged"
        damages[key] = Damage(key, problem, error.message, steps, needed_by, how)
    return list(damages.values())


def _blob(
    model: ModelStore,
    blob: NeededBlob,
    error: ArtSkyError,
    found: Reachable,
    bad: list[tuple[NeededBlob, ArtSkyError]],
) -> Damage:
    lost = {other.ref.sha256 for other, _ in bad}
    how = _elsewhere(model)
    step = min(blob.steps, default=0)  # the one that made it: later ones that name it were skipped
    by_number = {s.manifest.step: s.manifest for s in found.steps}
    if step > 0 and step in by_number and step - 1 in by_number:
        made, parent = by_number[step], by_number[step - 1]
        inputs = [*parent.files.values(), *([made.batch] if made.batch else [])]
        if made.batch is not None and not lost & {ref.sha256 for ref in inputs}:
            how += (
                f"; else fork step {step - 1} and train it on the batch of step {step} ({made.batch.sha256}), which is "
                "whole: that computes it again"
            )
    problem: Literal["missing", "damaged"] = "missing" if isinstance(error, ObjectNotFound) else "damaged"
    return Damage(
        model.blob_key(blob.ref.sha256), problem, error.message, sorted(blob.steps), blob.needed_by, how, blob.ref
    )


def _elsewhere(model: ModelStore) -> str:
    return f"bring it from another store that has this model: art-sky repair {model.prefix} --from URL"
