"""What a model needs: everything that its HEAD, its refs and its waiting train requests lead to."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from art_sky.errors import CorruptObject, NotFound
from art_sky.schemas import FileRef, Manifest
from art_sky.store.model_store import ModelStore, Ref, Step, manifest_name


@dataclass
class NeededBlob:
    ref: FileRef
    needed_by: list[str] = field(default_factory=list)  # "step 3: trainer/state.json", "request r7: its batch"
    steps: set[int] = field(default_factory=set)  # whose files or batch it is


@dataclass
class Reachable:
    """`manifests` are by key; `blobs` by hash, those whose bytes are in another model among them."""

    steps: list[Step] = field(default_factory=list)  # from HEAD, oldest first
    refs: dict[str, str] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    blobs: dict[str, NeededBlob] = field(default_factory=dict)

    def need(self, ref: FileRef, by: str, step: int | None = None) -> None:
        blob = self.blobs.setdefault(ref.sha256, NeededBlob(ref))
        blob.needed_by.append(by)
        if step is not None:
            blob.steps.add(step)

    def need_files(self, manifest: Manifest) -> None:
        for name, ref in manifest.files.items():
            self.need(ref, f"step {manifest.step}: {name}", manifest.step)

    def need_batch(self, manifest: Manifest) -> None:
        if manifest.batch is not None:
            self.need(manifest.batch, f"step {manifest.step}: its batch", manifest.step)


def find_reachable(
    model: ModelStore, also_deleted: Collection[str] = (), broken: list[CorruptObject] | None = None
) -> Reachable:
    """All that is reachable. `also_deleted`: names of marks (`deleted/...`) that count besides the model's own.

    Raises CorruptObject when a record on the way cannot be read: then nothing may be called unreachable. With
    `broken` such errors go there instead, and what lies behind those records is missing from the result.
    """
    found = Reachable()
    gone = {*model.names("deleted/"), *also_deleted}
    for name in model.names("refs/"):
        with _noted(broken):
            found.refs[name.removeprefix("refs/")] = model.read(Ref, name).manifest
    named = set(found.refs.values())
    with _noted(broken):
        for key, manifest in _newest_first(model):
            found.steps.insert(0, Step(key, manifest, f"deleted/{manifest_name(manifest)}" in gone))
    for step in found.steps:
        found.manifests[step.key] = step.manifest
        # A step that was marked while somebody named it keeps its files, whatever the mark says.
        if not step.deleted or step.key in named:
            found.need_files(step.manifest)
    for key in sorted(named - found.manifests.keys()):
        with _noted(broken):
            found.need_files(model.manifest(key))
            found.manifests |= dict(model.chain(key))
    for manifest in found.manifests.values():
        found.need_batch(manifest)
    with _noted(broken):
        for request in model.pending_requests():
            found.need(request.batch, f"request {request.request}: its batch")
            if request.head_manifest and request.head_manifest not in found.manifests:
                found.manifests[request.head_manifest] = model.manifest(request.head_manifest)
                found.need_files(found.manifests[request.head_manifest])
    return found


def need_adoptable(model: ModelStore, found: Reachable) -> None:
    """Adds the steps that a killed server finished but for HEAD: the next one may adopt them (`Writer.adopt`)."""
    head = found.steps[-1] if found.steps else None
    number = head.manifest.step + 1 if head else 0
    for name in model.names(f"manifests/{number:08d}-"):
        try:
            manifest = model.read(Manifest, name)
        except CorruptObject:
            continue  # what a crash left
        if manifest.parent == (head.key if head else None):
            found.manifests[model.key(name)] = manifest
            found.need_files(manifest)
            found.need_batch(manifest)


def _newest_first(model: ModelStore) -> Iterator[tuple[str, Manifest]]:
    try:
        head = model.head()
    except NotFound:
        return
    yield from model.head_chain(head)


@contextmanager
def _noted(broken: list[CorruptObject] | None) -> Iterator[None]:
    try:
        yield
    except CorruptObject as e:
        if broken is None:
            raise
        broken.append(e)
