"""One model in a store: registering, committing, resuming, reading files, requests and history."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deaf_lease import DeafLease
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_workers import make_files

from art_sky.config import LoRAConfig
from art_sky.errors import (
    Conflict,
    CorruptObject,
    InvalidInput,
    InvalidName,
    LeaseLost,
    NoDiskSpace,
    NotFound,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
)
from art_sky.schemas import FileRef, Manifest, ModelRecord, TrainRequestRecord
from art_sky.store import open_store, writer
from art_sky.store.folder import FolderStore
from art_sky.store.model_store import ModelStore, list_models
from art_sky.store.writer import Writer


@pytest.fixture
def model(tmp_path: Path) -> ModelStore:
    return ModelStore(open_store(str(tmp_path / "s")), "p", "m")


def record(project: str = "p", name: str = "m", **values: Any) -> ModelRecord:
    return ModelRecord(
        project=project, name=name, base_model="b", lora=LoRAConfig(), created=1.0, created_by="t", **values
    )


def commit(
    writer: Writer, tmp_path: Path, step: int, request: str | None = None, text: str = "", **kw: Any
) -> Manifest:
    files = make_files(tmp_path / f"out{step}{text}", f"step {step}{text}")
    return writer.commit(step=step, request=request or f"r{step}", files=files, updates=1, **kw)


def reopened(model: ModelStore) -> ModelStore:
    return ModelStore(open_store(model.store.url), model.project, model.name)


# --- the model ---


def test_register_and_list(model: ModelStore) -> None:
    assert not model.exists() and list_models(model.store) == []
    with pytest.raises(NotFound, match="register it first"):
        model.record()
    made = record(config={"odd": "lone \ud800", "nested": [1, None]})
    model.create(made)
    assert model.exists() and reopened(model).record() == made
    model.create(made)
    with pytest.raises(Conflict, match="exists already"):
        model.create(record())
    ModelStore(model.store, "p", "other").create(record(name="other"))
    ModelStore(model.store, "a", "m").create(record(project="a"))
    assert list_models(model.store) == [("a", "m"), ("p", "m"), ("p", "other")]


def test_names_that_differ_in_case_and_hostile_names(model: ModelStore) -> None:
    model.create(record())
    with pytest.raises(Conflict, match="differs only in case from p/m"):
        ModelStore(model.store, "p", "M").create(record(name="M"))
    assert not ModelStore(model.store, "p", "M").exists()
    with pytest.raises(InvalidInput, match="the record is of p/x"):
        model.create(record(name="x"))
    before = [i.key for i in model.store.list("")]
    for name in ("../x", "a/b", "", "a" * 300, "con", "x\0"):
        with pytest.raises(InvalidName):
            ModelStore(model.store, "p", name)
        with pytest.raises(InvalidName):
            ModelStore(model.store, name, "m")
    assert [i.key for i in model.store.list("")] == before


def test_twins_registered_at_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def create(name: str) -> bool:
        try:
            ModelStore(store, "p", name).create(record(name=name))
        except Conflict:
            return False
        return True

    names = ["Agent", "agent", "AGENT", "aGent"]
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(create, names)) == 1
    assert len(list_models(store)) == 1


def test_newer_and_damaged_records_are_told_apart_from_absence(model: ModelStore) -> None:
    model.create(record())
    store, key = model.store, "p/m/model.json"
    good = json.loads(store.get(key).data)
    store.put(key, json.dumps({**good, "format": 2}).encode())
    with pytest.raises(StoreError, match="newer art-sky; upgrade"):
        model.record()
    store.put(key, json.dumps({**good, "a_new_field": 1}).encode())
    assert model.record().model_dump()["a_new_field"] == 1
    for junk in (b"", b"[]", b"{", b"{}", b"\xff", b"[" * 100_000):
        store.put(key, junk)
        with pytest.raises(CorruptObject, match=r"p/m/model.json.*cannot be read"):
            model.record()
    store.put("p/m/HEAD", b"")
    for call in (model.head, model.steps, lambda: model.find_committed("r"), lambda: model.open_writer("me")):
        with pytest.raises(CorruptObject, match="p/m/HEAD"):
            call()


# --- commits ---


def test_commit_and_read_back_without_a_server(model: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no step yet"):
        model.head()
    assert model.steps() == [] and model.find_committed("r0") is None
    batch = model.put_blob(b"batch")
    with model.open_writer("server") as w:
        assert w.head is None
        with pytest.raises(NotFound):
            model.head()  # the fence is not a step
        first = commit(w, tmp_path, 0)
        second = commit(
            w, tmp_path, 1, batch=batch, config={"lr": 0.1}, metrics={"loss": float("nan"), "kl": 1},
            versions={"torch": "2"},
        )  # fmt: skip
        skipped = w.commit(step=2, request="r2", files=second.files, updates=0, reason="no spread")
        assert w.head is not None and w.head.step == 2
    reader = reopened(model)
    head = reader.head()
    assert (head.step, head.generation, head.attempt) == (2, 1, 1)
    assert reader.manifest(head.manifest) == skipped
    assert [s.manifest for s in reader.steps()] == [first, second, skipped]
    assert next((s.key, s.deleted) for s in reader.steps()) == ("p/m/manifests/00000000-r0-1.json", False)
    assert second.parent == "p/m/manifests/00000000-r0-1.json" and second.metrics == {"loss": None, "kl": 1.0}
    assert (skipped.files, skipped.reason, skipped.updates) == (second.files, "no spread", 0)
    assert reader.manifest_at(1) == second and reader.find_committed("r1") == second
    with pytest.raises(NotFound, match="no step 3; its steps are 0 to 2"):
        reader.manifest_at(3)


def test_a_request_is_applied_once_and_steps_follow_each_other(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("server") as w:
        first = commit(w, tmp_path, 0)
        assert commit(w, tmp_path, 0, text="other") == first
        assert commit(w, tmp_path, 1, request="r0") == first
        for step in (0, 2):
            with pytest.raises(Conflict, match="does not follow"):
                commit(w, tmp_path, step, request="new")
    with reopened(model).open_writer("server 2") as w:
        assert commit(w, tmp_path, 1, request="r0") == first
        assert w.adopt("r0") == first
    assert len(model.steps()) == 1
    for request in ("", "a/b", "../x", "a.b", "x" * 65):
        with model.open_writer("s") as w, pytest.raises(InvalidInput):
            commit(w, tmp_path, 1, request=request or " ")


def test_files_that_are_not_stored_or_not_there(model: ModelStore, tmp_path: Path) -> None:
    gone = FileRef(sha256="0" * 64, size=1)
    with model.open_writer("s") as w:
        with pytest.raises(CorruptObject, match="store it first"):
            w.commit(step=0, request="r0", files={"a": gone}, updates=0)
        with pytest.raises(CorruptObject, match="store it first"):
            w.commit(step=0, request="r0", files={}, updates=0, batch=gone)
        with pytest.raises(StoreError, match="No such file"):
            w.commit(step=0, request="r0", files={"a": tmp_path / "none"}, updates=0)
        assert w.head is None
        commit(w, tmp_path, 0)
    assert model.head().step == 0


def test_one_writer_at_a_time_and_the_next_goes_on(model: ModelStore, tmp_path: Path) -> None:
    one = model.open_writer("server one")
    with pytest.raises(LeaseLost, match="server one"):
        reopened(model).open_writer("server two")
    commit(one, tmp_path, 0)
    nonce = model.head().nonce
    one.close()
    with pytest.raises(LeaseLost, match="released"):
        commit(one, tmp_path, 1)
    with reopened(model).open_writer("server two", wait_seconds=1) as two:
        head = model.head()
        assert (head.step, head.generation, two.generation) == (0, 2, 2) and head.nonce != nonce
        commit(two, tmp_path, 1)
    assert [s.manifest.generation for s in model.steps()] == [1, 2]


class Unleased(FolderStore):
    """A folder on which everybody gets every lease."""

    generations = 0

    def acquire(self, key: str, owner: str, wait_seconds: float = 0.0) -> DeafLease:  # type: ignore[override]
        Unleased.generations += 1
        return DeafLease(Unleased.generations)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_old_writer_that_noticed_nothing_is_fenced(tmp_path: Path, steps_before: int) -> None:
    model = ModelStore(Unleased(tmp_path / "s"), "p", "m")
    old = model.open_writer("old")
    for step in range(steps_before):
        commit(old, tmp_path, step)
    new = model.open_writer("new")
    with pytest.raises(LeaseLost, match="took over"):
        commit(old, tmp_path, steps_before, request="late", text="late")
    # The late manifest is whole and its parent is HEAD: for its own request the new writer may use it.
    adopted = new.adopt("late")
    assert adopted is not None and adopted.generation < new.generation
    with pytest.raises(LeaseLost, match="took over"):
        commit(old, tmp_path, steps_before, request="later")
    commit(new, tmp_path, steps_before + 1)
    assert [s.manifest.step for s in model.steps()] == list(range(steps_before + 2))


def test_generations_grow_even_when_the_lease_record_was_deleted(model: ModelStore, tmp_path: Path) -> None:
    for _ in range(3):
        model.open_writer("s").close()
    model.store.delete("p/m/leases/server")
    with model.open_writer("s") as w:
        assert w.generation == 4
        commit(w, tmp_path, 0)


def test_two_threads_commit_through_one_writer(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("s") as w, ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: commit(w, tmp_path, 0, request="same", text=str(n)), range(4)))
    assert all(m == made[0] for m in made) and len(model.steps()) == 1


class Faulty(FolderStore):
    """Fails writes of HEAD (and reads, where asked) as `plan` says: the error, and whether the write was made."""

    plan: list[tuple[StoreError, bool]]

    def swap(self, key: str, data: bytes, etag: str) -> str:
        if self.plan and key.endswith("HEAD"):
            error, made = self.plan.pop(0)
            if made:
                super().swap(key, data, etag)
            raise error
        return super().swap(key, data, etag)


@pytest.fixture
def faulty(tmp_path: Path) -> ModelStore:
    store = Faulty(tmp_path / "s")
    store.plan = []
    return ModelStore(store, "p", "m")


def plan(model: ModelStore, *steps: tuple[StoreError, bool]) -> None:
    assert isinstance(model.store, Faulty)
    model.store.plan = list(steps)


@pytest.mark.parametrize("error", [StoreError("reset"), PreconditionFailed("412 for a put that was retried")])
def test_a_lost_reply_is_read_back(faulty: ModelStore, tmp_path: Path, error: StoreError) -> None:
    faulty.open_writer("s").close()
    plan(faulty, (error, True))
    with faulty.open_writer("s") as w:  # the fence
        plan(faulty, (error, True))
        commit(w, tmp_path, 0)
        plan(faulty, (StoreError("timeout"), False), (error, True))
        commit(w, tmp_path, 1)
        commit(w, tmp_path, 2)
    assert [s.manifest.step for s in faulty.steps()] == [0, 1, 2]


def test_a_full_disk_leaves_head_and_the_same_commit_may_be_made_again(faulty: ModelStore, tmp_path: Path) -> None:
    with faulty.open_writer("s") as w:
        commit(w, tmp_path, 0)
        plan(faulty, (NoDiskSpace("full"), False))
        with pytest.raises(NoDiskSpace):
            commit(w, tmp_path, 1)
        assert faulty.head().step == 0
        # Trained again, with other bytes: the manifest that is there is whole and is applied.
        again = commit(w, tmp_path, 1, text="again")
        assert faulty.fetch_files(again, tmp_path / "x").joinpath("trainer/state.json").read_text()
        commit(w, tmp_path, 2)
    assert [s.manifest.request for s in faulty.steps()] == ["r0", "r1", "r2"]


def test_an_outcome_that_stays_unknown_is_said_and_settled_at_the_next_start(
    faulty: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SETTLE_SECONDS", 0.0)
    with faulty.open_writer("s") as w:
        commit(w, tmp_path, 0)
        plan(faulty, (StoreError("no answer"), False))
        for _ in range(2):
            with pytest.raises(StoreError, match=r"is unknown \(no answer\); restart the server"):
                commit(w, tmp_path, 1)
    with faulty.open_writer("s") as w:
        assert w.adopt("r1") is not None
    assert [s.manifest.request for s in faulty.steps()] == ["r0", "r1"]


def test_adopts_only_what_is_whole(faulty: ModelStore, tmp_path: Path) -> None:
    with faulty.open_writer("s") as w:
        commit(w, tmp_path, 0)
        plan(faulty, (NoDiskSpace("full"), False))
        with pytest.raises(NoDiskSpace):
            commit(w, tmp_path, 1, request="r")
    name = "p/m/manifests/00000001-r-1.json"
    manifest = faulty.manifest(name)
    blob = faulty.blob_key(manifest.files["trainer/state.json"].sha256)
    good = faulty.store.get(blob).data
    faulty.store.put(blob, good[:-1] + b"!")
    with reopened(faulty).open_writer("s") as w:
        assert w.adopt("r") is None and w.adopt("other") is None
        faulty.store.delete(blob)
        assert w.adopt("r") is None
        faulty.store.put(blob, good)
        record = faulty.store.get(name).data
        faulty.store.put(name, b"{")
        assert w.adopt("r") is None
        faulty.store.put(name, record)
        commit(w, tmp_path, 1, request="another")
        assert w.adopt("r") is None, "its parent is no longer HEAD"
    assert faulty.find_committed("r") is None


# --- files ---


def test_fetch_files(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("s") as w:
        manifest = commit(w, tmp_path, 0)
    folder = tmp_path / "cache" / "m@0"
    assert model.fetch_files(manifest, folder, prefix="adapter/") == folder
    assert [p.name for p in folder.iterdir()] == ["adapter"]
    model.fetch_files(manifest, folder)
    adapter = folder / "adapter" / "adapter_model.safetensors"
    assert adapter.read_bytes() == model.read_blob(manifest.files["adapter/adapter_model.safetensors"])
    inode = adapter.stat().st_ino
    model.fetch_files(manifest, folder)
    assert adapter.stat().st_ino == inode, "a complete folder is used again"
    adapter.write_bytes(b"truncated by a crash")
    model.fetch_files(manifest, folder)
    assert adapter.read_bytes() == model.read_blob(manifest.files["adapter/adapter_model.safetensors"])
    assert [p.name for p in folder.parent.iterdir()] == ["m@0"]


def test_fetch_by_many_threads_at_once(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("s") as w:
        manifest = commit(w, tmp_path, 0)
    barrier = threading.Barrier(8)

    def fetch(n: int) -> None:
        barrier.wait()
        model.fetch_files(manifest, tmp_path / "c", prefix="adapter/" if n % 2 else "")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, range(8)))
    assert (tmp_path / "c/adapter/adapter_model.safetensors").is_file()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_damaged_and_missing_blobs_are_named(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("s") as w:
        manifest = commit(w, tmp_path, 0)
    ref = manifest.files["trainer/state.json"]
    key = model.blob_key(ref.sha256)
    data = model.store.get(key).data
    for bad in (data[:-1], data + b"x", b"", bytes(len(data))):
        model.store.put(key, bad)
        for call in (lambda: model.fetch_files(manifest, tmp_path / "c"), lambda: model.read_blob(ref)):
            with pytest.raises(CorruptObject, match=f"blobs/{ref.sha256}"):
                call()
    model.store.delete(key)
    for call in (lambda: model.fetch_files(manifest, tmp_path / "c"), lambda: model.read_blob(ref)):
        with pytest.raises(ObjectNotFound, match=ref.sha256):
            call()
    assert not model.has_blob(ref.sha256)
    assert not (tmp_path / "c").exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_manifest_cannot_write_outside_the_folder(model: ModelStore, tmp_path: Path) -> None:
    ref = model.put_blob(b"x")
    for name in ("../evil", "/evil", "a/../../evil", "a\0"):
        bad = Manifest(step=0, parent=None, request="r", generation=1, created=0, updates=0, files={name: ref})
        with pytest.raises(InvalidInput):
            model.fetch_files(bad, tmp_path / "c" / "d")
    assert not (tmp_path / "c").exists()


def test_an_unwritable_cache_is_one_clear_line(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("s") as w:
        manifest = commit(w, tmp_path, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot unpack a checkpoint") as caught:
        model.fetch_files(manifest, tmp_path / "file" / "m@0")
    assert "\n" not in caught.value.message


# --- requests ---


def request(id: str, model: ModelStore, **config: Any) -> TrainRequestRecord:
    batch = model.put_blob(b"batch")
    return TrainRequestRecord(
        request=id,
        batch=batch,
        config=config,
        head_step=0,
        head_manifest="p/m/manifests/00000000-r0-1.json",
        created=1.0,
    )


def test_requests_and_attempts(model: ModelStore, tmp_path: Path) -> None:
    with model.open_writer("s") as w:
        commit(w, tmp_path, 0)
    made = request("a", model, lr=1.0)
    assert model.begin_request(made) == made
    retry = made.model_copy(update={"created": 9.0, "head_step": 3})
    assert model.begin_request(retry) == made
    for other in ({"lr": 2.0}, {"lr": 1.0, "x": True}, {"lr": True}):
        with pytest.raises(Conflict, match="use a new id"):
            model.begin_request(request("a", model, **other))
    with pytest.raises(Conflict):
        model.begin_request(made.model_copy(update={"batch": model.put_blob(b"other")}))
    with pytest.raises(InvalidInput):
        model.begin_request(request("a/b", model))
    model.begin_request(request("a-1", model))
    assert model.attempts("a") == [] and [r.request for r in model.pending_requests()] == ["a", "a-1"]

    first = model.begin_attempt("a", 1)
    assert (first.attempt, first.outcome) == (1, None)
    ended = model.end_attempt(first, "trainer_died", "signal 9")
    assert ended.ended is not None and model.end_attempt(first, "trainer_died", "again") == ended
    with pytest.raises(Conflict, match="ended as trainer_died"):
        model.end_attempt(first, "committed")
    assert [r.request for r in model.pending_requests()] == ["a", "a-1"]
    model.end_attempt(model.begin_attempt("a", 2), "failed", "no")
    assert [(a.attempt, a.outcome) for a in reopened(model).attempts("a")] == [(1, "trainer_died"), (2, "failed")]
    assert model.attempts("a-1") == [] and [r.request for r in model.pending_requests()] == ["a-1"]
    with model.open_writer("s") as w:
        commit(w, tmp_path, 1, request="a-1")
    assert model.pending_requests() == []


# --- history, trajectories, state ---


def test_history_rows_merge_and_never_double(model: ModelStore) -> None:
    model.log_row(1, 2, "train", {"reward": 0.5, "loss": float("nan"), "big": 10**400})
    once = model.history()
    model.log_row(1, 2, "train", {"reward": 0.5})
    model.log_row(1, 2, "train", {})
    assert model.history() == once
    model.log_row(1, 2, "train", {"loss": 0.25, "kl": float("-inf")})
    model.log_row(1, 10, "train", {"reward": 1})
    model.log_row(2, 2, "train", {"reward": 2})
    model.log_row(1, 2, "val", {"reward": 3})
    rows = reopened(model).history()
    assert [(r.step, r.attempt, r.split) for r in rows] == [
        (2, 1, "train"),
        (2, 1, "val"),
        (2, 2, "train"),
        (10, 1, "train"),
    ]
    assert rows[0].metrics == {"reward": 0.5, "loss": 0.25, "big": None, "kl": None}
    assert rows[0].model_dump()["nonfinite"] == 2


def test_rows_merge_what_threads_log_at_once(model: ModelStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: reopened(model).log_row(1, 0, "val", {f"m{n}": n}), range(24)))
    (row,) = model.history()
    assert row.metrics == {f"m{n}": float(n) for n in range(24)}


@pytest.mark.parametrize("name", ["", " x", "x ", "a\nb", "x" * 201, "\ud800", "tab\t", "\x00"])
def test_bad_metric_names(model: ModelStore, name: str) -> None:
    with pytest.raises(InvalidInput, match="metric name"):
        model.log_row(1, 0, "val", {name: 1.0})
    assert model.history() == []


@pytest.mark.parametrize(
    ("split", "step", "attempt"), [("Val", 0, 1), ("../x", 0, 1), ("", 0, 1), ("val", -1, 1), ("val", 0, 0)]
)
def test_bad_rows(model: ModelStore, split: str, step: int, attempt: int) -> None:
    with pytest.raises(InvalidInput):
        model.log_row(attempt, step, split, {"x": 1.0})
    with pytest.raises(InvalidInput):
        model.write_trajectories(split, step, attempt, b"")
    for value in ("1", [1], 1j):
        with pytest.raises(InvalidInput, match="not a number"):
            model.log_row(1, 0, "val", {"x": value})
    assert list(model.store.list("")) == []


_numbers = itertools.count()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8),
            st.floats() | st.integers() | st.none() | st.booleans(),
        ),
        max_size=5,
    )
)
def test_any_metrics_merge_as_dicts_do(model: ModelStore, logs: list[dict[str, Any]]) -> None:
    log = ModelStore(model.store, "p", f"m{next(_numbers)}")
    expected: dict[str, float | None] = {}
    for metrics in logs:
        row = log.log_row(1, 3, "train", metrics)
        for name, value in metrics.items():
            finite = value is not None and abs(float(value)) < float("inf")
            expected[name] = float(value) if finite else None
        assert row.metrics == expected
    assert [r.metrics for r in log.history()] == ([expected] if logs else [])


def test_trajectories_are_never_overwritten(model: ModelStore) -> None:
    keys = [model.write_trajectories("val", 3, 1, data) for data in (b"one", b"one", b"two", b"six", b"two")]
    slot = "p/m/trajectories/val/00000003-0001"
    assert keys == [
        f"{slot}.jsonl.zst",
        f"{slot}.jsonl.zst",
        f"{slot}-2.jsonl.zst",
        f"{slot}-3.jsonl.zst",
        f"{slot}-2.jsonl.zst",
    ]
    assert [model.store.get(k).data for k in keys] == [b"one", b"one", b"two", b"six", b"two"]


def test_state(model: ModelStore) -> None:
    assert model.read_state() is None
    assert model.merge_state({"cursor": 1, "odd": "\ud800"}) == {"cursor": 1, "odd": "\ud800"}
    model.merge_state({"cursor": True, "seen": [1]})
    assert reopened(model).read_state() == {"cursor": True, "odd": "\ud800", "seen": [1]}
    assert model.read_state()["cursor"] is True  # type: ignore[index]
    assert model.overwrite_state({}) == {} and model.read_state() == {}
    for bad in ({"x": float("nan")}, {"x": object()}, {"x": b"bytes"}):
        with pytest.raises(InvalidInput, match="plain, finite"):
            model.merge_state(bad)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: model.merge_state({str(n): n}), range(18)))
    assert model.read_state() == {str(n): n for n in range(18)}


def test_read_only_reader(model: ModelStore, tmp_path: Path) -> None:
    """A reader of a committed run leaves no trace in it."""
    model.create(record())
    with model.open_writer("s") as w:
        manifest = commit(w, tmp_path, 0)
    model.log_row(1, 0, "val", {"reward": 1.0})
    before = {i.key: i.etag for i in model.store.list("")}
    files = sorted(str(p) for p in Path(tmp_path / "s").rglob("*"))
    reader = reopened(model)
    reader.record(), reader.head(), reader.steps(), reader.history(), reader.read_state(), reader.pending_requests()
    reader.fetch_files(manifest, tmp_path / "c")
    assert {i.key: i.etag for i in model.store.list("")} == before
    assert sorted(str(p) for p in Path(tmp_path / "s").rglob("*")) == files
