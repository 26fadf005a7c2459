"""Fork, copy, gc, verify, export, diff and refs, on folders."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_servers import READER, store_url

from art_sky.config import LoRAConfig
from art_sky.errors import Conflict, CorruptObject, InvalidInput, LeaseLost, NotFound, StoreError
from art_sky.schemas import FileRef, ModelRecord, TrainRequestRecord
from art_sky.store import open_store
from art_sky.store.batches import encode_batch
from art_sky.store.check import check_store
from art_sky.store.copy import copy_blob, copy_model
from art_sky.store.deletion import Condemned
from art_sky.store.diff import diff_steps
from art_sky.store.export import export_adapter
from art_sky.store.fork import fork_model
from art_sky.store.gc import collect, find_garbage
from art_sky.store.model_store import ModelStore, Ref
from art_sky.store.reachable import find_reachable
from art_sky.store.refs import add_ref, delete_ref, find_step
from art_sky.store.repair import Repair, make_repairs, plan_repairs
from art_sky.store.retention import delete_checkpoints
from art_sky.store.verify import verify_model


def make(folder: Path, name: str = "m", steps: int = 3) -> ModelStore:
    model = ModelStore(open_store(str(folder)), "p", name)
    model.create(
        ModelRecord(project="p", name=name, base_model="tiny", lora=LoRAConfig(), created=1.0, created_by="test")
    )
    train(model, range(steps + 1))
    return model


def train(model: ModelStore, steps: range, mark: str = "") -> None:
    with model.open_writer("test") as writer:
        for step in steps:
            batch = model.put_blob(f"batch {step}{mark}".encode()) if step else None
            request = f"r{step}{mark}"
            if batch:
                model.begin_request(request_of(request, batch))
                attempt = model.begin_attempt(request, writer.generation)
            writer.commit(
                step=step,
                request=request,
                files={
                    "adapter/adapter_config.json": model.put_blob(b'{"r": 8}'),
                    "adapter/adapter_model.safetensors": model.put_blob(f"weights {step}{mark}".encode()),
                    "trainer/state.json": model.put_blob(f"state {step}{mark}".encode()),
                },
                updates=int(step > 0),
                batch=batch,
                config={"learning_rate": 0.1 * step},
                metrics={"loss": -step / 10},
            )
            if batch:
                model.end_attempt(attempt, "committed")
            model.log_row(1, step, "val", {"reward": step / 10})
    model.write_trajectories("train", steps[-1], 1, BATCH)


def request_of(request: str, batch: FileRef, config: dict[str, float] | None = None) -> TrainRequestRecord:
    return TrainRequestRecord(
        request=request, batch=batch, config=config or {}, head_step=0, head_manifest="", created=1.0
    )


BATCH = encode_batch([])


def fresh(model: ModelStore) -> ModelStore:
    """Another process's view: nothing remembered."""
    return ModelStore(open_store(model.store.url), model.project, model.name)


def objects(model: ModelStore) -> dict[str, bytes]:
    return {i.key: model.store.get(i.key).data for i in model.store.list("") if "/leases/" not in i.key}


def whole(model: ModelStore) -> list[str]:
    return [f"{d.problem} {d.key}" for d in verify_model(fresh(model)).damages]


def path(model: ModelStore, key: str) -> Path:
    return Path(model.store.url.removeprefix("file://")) / key


def weights(model: ModelStore, step: int) -> bytes:
    return fresh(model).read_blob(fresh(model).manifest_at(step).files["adapter/adapter_model.safetensors"])


# --- fork ---


