"""One model in a store: its record, blobs, steps, train requests and history. Reading needs no server.

    <project>/<model>/
      model.json                                   who it is, written once
      blobs/<sha256>[.<nonce>]                     immutable bytes; why there may be copies: `art_sky.store.deletion`
      requests/<request>.json                      a train request, written before training
      requests/<request>.<n>.json                  its attempt n
      manifests/<step>-<request>-<generation>.json a step: its files, parent and metrics
      HEAD                                         the newest step
      refs/<name>                                  a step that is never deleted
      deleted/<the manifest's name>                its files were deleted by `delete_checkpoints`
      gc/<nonce>.json                              what somebody is about to delete
      copies/<hash of a source>.json               what `art_sky.store.copy` brought from there
      history/, trajectories/, state.json          see `art_sky.store.history`
      leases/server                                who may commit, see `art_sky.store.writer`
    .models/<project>/<name>.json                  in lower case: the index of models, and what keeps twins out

A step counts when it can be reached from HEAD through `parent`; every other manifest is what a crash left.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from pydantic import TypeAdapter, ValidationError

from art_sky.errors import (
    Conflict,
    CorruptObject,
    InvalidInput,
    NotFound,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
)
from art_sky.names import check_name
from art_sky.schemas import (
    AttemptRecord,
    BlobRoot,
    FileRef,
    Head,
    Manifest,
    ModelRecord,
    Record,
    RequestId,
    TrainRequestRecord,
)
from art_sky.store import open_store
from art_sky.store.files import file_ref, unpack
from art_sky.store.history import RunLog
from art_sky.store.keys import check_key
from art_sky.store.protocol import Store
from art_sky.store.read_ahead import WORTH_IT, read_ahead
from art_sky.store.records import Records, to_json

if TYPE_CHECKING:
    from art_sky.store.writer import Writer

Outcome = Literal["committed", "failed", "cancelled", "trainer_died", "interrupted"]
# A request whose last attempt ended otherwise (or did not end) may still be trained.
FINAL_OUTCOMES: frozenset[str] = frozenset({"committed", "failed", "cancelled"})
NO_STEP = -1  # HEAD's step before the first commit; such a HEAD only fences
_CHUNK = 1 << 20
_REQUEST_ID: TypeAdapter[str] = TypeAdapter(RequestId)


class Ref(Record):
    """`refs/<name>`."""

    manifest: str
    fork: BlobRoot | None = None  # the model for which a fork made it


class Deletion(Record):
    """`deleted/<manifest>`."""

    step: int
    deleted: float


class IndexEntry(Record):
    """`.models/<project>/<name>.json`."""

    project: str
    name: str


@dataclass(frozen=True)
class Step:
    """A step that is reachable from HEAD."""

    key: str  # of the manifest
    manifest: Manifest
    deleted: bool  # its files are gone; the record stays

    @property
    def size(self) -> int:
        return sum(ref.size for ref in self.manifest.files.values())


def list_models(store: Store, called: str | None = None) -> list[tuple[str, str]]:
    """(project, name) of all models, sorted; with `called` only of those of that name, or project/name, whatever its
    case."""
    index = Records(store, ".models")
    keys = index.names("")
    if called is not None:
        keys = [key for key in keys if f"/{key}".endswith(f"/{called.lower()}.json")]

    def find(key: str) -> tuple[str, str] | None:
        entry = index.read(IndexEntry, key)
        found = ModelStore(store, entry.project, entry.name).exists()
        return (entry.project, entry.name) if found else None

    return sorted(names for names in read_ahead(find, keys) if names is not None)


def manifest_name(manifest: Manifest) -> str:
    return f"{manifest.step:08d}-{manifest.request}-{manifest.generation}.json"


class ModelStore(RunLog):
    """`project/name` in `store`. Methods may be called from any thread; only a `Writer` commits."""

    def __init__(self, store: Store, project: str, name: str) -> None:
        self.project = check_name("project", project)
        self.name = check_name("model", name)
        super().__init__(store, f"{project}/{name}")
        # Keys that somebody may still delete, whenever it comes; set by the writer. Nothing may rely on them.
        self.condemned: set[str] = set()
        self._manifests: dict[str, Manifest] = {}  # they never change
        self._roots: dict[str, ModelStore] = {}

    # --- the model ---

    def exists(self) -> bool:
        return self._has("model.json")

    def record(self) -> ModelRecord:
        """Raises NotFound when the model was never registered."""
        try:
            return self.read(ModelRecord, "model.json")
        except ObjectNotFound as e:
            raise NotFound(f"there is no model {self.prefix} in {self.store.url}; register it first") from e

    def create(self, record: ModelRecord) -> ModelRecord:
        """Registers the model. Raises Conflict when it exists, or one whose name differs only in case.

        The very same record again (a retry) is no conflict.
        """
        if (record.project, record.name) != (self.project, self.name):
            raise InvalidInput(f"the record is of {record.project}/{record.name}, not of {self.prefix}; use its store")
        entry = IndexEntry(project=self.project, name=self.name)
        index, name = Records(self.store, ".models"), f"{self.project.lower()}/{self.name.lower()}.json"
        try:
            index.create_record(name, entry)
        except PreconditionFailed:
            known = index.read(IndexEntry, name)
            if (known.project, known.name) != (self.project, self.name):
                raise Conflict(
                    f"{self.prefix} differs only in case from {known.project}/{known.name}; use that, or another name"
                ) from None
        try:
            self.create_record("model.json", record)
        except PreconditionFailed:
            raise Conflict(f"the model {self.prefix} exists already in {self.store.url}; use another name") from None
        return record

    # --- steps ---

    def head(self) -> Head:
        """Raises NotFound when no step was committed yet, CorruptObject when HEAD is damaged or was deleted."""
        try:
            head = self.read(Head, "HEAD")
        except ObjectNotFound:
            self.refuse_lost_head()
            head = None
        if head is None or head.step == NO_STEP:
            raise NotFound(f"{self.prefix} in {self.store.url} has no step yet; register the model and wait")
        return head

    def refuse_lost_head(self) -> None:
        """To be asked when there is no HEAD: it is written before the first manifest, and never deleted."""
        if self.names("manifests/") and not self._has("HEAD"):
            raise self.corrupt("HEAD", "it is missing, although there are steps")

    def manifest(self, key: str) -> Manifest:
        """The manifest at a key such as HEAD's `manifest`; not to be changed by the caller."""
        if key not in self._manifests:
            name = self.name_of(key)
            try:
                self._manifests[key] = self.read(Manifest, name)
            except ObjectNotFound as e:
                raise CorruptObject(
                    f"{self.where(name)} is referred to but missing; see `art-sky verify`", key=key
                ) from e
        return self._manifests[key]

    def steps(self) -> list[Step]:
        """What is reachable from HEAD, oldest first; empty before the first commit."""
        chain = self._reachable()
        gone = set(self.names("deleted/")) if chain else set()
        return [Step(key, m, f"deleted/{manifest_name(m)}" in gone) for key, m in reversed(chain)]

    def chain(self, key: str | None) -> Iterator[tuple[str, Manifest]]:
        """(key, manifest) from `key` back to step 0."""
        step = None
        while key is not None:
            manifest = self.manifest(key)
            if step is not None and manifest.step != step - 1:
                raise self.corrupt(self.name_of(key), f"step {step} follows step {manifest.step}")
            if manifest.parent is None and manifest.step != 0:
                raise self.corrupt(self.name_of(key), f"step {manifest.step} has no parent")
            yield key, manifest
            key, step = manifest.parent, manifest.step

    def head_chain(self, head: Head) -> Iterator[tuple[str, Manifest]]:
        """(key, manifest) from HEAD back to step 0. Raises CorruptObject also when HEAD names another step."""
        if head.step >= len(self._manifests) + WORTH_IT:
            # Each names its parent, so that the chain itself can only be read one by one.
            deque(read_ahead(self._try_manifest, self.names("manifests/")), maxlen=0)
        for key, manifest in self.chain(head.manifest or None):
            if key == head.manifest and manifest.step != head.step:
                raise self.corrupt("HEAD", f"it says step {head.step}, and its manifest is of step {manifest.step}")
            yield key, manifest

    def manifest_at(self, step: int) -> Manifest:
        """Raises NotFound for a step that is not reachable from HEAD."""
        head = self.head()
        for _, manifest in self.head_chain(head):
            if manifest.step == step:
                return manifest
        raise NotFound(f"{self.prefix} has no step {step}; its steps are 0 to {head.step}")

    def refs(self) -> dict[str, str]:
        """Name -> manifest key of the steps that are kept by name."""
        return {n.removeprefix("refs/"): self.read(Ref, n).manifest for n in self.names("refs/")}

    # --- blobs ---

    def put_blob(self, data: bytes | Path) -> FileRef:
        """Always writes: a blob that is not reachable from HEAD may be about to be deleted."""
        ref = file_ref(data)
        self.store.put(self.new_blob_key(ref.sha256), data)
        return ref

    def has_blob(self, sha256: str) -> bool:
        """Whether this model itself holds it."""
        try:
            self.find_blob(sha256)
        except ObjectNotFound:
            return False
        return True

    def find_blob(self, sha256: str) -> FileRef:
        """Its hash and size; one that a fork's steps name elsewhere comes with its root. Raises ObjectNotFound."""
        for _, key in self._places(FileRef(sha256=sha256, size=0)):
            try:
                return FileRef(sha256=sha256, size=self.store.info(key).size)
            except ObjectNotFound:
                continue
        for _, manifest in self._reachable():
            for ref in manifest.files.values():
                if ref.sha256 == sha256 and ref.root is not None:
                    return ref
        raise ObjectNotFound(f"there is no blob {sha256} of {self.prefix} in {self.store.url}; upload it first")

    def read_blob(self, ref: FileRef) -> bytes:
        """Raises ObjectNotFound, or CorruptObject when the bytes are not those that were stored."""
        return b"".join(self.blob_blocks(ref))

    def blob_key(self, sha256: str) -> str:
        return self.key(f"blobs/{sha256}")

    def new_blob_key(self, sha256: str) -> str:
        """Where to put a blob so that nobody's late delete can hit it."""
        key = self.blob_key(sha256)
        return f"{key}.{uuid.uuid4().hex}" if key in self.condemned else key

    def open_blob(self, ref: FileRef) -> tuple[str, BinaryIO]:
        """Where the blob is, for messages, and its bytes, which nobody checked. Raises ObjectNotFound."""
        for store, key in self._places(ref):
            try:
                return f"{key!r} in {store.url}", store.open(key)
            except ObjectNotFound:
                continue
        place = f"{self.blob_key(ref.sha256)!r} in {self.store.url}"
        if ref.root is not None:
            place += f", nor in {ref.root.model} of {ref.root.store or 'the same store'}, of which it is a fork"
        raise ObjectNotFound(f"there is no {place}; see `art-sky verify`")

    def blob_blocks(self, ref: FileRef) -> Iterator[bytes]:
        """The blob piece by piece, for what does not fit into memory; a wrong hash is known only at the end."""
        digest, size = hashlib.sha256(), 0
        place, source = self.open_blob(ref)
        with source:
            while True:
                try:
                    block = source.read(_CHUNK)
                except OSError as e:
                    raise StoreError(f"cannot read {place}: {e}; try again") from e
                if not block:
                    break
                digest.update(block)
                size += len(block)
                yield block
        if size != ref.size or digest.hexdigest() != ref.sha256:
            raise CorruptObject(
                f"{place} cannot be read: its bytes do not match its hash; `art-sky verify` says how to mend it"
            )

    def at(self, root: BlobRoot) -> ModelStore:
        """The model that `root` names."""
        where = f"{root.store or self.store.url}#{root.model}"
        if where not in self._roots:
            project, _, name = root.model.partition("/")
            store = self.store if root.store is None else open_store(root.store)
            self._roots[where] = ModelStore(store, project, name)
        return self._roots[where]

    def _places(self, ref: FileRef) -> Iterator[tuple[Store, str]]:
        """Where the blob may be, the likeliest first. A fork that was copied whole has its own."""
        own = self.blob_key(ref.sha256)
        if own not in self.condemned:
            yield self.store, own
        if ref.root is not None:
            yield from self.at(ref.root)._places(FileRef(sha256=ref.sha256, size=ref.size))
        for info in self.store.list(own + "."):
            if info.key not in self.condemned:
                yield self.store, info.key

    def fetch_files(self, manifest: Manifest, folder: Path, prefix: str = "") -> Path:
        """Puts the files whose names start with `prefix` at `folder/<name>` and returns `folder`.

        A new folder appears whole. In one that exists, files with the right hash stay untouched, so that others may
        read them meanwhile, and each other file is replaced in one step. Raises NotFound for a step whose files were
        deleted, CorruptObject naming the object whose bytes are wrong.
        """
        wanted = {check_key(n): ref for n, ref in manifest.files.items() if n.startswith(prefix)}
        self.refuse_deleted(manifest)
        try:
            return unpack(wanted, self.blob_blocks, folder)
        except ObjectNotFound:
            self.refuse_deleted(manifest)  # deleted since it was asked for?
            raise

    def refuse_deleted(self, manifest: Manifest) -> None:
        if self._has(f"deleted/{manifest_name(manifest)}"):
            raise NotFound(
                f"the files of step {manifest.step} of {self.prefix} were deleted by delete_checkpoints; its record "
                "stays; choose a step that still has files"
            )

    def _reachable(self) -> list[tuple[str, Manifest]]:
        """(key, manifest) from HEAD back to step 0; empty before the first commit."""
        try:
            head = self.head()
        except NotFound:
            return []
        return list(self.head_chain(head))

    def _try_manifest(self, name: str) -> None:
        with suppress(StoreError):  # raised when the chain comes to it, if it does
            self.manifest(self.key(name))

    def _has(self, name: str) -> bool:
        try:
            self.store.info(self.key(name))
        except ObjectNotFound:
            return False
        return True

    # --- train requests ---

    def begin_request(self, record: TrainRequestRecord) -> TrainRequestRecord:
        """Stores the request, or returns the one stored before under its id with the same batch and config.

        Raises Conflict when the id was used with another body.
        """
        check_request(record.request)
        try:
            self.create_record(_request(record.request), record)
            return record
        except PreconditionFailed:
            stored = self.request(record.request)
            if stored.batch != record.batch or to_json(stored.config) != to_json(record.config):
                raise Conflict(
                    f"train request {record.request} was made before with another batch or config; use a new id"
                ) from None
            return stored

    def request(self, request: str) -> TrainRequestRecord:
        """Raises ObjectNotFound for an unknown id."""
        return self.read(TrainRequestRecord, _request(request))

    def attempts(self, request: str) -> list[AttemptRecord]:
        """In the order in which they began."""
        names = [n for n in self.names(f"requests/{request}.") if n != _request(request)]
        return sorted((self.read(AttemptRecord, n) for n in names), key=lambda a: a.attempt)

    def begin_attempt(self, request: str, generation: int) -> AttemptRecord:
        """Writes down that training begins, before it does; `generation` is the writer's."""
        number = len(self.attempts(request)) + 1
        while True:
            attempt = AttemptRecord(request=request, attempt=number, generation=generation, begun=time.time())
            try:
                self.create_record(f"requests/{request}.{number}.json", attempt)
                return attempt
            except PreconditionFailed:
                number += 1

    def end_attempt(
        self, attempt: AttemptRecord, outcome: Outcome, message: str | None = None, manifest: str | None = None
    ) -> AttemptRecord:
        """Writes the terminal outcome, once. Raises Conflict when another outcome is stored."""
        name = f"requests/{attempt.request}.{attempt.attempt}.json"
        values = {"outcome": outcome, "message": message, "manifest": manifest}

        def end(old: dict[str, object] | None) -> dict[str, object]:
            stored = attempt.model_dump() if old is None else old
            if stored["outcome"] is None:
                return {**stored, **values, "ended": time.time()}
            if stored["outcome"] != outcome:
                raise Conflict(f"{self.where(name)} ended as {stored['outcome']}, not {outcome}; begin another attempt")
            return stored

        return self.parse(AttemptRecord, name, to_json(self.update(name, end)))

    def find_committed(self, request: str) -> Manifest | None:
        """The step that applied this request: reachable from HEAD, else it was not applied."""
        return next((m for _, m in self._reachable() if m.request == request), None)

    def pending_requests(self) -> list[TrainRequestRecord]:
        """Neither applied nor given up, in the order in which they came."""
        applied = {manifest.request for _, manifest in self._reachable()}
        names = [n for n in self.names("requests/") if n.count(".") == 1]
        pending = []
        for record in (self.read(TrainRequestRecord, n) for n in names):
            if record.request in applied:
                continue
            attempts = self.attempts(record.request)
            if not attempts or attempts[-1].outcome not in FINAL_OUTCOMES:
                pending.append(record)
        return sorted(pending, key=lambda r: (r.created, r.request))

    def open_writer(self, owner: str, wait_seconds: float = 0.0) -> Writer:
        """The only way to commit. Raises LeaseLost, naming the holder, when another process has the model."""
        from art_sky.store.writer import Writer

        return Writer(self, owner, wait_seconds)


def blob_hash(key: str) -> str:
    """The hash in the key of a blob or of a copy of it."""
    return key.rpartition("/")[2].partition(".")[0]


def check_request(request: str) -> str:
    """Returns a request id that may become part of a key, else raises InvalidInput."""
    try:
        return _REQUEST_ID.validate_python(request)
    except ValidationError as e:
        raise InvalidInput(f"request id {request[:80]!r}: use 1 to 64 letters, digits, '_' and '-'") from e


def _request(request: str) -> str:
    return f"requests/{request}.json"
