"""Who commits. There is one writer of a model at a time, and an older one cannot disturb it.

A commit puts the blobs, then creates the manifest, then swaps HEAD; only the swap makes the step count. The lease
keeps two writers apart in ordinary life. What keeps a writer out that lost its lease without noticing is HEAD: a new
writer first rewrites it with its own generation and a nonce, and every later swap names the version which that
writer itself wrote last. So an older writer's swap fails, whenever it comes.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from art_sky.errors import (
    Conflict,
    CorruptObject,
    LeaseLost,
    NoDiskSpace,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
)
from art_sky.schemas import FileRef, Head, LeaseStatus, Manifest
from art_sky.store.deletion import read_condemned
from art_sky.store.failpoints import failpoint
from art_sky.store.files import file_ref
from art_sky.store.history import finite_metrics
from art_sky.store.model_store import NO_STEP, check_request, manifest_name
from art_sky.store.progress import Meter, Progress
from art_sky.store.records import to_json

if TYPE_CHECKING:
    from art_sky.store.model_store import ModelStore

LEASE = "leases/server"
FENCE_TRIES = 20
SETTLE_SECONDS = 10.0  # how long an unanswered write of HEAD is tried again


class Writer:
    """Made by `ModelStore.open_writer`; a context manager. Its methods exclude each other between threads."""

    def __init__(self, model: ModelStore, owner: str, wait_seconds: float) -> None:
        self.model = model
        self._mutex = threading.RLock()
        self._unknown: StoreError | None = None
        self._owner = owner
        self._lease = model.store.acquire(model.key(LEASE), owner, wait_seconds)
        self._taken = time.monotonic()
        try:
            self._head, self._etag = self._fence()
            # After the fence: who writes such a list later finds that HEAD is not theirs, and deletes nothing.
            model.condemned |= read_condemned(model)
            self._applied = {manifest.request: key for key, manifest in model.head_chain(self._head)}
        except BaseException:
            self._lease.release()
            raise

    @property
    def generation(self) -> int:
        """The fencing number; greater than that of every earlier writer of the model."""
        return self._head.generation

    @property
    def head(self) -> Head | None:
        """HEAD as this writer wrote it, None before the first commit."""
        return None if self._head.step == NO_STEP else self._head

    def commit(
        self,
        *,
        step: int,
        request: str,
        files: Mapping[str, Path | FileRef],
        updates: int,
        reason: str | None = None,
        batch: FileRef | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Manifest:
        """Applies `request` as `step`, at most once: a request that is applied already gives its stored step.

        `files` maps a name to a local file, or to a blob that is in the store (a skipped step names its parent's).
        `progress` hears of the bytes of local files as they are stored.
        Raises Conflict when `step` is not the one after HEAD, LeaseLost when another writer took over,
        CorruptObject for a FileRef without its blob. After any error but LeaseLost the same call may be made again.
        """
        with self.exclusive():
            if (known := self._applied.get(check_request(request))) is not None:
                return self.model.manifest(known)
            if step != self._head.step + 1:
                raise Conflict(
                    f"step {step} of {self.model.prefix} does not follow step {self._head.step}: train on the newest"
                )
            if batch is not None and not self.model.has_blob(batch.sha256):
                raise CorruptObject(f"the batch {batch.sha256} of {request} is not stored; store it first")
            manifest = Manifest(
                step=step,
                parent=self._head.manifest or None,
                request=request,
                generation=self.generation,
                created=time.time(),
                updates=updates,
                reason=reason,
                files=self._store_files(files, progress),
                batch=batch,
                config=dict(config or {}),
                metrics=finite_metrics(metrics or {}),
                versions=dict(versions or {}),
            )
            failpoint("after-blobs")
            name = f"manifests/{manifest_name(manifest)}"
            self._lease.check()
            try:
                self.model.create_record(name, manifest)
            except PreconditionFailed:
                # This writer's own, from a commit whose swap of HEAD failed. It is as good as the new one.
                manifest = self.model.read(Manifest, name)
                if not self._complete(manifest):
                    raise
            failpoint("after-manifest")
            self._advance(name, manifest)
            failpoint("after-head")
            return manifest

    def adopt(self, request: str) -> Manifest | None:
        """Applies what a killed predecessor finished but for HEAD; None when there is nothing whole to adopt.

        That is a manifest of `request` whose parent is HEAD and whose blobs are all there with the right bytes.
        """
        with self.exclusive():
            if (known := self._applied.get(request)) is not None:
                return self.model.manifest(known)
            for name in reversed(self.model.names(f"manifests/{self._head.step + 1:08d}-{request}-")):
                if self.model.key(name) in self.model.condemned:
                    continue
                try:
                    manifest = self.model.read(Manifest, name)
                except CorruptObject:
                    continue  # what a crash left; the request is computed again
                if manifest.request == request and self._complete(manifest):
                    self._advance(name, manifest)
                    return manifest
            return None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps this writer's other threads out, after a look at the lease."""
        with self._mutex:
            if self._unknown is not None:
                raise self._unknown
            try:
                self._lease.check()
            except LeaseLost:
                # The store was out of reach, and may be back before the next renewal is due.
                self._lease.recover()
                self._lease.check()
            yield

    def check(self) -> None:
        """Raises LeaseLost when another process may own the model now."""
        self._lease.check()

    def lease(self) -> LeaseStatus:
        """The claim as this process sees it."""
        problem = None
        try:
            self._lease.check()
        except LeaseLost as e:
            problem = e.message
        age = round(time.monotonic() - self._taken, 3)
        return LeaseStatus(owner=self._owner, generation=self.generation, age_seconds=age, problem=problem)

    def confirm(self) -> None:
        """Asks the store itself, not only the clock. Raises LeaseLost when another writer took over."""
        self._lease.check()
        if self.model.store.get(self.model.key("HEAD")).etag != self._etag:
            raise LeaseLost(f"another process took over {self.model.prefix}; stop one of the two")

    def fast_forward(self, head: Head) -> None:
        """Moves HEAD to the step of `head`, which another store reached from here; its manifests must be stored.

        Raises Conflict when the present step is not among its ancestors.
        """
        with self.exclusive():
            if head.manifest == self._head.manifest and head.attempt == self._head.attempt:
                return
            added: dict[str, str] = {}
            for key, manifest in self.model.chain(head.manifest):
                if key == self._head.manifest:
                    break
                added[manifest.request] = key
            else:
                if self._head.manifest:
                    raise Conflict(
                        f"step {head.step} does not continue step {self._head.step} of {self.model.prefix} in "
                        f"{self.model.store.url}: the histories differ; fork the one you want under another name"
                    )
            self._write_head(step=head.step, manifest=head.manifest, attempt=head.attempt)
            self._applied |= added

    def close(self) -> None:
        """Gives the lease back; another process may open a writer at once."""
        with self._mutex:
            self._lease.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fence(self) -> tuple[Head, str]:
        """Takes HEAD from every earlier writer. This one swap uses the etag of a read: it is the taking itself."""
        key = self.model.key("HEAD")
        for _ in range(FENCE_TRIES):
            self._lease.check()
            try:
                found = self.model.store.get(key)
            except ObjectNotFound:
                self.model.refuse_lost_head()
                found = None
            old = Head(step=NO_STEP, manifest="", generation=0, nonce="")
            if found is not None:
                old = self.model.parse(Head, "HEAD", found.data)
            # Greater also when somebody deleted the lease's record, and its count with it.
            generation = max(self._lease.generation, old.generation + 1)
            head = old.model_copy(update={"generation": generation, "nonce": uuid.uuid4().hex})
            data = to_json(head)
            try:
                if found is None:
                    return head, self.model.store.create(key, data)
                return head, self.model.store.swap(key, data, found.etag)
            except StoreError as e:
                if self.model.holds("HEAD", data, e):
                    return head, self.model.store.get(key).etag
                if not isinstance(e, PreconditionFailed):
                    raise
        raise LeaseLost(f"HEAD of {self.model.prefix} is being written by another process; stop it, then start again")

    def _store_files(self, files: Mapping[str, Path | FileRef], progress: Progress | None) -> dict[str, FileRef]:
        head_files = self.model.manifest(self._head.manifest).files if self._head.manifest else {}
        kept = {ref.sha256: ref for ref in head_files.values()}  # reachable from HEAD: nobody may delete them
        refs = {n: file_ref(s) if isinstance(s, Path) else s for n, s in sorted(files.items())}
        stored = {name: kept.get(ref.sha256, ref) for name, ref in refs.items()}
        new = {name: ref for name, ref in refs.items() if ref.sha256 not in kept}
        meter = Meter(sum(ref.size for name, ref in new.items() if isinstance(files[name], Path)), progress)
        for name, ref in new.items():
            source = files[name]
            if isinstance(source, Path):
                self.model.store.put(self.model.new_blob_key(ref.sha256), source, meter.add)
            else:
                self._verify(name, ref)
        return stored

    def _verify(self, name: str, ref: FileRef) -> None:
        try:
            for _ in self.model.blob_blocks(ref):
                pass
        except ObjectNotFound as e:
            raise CorruptObject(f"file {name!r} names blob {ref.sha256}, which is not stored; store it first") from e

    def _complete(self, manifest: Manifest) -> bool:
        if (manifest.step, manifest.parent) != (self._head.step + 1, self._head.manifest or None):
            return False
        try:
            for name, ref in manifest.files.items():
                self._verify(name, ref)
        except CorruptObject:
            return False
        return True

    def _advance(self, name: str, manifest: Manifest) -> None:
        self._write_head(step=manifest.step, manifest=self.model.key(name))
        self._applied[manifest.request] = self._head.manifest

    def _write_head(self, **values: Any) -> None:
        head = self._head.model_copy(update={**values, "nonce": uuid.uuid4().hex})
        self._etag = self._swap_head(to_json(head))
        self._head = head

    def _swap_head(self, data: bytes) -> str:
        """Swaps HEAD from this writer's last version. When no answer came, reading back tells what happened."""
        key = self.model.key("HEAD")
        deadline = time.monotonic() + SETTLE_SECONDS
        pause = 0.05
        while True:
            self._lease.check()
            try:
                return self.model.store.swap(key, data, self._etag)
            except StoreError as error:
                try:
                    found = self.model.store.get(key)
                except StoreError:
                    found = None
                if found is not None and found.data == data:
                    return found.etag
                if found is not None and found.etag != self._etag:
                    raise LeaseLost(
                        f"another process took over {self.model.prefix} (its HEAD was written by somebody else); "
                        "stop one of the two"
                    ) from error
                if isinstance(error, NoDiskSpace):
                    raise  # known not to have happened
                if time.monotonic() + pause > deadline:
                    self._unknown = StoreError(
                        f"whether HEAD of {self.model.prefix} was written is unknown ({error.message}); restart the "
                        "server, which finds out"
                    )
                    raise self._unknown from error
            time.sleep(pause)
            pause = min(pause * 2, 1.0)
