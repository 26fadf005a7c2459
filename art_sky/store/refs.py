"""Names for steps: a step that a ref names keeps its files, whatever is cleaned up."""

from __future__ import annotations

from art_sky.errors import Conflict, InvalidInput, NotFound, PreconditionFailed
from art_sky.names import check_name
from art_sky.store.model_store import ModelStore, Ref, Step

FORK = "fork-"  # refs that forks of this model rely on begin so


def find_step(model: ModelStore, step: int | None) -> Step:
    """The step with this number that is reachable from HEAD, None for the newest. Raises NotFound."""
    model.record()
    newest = model.head().step
    for found in reversed(model.steps()):
        if step is None or found.manifest.step == step:
            return found
    raise NotFound(f"{model.prefix} has no step {step}; its steps are 0 to {newest}")


def add_ref(model: ModelStore, name: str, step: Step) -> None:
    """Names a step; naming it so again changes nothing. Needs no lease.

    Raises Conflict when the name is another step's, NotFound when the step's files are deleted.
    """
    check_name("tag", name)
    model.refuse_deleted(step.manifest)
    try:
        model.create_record(f"refs/{name}", Ref(manifest=step.key))
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


def delete_ref(model: ModelStore, name: str) -> None:
    """Raises NotFound for an unknown name, InvalidInput for one that a fork relies on."""
    if check_name("tag", name).startswith(FORK):
        raise InvalidInput(f"{name!r} keeps the files that a fork of {model.prefix} reads; choose a tag of your own")
    if name not in model.refs():
        raise NotFound(f"{model.prefix} has no tag {name!r}; see `art-sky steps {model.prefix}`")
    model.store.delete(model.key(f"refs/{name}"))
