"""Names for steps: a step that a ref names keeps its files, whatever is cleaned up.

A fork names the step that it reads in the model it was forked from. When it needs that no more, because it was
deleted or has copies of its own, the name may be deleted like any other.
"""

from __future__ import annotations

from art_sky.errors import Conflict, NotFound, PreconditionFailed
from art_sky.names import check_name
from art_sky.schemas import BlobRoot, FileRef, Manifest
from art_sky.store.model_store import ModelStore, Ref, Step, list_models
from art_sky.store.reachable import find_reachable

FORK = "fork-"  # refs that forks of this model made begin so


def find_step(model: ModelStore, step: int | None) -> Step:
    """The step with this number that is reachable from HEAD, None for the newest. Raises NotFound."""
    model.record()
    newest = model.head().step
    for found in reversed(model.steps()):
        if step is None or found.manifest.step == step:
            return found
    raise NotFound(f"{model.prefix} has no step {step}; its steps are 0 to {newest}")


def add_ref(model: ModelStore, name: str, step: Step, fork: BlobRoot | None = None) -> None:
    """Names a step, for `fork` if that reads its files from here; naming it so again changes nothing. Needs no lease.

    Raises Conflict when the name is another step's, NotFound when the step's files are deleted.
    """
    check_name("tag", name)
    model.refuse_deleted(step.manifest)
    try:
        model.create_record(f"refs/{name}", Ref(manifest=step.key, fork=fork))
    except PreconditionFailed:
        taken = model.read(Ref, f"refs/{name}").manifest
        if taken != step.key:
            raise Conflict(
                f"{name!r} of {model.prefix} is step {model.manifest(taken).step} already; delete it first "
                f"(art-sky tag {model.prefix} {name} --delete), or choose another name"
            ) from None
    try:
        model.refuse_deleted(step.manifest)  # asked after the ref is there, see `delete_checkpoints`
    except NotFound:
        model.store.delete(model.key(f"refs/{name}"))
        raise


def delete_ref(model: ModelStore, name: str, force: bool = False) -> None:
    """Takes a name away. Raises NotFound for an unknown one.

    Unless `force`, raises Conflict for one that keeps files which a fork reads, or which could not be looked for.
    """
    if check_name("tag", name) not in model.refs():
        raise NotFound(f"{model.prefix} has no tag {name!r}; see `art-sky steps {model.prefix}`")
    if name.startswith(FORK) and not force:
        _refuse_needed(model, name)
    model.store.delete(model.key(f"refs/{name}"))


def _refuse_needed(model: ModelStore, name: str) -> None:
    ref = model.read(Ref, f"refs/{name}")
    step = model.manifest(ref.manifest)
    what = f"{name!r} keeps step {step.step} of {model.prefix}"
    if ref.fork is None:
        raise Conflict(f"{what} for a fork that is not known; if no fork needs it any more, delete it with --force")
    fork = model.at(ref.fork)
    if not fork.exists() and ref.fork.store is not None:
        raise Conflict(
            f"{what} for {ref.fork.model}, which is not in {ref.fork.store}; if it was deleted, and that is not a disk "
            "that is missing now, delete the tag with --force"
        )
    if fork.exists() and not fork.steps():
        raise Conflict(f"{what} for {ref.fork.model}, which is being made or was broken off; make it again first")
    for store in {model.store.url: model.store, fork.store.url: fork.store}.values():
        for reader in (ModelStore(store, *names) for names in list_models(store)):
            if count := _reads(reader, model, step):
                raise Conflict(
                    f"{what}, of which {reader.prefix} in {store.url} reads {count} files: without them its steps "
                    "that name these files are lost. Copy it first (art-sky fork --copy, or art-sky push to another "
                    "store) and delete it; or give its steps up with --force"
                )


def _reads(reader: ModelStore, model: ModelStore, step: Manifest) -> int:
    """How many of the step's blobs `reader` needs and does not hold itself; a fork of a fork reads from here, too."""
    hashes = {ref.sha256 for ref in step.files.values()}
    needed = (blob.ref for sha256, blob in find_reachable(reader).blobs.items() if sha256 in hashes)
    return sum(_is_of(reader, ref, model) and reader.find_blob(ref.sha256).root is not None for ref in needed)


def _is_of(reader: ModelStore, ref: FileRef, model: ModelStore) -> bool:
    if ref.root is None:
        return False
    holder = reader.at(ref.root)
    return (holder.store.url, holder.prefix) == (model.store.url, model.prefix)