def test_fork_copies_nothing_and_keeps_what_it_reads(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(source.store, "p", "child")
    forked = fork_model(source, 1, child, "test", created_by="test")
    assert forked.copied is None and not list(source.store.list("p/child/blobs/"))
    assert forked.manifest.step == 0 and forked.manifest.reason == f"forked from p/m@1 in {source.store.url}"
    assert child.record().forked_from == forked.origin and child.record().base_model == "tiny"
    assert weights(child, 0) == b"weights 1"
    with source.open_writer("clean") as writer:
        assert delete_checkpoints(writer) == [0, 2]
        collect(writer, 0)
    assert weights(child, 0) == b"weights 1" and whole(child) == [] and whole(source) == []
    assert fresh(child).fetch_files(child.manifest_at(0), tmp_path / "out").joinpath("trainer/state.json").exists()
    train(child, range(1, 3), "-child")
    with child.open_writer("clean") as writer:
        collect(writer, 0)
    assert whole(child) == [] and [s.manifest.step for s in child.steps()] == [0, 1, 2]


def test_a_skipped_step_of_a_fork_and_a_fork_of_a_fork(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    child, grandchild = ModelStore(source.store, "q", "child"), ModelStore(source.store, "q", "grandchild")
    fork_model(source, None, child, "test", created_by="test")
    with child.open_writer("test") as writer:
        writer.commit(step=1, request="skip", files=child.manifest_at(0).files, updates=0, reason="no spread")
        same = tmp_path / "same"
        same.write_bytes(b"weights 3")
        made = writer.commit(step=2, request="same", files={"w": same}, updates=1)
    assert made.files["w"].root is not None, "what HEAD reaches in the source is not put again"
    fork_model(child, 1, grandchild, "test", created_by="test")
    assert weights(grandchild, 0) == b"weights 3" and not list(source.store.list("q/grandchild/blobs/"))
    assert grandchild.find_blob(child.manifest_at(0).files["trainer/state.json"].sha256).root is not None


def test_fork_into_another_store(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(open_store(str(tmp_path / "other")), "p", "m")
    fork_model(source, 2, child, "test", created_by="test")
    root = child.manifest_at(0).files["trainer/state.json"].root
    assert root is not None and (root.store, root.model) == (source.store.url, "p/m")
    assert weights(child, 0) == b"weights 2"


def test_a_source_that_cannot_be_written_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(open_store(str(tmp_path / "other")), "p", "child")

    def refuse(key: str, data: bytes) -> str:
        raise StoreError("access denied; ask the owner")

    monkeypatch.setattr(source.store, "create", refuse)
    forked = fork_model(source, 1, child, "test", created_by="test")
    assert forked.copied is not None and "access denied" in forked.copied
    (tmp_path / "s").rename(tmp_path / "gone")
    assert weights(child, 0) == b"weights 1" and whole(child) == []


def test_what_cannot_be_forked_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    with source.open_writer("clean") as writer:
        delete_checkpoints(writer)
    child = ModelStore(source.store, "p", "child")
    with pytest.raises(NotFound, match="files of step 1"):
        fork_model(source, 1, child, "test", created_by="test")
    with pytest.raises(NotFound, match="no step 9"):
        fork_model(source, 9, child, "test", created_by="test")
    assert not child.exists() and source.refs() == {}
    with pytest.raises(Conflict, match="exists already"):
        fork_model(source, 3, make(tmp_path / "t", "other"), "test", created_by="test")


def test_a_fork_that_was_broken_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(source.store, "p", "child")
    with monkeypatch.context() as patch:
        patch.setattr(child, "open_writer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fork_model(source, 1, child, "test", created_by="test")
    assert child.exists()
    with pytest.raises(Conflict):
        fork_model(source, 2, child, "test", created_by="test")
    fork_model(source, 1, child, "test", created_by="test")
    assert weights(child, 0) == b"weights 1"


# --- copy ---


def test_copy_brings_everything_and_the_next_one_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "s")
    source.merge_state({"seed": 1})
    add_ref(source, "best", find_step(source, 1))
    waiting = source.put_blob(b"waiting")
    source.begin_request(request_of("w", waiting))
    source.put_blob(b"garbage")
    other = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    bars: list[tuple[int, int]] = []
    copied = copy_model(source, other, "test", progress=lambda done, total: bars.append((done, total)))
    assert copied.step == 3 and copied.blobs == 13 and bars[-1] == (copied.bytes, copied.bytes)
    assert whole(other) == []
    assert [s.manifest for s in other.steps()] == [s.manifest for s in source.steps()]
    assert other.history() == source.history() and other.read_state() == {"seed": 1}
    assert other.refs() == source.refs() and [r.request for r in other.pending_requests()] == ["w"]
    assert other.read_blob(waiting) == b"waiting" and len(list(other.store.list("p/m/trajectories/"))) == 1
    calls: list[str] = []
    for name in ("get", "info", "put", "create", "swap", "delete", "acquire"):
        monkeypatch.setattr(other.store, name, counted(getattr(other.store, name), name, calls))
        monkeypatch.setattr(source.store, name, counted(getattr(source.store, name), f"source {name}", calls))
    assert copy_model(source, other, "test").unchanged
    assert calls == ["get"], "the record of the last copy; and the source is listed"


def test_progress_moves_within_a_blob_and_ends_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = 9 << 20
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    def check(total: int) -> None:
        assert told[-1] == (total, total) and {t for _, t in told} == {total}
        assert any(0 < done < total - (1 << 20) for done, _ in told)
        told.clear()

    source = make(tmp_path / "s", steps=0)
    path = tmp_path / "large"
    path.write_bytes(random.Random(0).randbytes(large))
    files = {"adapter/adapter_model.safetensors": path, **source.manifest_at(0).files}
    with source.open_writer("test") as writer:
        writer.commit(step=1, request="r1", files={**files, "large": path}, updates=1, progress=tell)
    check(large)
    verify_model(source, progress=tell)
    check(sum(b.ref.size for b in find_reachable(source).blobs.values()))
    real, broken = ModelStore.blob_blocks, [True]

    def once_broken(model: ModelStore, ref: FileRef) -> Iterator[bytes]:
        for block in real(model, ref):
            yield block
            if ref.size == large and broken and broken.pop():
                raise CorruptObject("changed on its way")

    monkeypatch.setattr(ModelStore, "blob_blocks", once_broken)
    copied = copy_model(source, ModelStore(open_store(str(tmp_path / "d")), "p", "m"), "test", progress=tell)
    check(copied.bytes)
    assert not broken


def counted(call: Callable[..., object], name: str, calls: list[str]) -> Callable[..., object]:
    def counting(*args: object) -> object:
        calls.append(name)
        return call(*args)

    return counting


def test_copy_sends_only_what_is_new_and_goes_both_ways(tmp_path: Path) -> None:
    laptop = make(tmp_path / "s")
    bucket = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(laptop, bucket, "test")
    train(laptop, range(4, 5))
    laptop.log_row(1, 3, "val", {"late": 1.0})
    copied = copy_model(laptop, bucket, "test")
    assert (copied.step, copied.blobs) == (4, 3), "the new weights, state and batch"
    assert whole(bucket) == [] and bucket.history() == laptop.history()
    train(bucket, range(5, 6))
    bucket.log_row(1, 4, "val", {"other": 2.0})
    assert copy_model(laptop, bucket, "test").unchanged
    laptop.log_row(1, 0, "val", {"late": 1.0})
    with pytest.raises(Conflict, match=r"is ahead.*the other way"):
        copy_model(laptop, bucket, "test")
    assert copy_model(bucket, laptop, "test").step == 5
    assert whole(laptop) == [] and laptop.history()[4].metrics == {"reward": 0.4, "other": 2.0}
    assert laptop.history()[0].metrics == {"reward": 0.0, "late": 1.0}, "a merge takes nothing away"


def test_copy_of_a_fork_needs_the_source_no_more(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(source.store, "p", "child")
    fork_model(source, 1, child, "test", created_by="test")
    other = ModelStore(open_store(str(tmp_path / "d")), "p", "child")
    copy_model(child, other, "test")
    (tmp_path / "s").rename(tmp_path / "gone")
    assert weights(other, 0) == b"weights 1" and whole(other) == []
    with other.open_writer("clean") as writer:
        assert collect(writer, 0).objects == []


def test_diverged_histories_are_a_conflict_that_changes_nothing(tmp_path: Path) -> None:
    ours = make(tmp_path / "s")
    theirs = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(ours, theirs, "test")
    train(ours, range(4, 6), "-ours")
    train(theirs, range(4, 5), "-theirs")
    before = objects(theirs)
    with pytest.raises(Conflict, match=r"does not continue step 4.*fork one of them"):
        copy_model(ours, theirs, "test")
    other = make(tmp_path / "x")
    with pytest.raises(Conflict):
        copy_model(other, theirs, "test")
    assert objects(theirs) == before
    with pytest.raises(Conflict, match="another name"):
        copy_model(ours, ModelStore(theirs.store, "p", "n"), "test")


def test_the_same_request_with_another_body_is_not_overwritten(tmp_path: Path) -> None:
    ours = make(tmp_path / "s")
    theirs = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(ours, theirs, "test")
    ours.begin_request(request_of("same", ours.put_blob(b"x"), {"lr": 1.0}))
    theirs.begin_request(request_of("same", theirs.put_blob(b"x"), {"lr": 2.0}))
    train(ours, range(4, 5))
    with pytest.raises(Conflict, match=r"requests/same\.json.*nothing was overwritten"):
        copy_model(ours, theirs, "test")
    assert theirs.request("same").config == {"lr": 2.0} and fresh(theirs).head().step == 3


def test_copy_refuses_damage_and_a_served_destination(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    other = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    damaged = source.blob_key(source.manifest_at(2).files["trainer/state.json"].sha256)
    path(source, damaged).write_bytes(b"state X")
    with pytest.raises(CorruptObject, match="blobs/"):
        copy_model(source, other, "test")
    with pytest.raises(NotFound):
        other.head()
    path(source, damaged).write_bytes(b"state 2")
    with other.open_writer("a server"), pytest.raises(LeaseLost, match="a server"):
        copy_model(source, fresh(other), "test")
    assert copy_model(source, other, "test").step == 3


def test_steps_deleted_at_the_destination_are_not_sent_again(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    other = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(source, other, "test")
    with other.open_writer("clean") as writer:
        delete_checkpoints(writer)
    train(source, range(4, 5))
    assert copy_model(source, fresh(other), "test").blobs == 3
    assert whole(other) == []


# --- gc ---


def test_gc_deletes_only_what_nothing_needs(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    waiting = model.put_blob(b"waiting")
    model.begin_request(request_of("w", waiting))
    add_ref(model, "good", find_step(model, 1))
    before = objects(model)
    garbage = model.put_blob(b"never trained on")
    model.store.put("p/m/manifests/00000002-x-9.json", b"{")
    doomed = {model.blob_key(garbage.sha256), "p/m/manifests/00000002-x-9.json"}
    with model.open_writer("gc") as writer:
        assert collect(writer).objects == []
        assert {i.key for i in find_garbage(model).young} == doomed
        assert {i.key for i in find_garbage(model, 0).objects} == doomed and find_garbage(model, 0).size == 17
        assert {i.key for i in collect(writer, 0).objects} == doomed
        assert collect(writer, 0).objects == []
    after = objects(model)
    assert {k: v for k, v in after.items() if k != "p/m/HEAD"} == {k: v for k, v in before.items() if k != "p/m/HEAD"}
    assert whole(model) == [] and model.read_blob(waiting) == b"waiting"


def test_gc_keeps_a_step_that_may_be_adopted(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    head = model.head()
    with model.open_writer("a server that dies") as writer:
        writer._write_head = lambda **_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            writer.commit(step=4, request="r4", files={"f": model.put_blob(b"done")}, updates=1)
    with fresh(model).open_writer("gc") as writer:
        assert collect(writer, 0).objects == []
        adopted = writer.adopt("r4")
    assert adopted is not None and fresh(model).head().step == head.step + 1


def test_gc_stops_at_what_it_cannot_read(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    model.put_blob(b"garbage")
    model.store.put("p/m/requests/bad.json", b"{")
    with model.open_writer("gc") as writer:
        before = objects(model)
        with pytest.raises(CorruptObject, match=r"requests/bad\.json"):
            collect(writer, 0)
        assert objects(model) == before


def test_a_gc_that_was_overtaken_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "s")
    garbage = model.put_blob(b"garbage")
    with model.open_writer("gc") as writer:
        monkeypatch.setattr(writer._lease, "check", lambda: None)  # it does not notice
        model.store.put("p/m/HEAD", model.store.get("p/m/HEAD").data)
        with pytest.raises(LeaseLost, match="took over"):
            collect(writer, 0)
    assert model.read_blob(garbage) == b"garbage"


def test_what_somebody_may_still_delete_is_put_elsewhere(tmp_path: Path) -> None:
    """A gc that sleeps after it wrote its list wakes up after the same bytes were committed."""
    model = make(tmp_path / "s")
    again = model.put_blob(b"again")
    key = model.blob_key(again.sha256)
    model.create_record("gc/sleeper.json", Condemned(keys=[key]))
    awake = fresh(model)
    with awake.open_writer("test") as writer:
        with pytest.raises(CorruptObject, match="not stored"):
            writer.commit(step=4, request="r4", files={"f": again}, updates=1)
        assert not awake.has_blob(again.sha256)
        awake.put_blob(b"again")
        writer.commit(step=4, request="r4", files={"f": again}, updates=1)
    model.store.delete(key)
    reader = fresh(model)
    assert reader.read_blob(again) == b"again" and reader.find_blob(again.sha256) == again and whole(model) == []
    with reader.open_writer("gc") as writer:
        assert collect(writer, 0).objects == []
    assert whole(model) == []


def test_a_ref_keeps_a_step_that_head_does_not_reach(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    aside = model.put_blob(b"aside")
    manifest = model.manifest_at(3).model_copy(update={"request": "aside", "files": {"f": aside}})
    model.create_record("manifests/00000003-aside-1.json", manifest)
    model.create_record("refs/aside", Ref(manifest="p/m/manifests/00000003-aside-1.json"))
    with model.open_writer("gc") as writer:
        assert collect(writer, 0).objects == []
    delete_ref(model, "aside")
    assert len(find_garbage(model, 0).objects) == 2


def test_a_manifest_that_somebody_may_still_delete_is_not_adopted(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    head = model.steps()[-1]
    manifest = head.manifest.model_copy(update={"step": 4, "parent": head.key, "request": "r4"})
    model.create_record("manifests/00000004-r4-1.json", manifest)
    model.create_record("gc/sleeper.json", Condemned(keys=["p/m/manifests/00000004-r4-1.json"]))
    with fresh(model).open_writer("test") as writer:
        assert writer.adopt("r4") is None
    model.store.delete("p/m/gc/sleeper.json")
    with fresh(model).open_writer("test") as writer:
        assert writer.adopt("r4") == manifest


# --- in a bucket ---


def test_a_bucket(endpoint: str, tmp_path: Path) -> None:
    laptop = make(tmp_path / "s")
    bucket = ModelStore(open_store(store_url(endpoint)), "p", "m")
    check = check_store(bucket.store)
    assert check.safe_to_train, [t for t in check.trials if not t.ok]
    assert copy_model(laptop, bucket, "test").step == 3 and copy_model(laptop, bucket, "test").unchanged
    child = ModelStore(bucket.store, "p", "child")
    assert fork_model(bucket, 1, child, "test", created_by="test").copied is None
    here = ModelStore(laptop.store, "p", "here")
    assert fork_model(bucket, 2, here, "test", created_by="test").copied is None
    there = ModelStore(bucket.store, "p", "there")
    copied = fork_model(laptop, 2, there, "test", created_by="test").copied
    assert copied is not None and "cannot be read from every machine" in copied
    garbage = bucket.put_blob(b"garbage")
    with bucket.open_writer("clean") as writer:
        delete_checkpoints(writer)
        assert [i.key for i in collect(writer, 0).objects] == [bucket.blob_key(garbage.sha256)]
    assert weights(child, 0) == b"weights 1" and weights(here, 0) == weights(there, 0) == b"weights 2"
    assert [whole(m) for m in (bucket, child, here, there)] == [[], [], [], []]
    pulled = ModelStore(open_store(str(tmp_path / "pulled")), "p", "child")
    assert copy_model(child, pulled, "test").step == 0 and weights(pulled, 0) == b"weights 1"


def test_a_bucket_that_may_only_be_read(seaweedfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = make(tmp_path / "s")
    url = store_url(seaweedfs)
    owned = ModelStore(open_store(url), "p", "m")
    copy_model(laptop, owned, "test")
    before = objects(owned)
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    bucket = ModelStore(open_store(url), "p", "m")
    ref = bucket.manifest_at(3).files["trainer/state.json"]
    assert bucket.read_blob(ref) == b"state 3" and verify_model(bucket).damages == []
    train(laptop, range(4, 5))
    writes = [
        lambda: bucket.open_writer("a server"),
        lambda: bucket.put_blob(b"batch"),
        lambda: bucket.begin_request(request_of("r", ref)),
        lambda: bucket.log_row(1, 3, "val", {"reward": 1.0}),
        lambda: add_ref(bucket, "best", find_step(bucket, 1)),
        lambda: copy_model(laptop, bucket, "test"),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(StoreError, match=r"cannot write s3://art-sky-tests/.*: AccessDenied.*s3:PutObject"):
            write()
    check = check_store(bucket.store)
    assert check.safe_to_read and not check.safe_to_train
    child = ModelStore(laptop.store, "p", "child")
    copied = fork_model(bucket, 1, child, "test", created_by="test").copied
    assert copied is not None and "AccessDenied" in copied and weights(child, 0) == b"weights 1"
    assert objects(owned) == before


# --- verify and repair ---


def repair(model: ModelStore, origin: ModelStore | None = None) -> list[str]:
    """One round; the keys that were planned."""
    model = fresh(model)
    planned = plan_repairs(model, verify_model(model).damages, origin)
    make_repairs(model, planned, "test")
    return [r.key for r in planned]


def test_verify_names_what_is_damaged_and_mends_it(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    copy = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(model, copy, "test")
    files = model.manifest_at(2).files
    bad = model.blob_key(files["trainer/state.json"].sha256)
    gone = model.blob_key(files["adapter/adapter_model.safetensors"].sha256)
    path(model, bad).write_bytes(b"state X")
    path(model, gone).unlink()
    report = verify_model(fresh(model))
    assert {(d.key, d.problem, tuple(d.steps)) for d in report.damages} == {
        (bad, "damaged", (2,)),
        (gone, "missing", (2,)),
    }
    assert all("art-sky repair p/m --from" in d.mend and "batch of step 2" in d.mend for d in report.damages)
    assert report.damages[0].needed_by[0].startswith("step 2: ")
    assert plan_repairs(model, report.damages) == []
    assert set(repair(model, copy)) == {bad, gone}
    assert whole(model) == []


def test_verify_damaged_records(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    copy = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(model, copy, "test")
    steps = model.steps()
    path(model, steps[1].key).write_text("{}")
    trajectory = next(model.store.list("p/m/trajectories/")).key
    path(model, trajectory).write_bytes(BATCH[:20])
    path(model, "p/m/history/val/00000001-0001.json").write_text("[")
    damages = {d.key: d for d in verify_model(fresh(model)).damages}
    assert set(damages) == {steps[1].key, trajectory, "p/m/history/val/00000001-0001.json"}
    assert damages[steps[1].key].steps == [0, 1]
    assert set(repair(model, copy)) == {steps[1].key, trajectory}
    assert whole(model) == ["damaged p/m/history/val/00000001-0001.json"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (b"{", r"'p/m/HEAD' in .* cannot be read"),
        (b'{"step": "x"}', r"'p/m/HEAD' in .* cannot be read"),
        (b'{"format": 2, "step": 3, "manifest": "", "generation": 1, "nonce": ""}', "newer art-sky; upgrade"),
        (b'{"step": 3, "manifest": "p/m/manifests/no.json", "generation": 1, "nonce": ""}', r"no\.json.*missing"),
    ],
)
def test_a_head_edited_by_hand(tmp_path: Path, edit: bytes, message: str) -> None:
    model = make(tmp_path / "s")
    other = make(tmp_path / "d", steps=0)
    child = ModelStore(model.store, "p", "child")
    path(model, "p/m/HEAD").write_bytes(edit)
    before = (objects(model), objects(other))
    model = fresh(model)
    with pytest.raises(StoreError, match=message):
        copy_model(model, other, "test")
    with pytest.raises(StoreError, match=message):
        fork_model(model, None, child, "test", created_by="test")
    with pytest.raises(StoreError, match=message):
        find_garbage(model, 0)
    assert (objects(model), objects(other)) == before
    if b"format" in edit:
        with pytest.raises(StoreError, match=message):
            verify_model(model)
    else:
        assert verify_model(model).damages


@pytest.mark.parametrize(
    "edit",
    [
        None,
        b"{",
        b'{"step": 3, "manifest": "p/m/manifests/no.json", "generation": 1, "nonce": ""}',
        b'{"step": 2, "manifest": "p/m/manifests/00000003-r3-1.json", "generation": 1, "nonce": ""}',
    ],
)
def test_a_lost_head_is_written_again(tmp_path: Path, edit: bytes | None) -> None:
    model = make(tmp_path / "s")
    head, before = model.head(), objects(model)
    if edit is None:
        path(model, "p/m/HEAD").unlink()
    else:
        path(model, "p/m/HEAD").write_bytes(edit)
    for use in (lambda m: m.open_writer("a server"), lambda m: find_garbage(m, 0), lambda m: m.manifest_at(3)):
        with pytest.raises(CorruptObject, match="verify"):
            use(fresh(model))
    assert repair(model) == ["p/m/HEAD"] and whole(model) == []
    again = fresh(model).head()
    assert (again.step, again.manifest, again.attempt) == (head.step, head.manifest, head.attempt)
    assert again.generation > head.generation
    after = objects(model)
    assert after.pop("p/m/HEAD") != before.pop("p/m/HEAD") and after == before
    assert repair(model) == []
    train(fresh(model), range(4, 5))
    assert whole(model) == []


def test_head_goes_to_the_newest_step_that_is_whole(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    copy = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(model, copy, "test")
    state = model.blob_key(model.manifest_at(3).files["trainer/state.json"].sha256)
    path(model, state).write_bytes(b"state X")
    path(model, "p/m/HEAD").write_bytes(b"{")
    damages = verify_model(fresh(model)).damages
    assert "for step 2" in plan_repairs(fresh(model), damages)[0].how
    assert "for step 3" in plan_repairs(fresh(model), damages, copy)[0].how
    assert repair(model, copy) == ["p/m/HEAD"]
    assert repair(model, copy) == [state], "what HEAD leads to is seen when it is mended"
    assert whole(model) == [] and weights(model, 3) == b"weights 3"


def test_head_goes_to_what_was_applied(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    steps = model.steps()
    for number, request in ((4, "given-up"), (3, "overtaken")):
        changes = {"step": number, "request": request, "parent": steps[number - 1].key}
        manifest = steps[-1].manifest.model_copy(update=changes)
        model.create_record(f"manifests/{number:08d}-{request}-9.json", manifest)
    model.begin_request(request_of("given-up", model.put_blob(b"batch")))
    model.end_attempt(model.begin_attempt("given-up", 1), "cancelled")
    path(model, "p/m/HEAD").unlink()
    (planned,) = plan_repairs(fresh(model), verify_model(fresh(model)).damages)
    assert f"for step 3 ({steps[3].key})" in planned.how


def test_what_became_whole_meanwhile_is_not_written(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    copy = ModelStore(open_store(str(tmp_path / "d")), "p", "m")
    copy_model(model, copy, "test")
    step = model.steps()[1]
    planned: list[Repair] = []
    for key in (step.key, model.blob_key(step.manifest.files["trainer/state.json"].sha256), "p/m/HEAD"):
        before = model.store.get(key).data
        path(model, key).write_bytes(b"{")
        planned += plan_repairs(fresh(model), verify_model(fresh(model)).damages, copy)
        path(model, key).write_bytes(before)
    assert len(planned) == 3
    versions = {i.key: i.etag for i in model.store.list("") if "/leases/" not in i.key}
    make_repairs(model, planned, "test")
    assert versions == {i.key: i.etag for i in model.store.list("") if "/leases/" not in i.key}
    assert whole(model) == []


def test_a_fork_is_mended_from_its_source_and_a_served_model_is_not(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(open_store(str(tmp_path / "d")), "p", "child")
    fork_model(source, 2, child, "test", created_by="test", copy=True)
    blob = child.blob_key(child.manifest_at(0).files["trainer/state.json"].sha256)
    path(child, blob).unlink()
    with child.open_writer("a server"), pytest.raises(LeaseLost, match="a server"):
        repair(child)
    with pytest.raises(NotFound, match="same model"):
        plan_repairs(child, [], source)
    assert repair(child) == [blob] and whole(child) == []


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    key = model.steps()[2].key
    record = json.loads(model.store.get(key).data) | {"format": 2}
    path(model, key).write_text(json.dumps(record))
    for call in (lambda: find_garbage(fresh(model), 0), lambda: verify_model(fresh(model))):
        with pytest.raises(StoreError, match="newer art-sky; upgrade"):
            call()


@pytest.mark.parametrize("edit", [{"step": 7}, {"parent": None}, {"files": {"f": "abc"}}, {"format": 2}, None])
def test_a_manifest_edited_by_hand(tmp_path: Path, edit: dict[str, object] | None) -> None:
    model = make(tmp_path / "s")
    key = model.steps()[2].key
    record = json.loads(model.store.get(key).data)
    path(model, key).write_text("[" if edit is None else json.dumps(record | edit))
    before = objects(model)
    for use in (
        lambda m: m.open_writer("a server"),
        lambda m: find_garbage(m, 0),
        lambda m: copy_model(m, ModelStore(open_store(str(tmp_path / "d")), "p", "m"), "test"),
        lambda m: fork_model(m, 1, ModelStore(m.store, "p", "child"), "test", created_by="test"),
    ):
        with pytest.raises(StoreError, match=r"00000002-r2-1\.json.*(art-sky verify|upgrade this one)"):
            use(fresh(model))
    changed = {k for k, v in objects(model).items() if v != before.get(k)}
    assert changed <= {"p/m/HEAD"}, "the writer took it over before it looked"
    assert json.loads(before["p/m/HEAD"])["manifest"] == json.loads(model.store.get("p/m/HEAD").data)["manifest"]


# --- refs, export, diff ---


def test_refs(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    add_ref(model, "best", find_step(model, 1))
    add_ref(model, "best", find_step(model, 1))
    with pytest.raises(Conflict, match="is step 1 already"):
        add_ref(model, "best", find_step(model, 2))
    with pytest.raises(InvalidInput):
        add_ref(model, "../HEAD", find_step(model, 2))
    with pytest.raises(NotFound):
        delete_ref(model, "worst")
    delete_ref(model, "best")
    assert model.refs() == {}


def test_the_ref_of_a_fork_that_needs_it_stays(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    other = open_store(str(tmp_path / "other"))
    child, grandchild = ModelStore(source.store, "p", "child"), ModelStore(other, "p", "grandchild")
    fork_model(source, 1, child, "test", created_by="test")
    (name,) = source.refs()
    with pytest.raises(Conflict, match=r"keeps step 1 of p/m, of which p/child in .* reads 3 files.*--force"):
        delete_ref(source, name)
    fork_model(child, 0, grandchild, "test", created_by="test", copy=True)
    shutil.rmtree(path(source, "p/child"))
    delete_ref(source, name)
    assert source.refs() == {} and whole(grandchild) == []


def test_the_ref_of_a_fork_of_a_fork_and_of_copies(tmp_path: Path) -> None:
    source = make(tmp_path / "s")
    child, grandchild = ModelStore(source.store, "p", "child"), ModelStore(source.store, "p", "grandchild")
    fork_model(source, 1, child, "test", created_by="test")
    fork_model(child, 0, grandchild, "test", created_by="test")
    (name,) = source.refs()
    shutil.rmtree(path(source, "p/child"))
    with pytest.raises(Conflict, match="p/grandchild"):
        delete_ref(source, name)
    for ref in grandchild.manifest_at(0).files.values():
        copy_blob(source, grandchild, ref)
    delete_ref(source, name)
    with source.open_writer("clean") as writer:
        delete_checkpoints(writer)
        collect(writer, 0)
    assert whole(grandchild) == [] and weights(grandchild, 0) == b"weights 1"


def test_the_ref_of_a_fork_that_cannot_be_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "s")
    child = ModelStore(open_store(str(tmp_path / "disk")), "p", "child")
    with monkeypatch.context() as patch:
        patch.setattr(child, "open_writer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fork_model(source, 1, child, "test", created_by="test")
    (name,) = source.refs()
    with pytest.raises(Conflict, match="being made or was broken off"):
        delete_ref(source, name)
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    with pytest.raises(Conflict, match="a disk that is missing now"):
        delete_ref(fresh(source), name)
    delete_ref(fresh(source), name, force=True)
    source.create_record("refs/fork-old", Ref(manifest=source.steps()[1].key))
    with pytest.raises(Conflict, match="not known"):
        delete_ref(source, "fork-old")


def test_a_ref_that_comes_while_the_step_is_being_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "s")
    real = model.create_record

    def create(name: str, record: object) -> None:
        if name.startswith("deleted/00000001"):
            add_ref(fresh(model), "late", find_step(model, 1))
        real(name, record)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "create_record", create)
    with model.open_writer("clean") as writer:
        assert delete_checkpoints(writer) == [0, 2]
    assert weights(model, 1) == b"weights 1" and not fresh(model).steps()[1].deleted


def test_export(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    out = tmp_path / "deep" / "out"
    files = export_adapter(model, model.manifest_at(1), out)
    assert [f.name for f in files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == [f.name for f in files]
    assert files[1].read_bytes() == b"weights 1"
    with pytest.raises(Conflict, match="exists already"):
        export_adapter(model, model.manifest_at(2), out)
    path(model, model.blob_key(model.manifest_at(2).files["adapter/adapter_config.json"].sha256)).write_bytes(b"x")
    with pytest.raises(CorruptObject):
        export_adapter(model, model.manifest_at(2), tmp_path / "bad")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "s"]


def test_diff(tmp_path: Path) -> None:
    model = make(tmp_path / "s")
    diff = diff_steps((model, model.manifest_at(1)), (model, model.manifest_at(2)))
    assert [(d.name, d.a, d.b) for d in diff.config] == [("train.learning_rate", 0.1, 0.2)]
    assert [(d.name, d.a, d.b) for d in diff.metrics] == [("train/loss", -0.1, -0.2), ("val/reward", 0.1, 0.2)]
    assert not diff.same_files
