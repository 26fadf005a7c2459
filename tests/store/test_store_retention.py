"""Which checkpoints `delete_checkpoints` keeps, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_workers import make_files

from art_sky.errors import CorruptObject, InvalidInput, LeaseLost, NotFound
from art_sky.schemas import HistoryRow, TrainRequestRecord
from art_sky.store import open_store, retention
from art_sky.store.model_store import ModelStore
from art_sky.store.retention import best_step, delete_checkpoints
from art_sky.store.writer import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with ModelStore(open_store(str(tmp_path / "s")), "p", "m").open_writer("s") as writer:
        yield writer


def commit_steps(writer: Writer, tmp_path: Path, steps: range, skipped: tuple[int, ...] = ()) -> None:
    for step in steps:
        if step in skipped:
            parent = writer.model.manifest_at(step - 1).files
            writer.commit(step=step, request=f"r{step}", files=parent, updates=0, reason="no spread")
        else:
            files = make_files(tmp_path / f"out{step}", f"step {step}")
            writer.commit(step=step, request=f"r{step}", files=files, updates=1)


def with_files(model: ModelStore, tmp_path: Path) -> list[int]:
    """The steps whose files can be fetched; each of the others says that it was deleted."""
    found = []
    for step in model.steps():
        number = step.manifest.step
        try:
            model.fetch_files(step.manifest, tmp_path / "fetched" / f"{number}")
            found.append(number)
            assert not step.deleted
        except NotFound as e:
            assert f"step {number}" in e.message and "deleted by delete_checkpoints" in e.message
            assert step.deleted
    return found


def blobs(model: ModelStore) -> set[str]:
    return {i.key.rpartition("/")[2] for i in model.store.list("p/m/blobs/")}


def test_keeps_newest_and_best(writer: Writer, tmp_path: Path) -> None:
    model = writer.model
    commit_steps(writer, tmp_path, range(6))
    for step, reward in enumerate([0.1, 0.5, 0.9, 0.3, 0.2, 0.4]):
        model.log_row(1, step, "val", {"reward": reward})
    assert delete_checkpoints(writer) == [0, 1, 3, 4]
    assert with_files(model, tmp_path) == [2, 5]
    assert [s.manifest.step for s in model.steps()] == list(range(6))
    kept = {r.sha256 for step in (2, 5) for r in model.manifest_at(step).files.values()}
    assert blobs(model) == kept
    assert delete_checkpoints(writer) == [] and with_files(model, tmp_path) == [2, 5]
    commit_steps(writer, tmp_path, range(6, 8))
    assert delete_checkpoints(writer) == [5, 6] and with_files(model, tmp_path) == [2, 7]
    assert len(model.history()) == 6


def test_a_locally_cached_deleted_step_is_deleted_too(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(3))
    writer.model.fetch_files(writer.model.manifest_at(0), tmp_path / "c")
    writer.model.log_row(1, 1, "val", {"reward": 1})
    delete_checkpoints(writer)
    with pytest.raises(NotFound):
        writer.model.fetch_files(writer.model.manifest_at(0), tmp_path / "c")


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ({0: 0.5, 3: float("nan"), 4: 0.1}, 0),  # NaN is no reward
        ({1: 0.7, 3: 0.7}, 3),  # of equals the newest
        ({2: -1.0}, 2),  # appeared late
        ({0: float("inf"), 1: -5.0}, 1),
        ({0: -3.0, 4: -4.0, 99: 100.0, 5: None}, 0),  # 99 is no step
    ],
)
def test_best_is_decided_from_history(
    writer: Writer, tmp_path: Path, rewards: dict[int, float | None], best: int
) -> None:
    commit_steps(writer, tmp_path, range(6))
    for step, reward in rewards.items():
        writer.model.log_row(1, step, "val", {"reward": reward, "noise": 1000.0 - step})
        writer.model.log_row(1, step, "train", {"reward": 1000.0 - step})
    deleted = delete_checkpoints(writer)
    assert deleted == [s for s in range(5) if s != best]
    assert with_files(writer.model, tmp_path) == sorted({best, 5})


def test_metrics_with_slashes_and_other_splits(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(4))
    for step, value in enumerate([3.0, 9.0, 1.0, 2.0]):
        writer.model.log_row(1, step, "test_set", {"score/hard": value})
    assert delete_checkpoints(writer, "test_set/score/hard") == [0, 2]


def test_the_last_attempt_of_a_step_counts(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(4))
    for attempt, step, value in [(1, 1, 9.0), (2, 1, 0.0), (1, 2, 1.0)]:
        writer.model.log_row(attempt, step, "val", {"reward": value})
    assert delete_checkpoints(writer) == [0, 1]


def test_an_unknown_metric_deletes_nothing_and_names_the_known_ones(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(4))
    with pytest.raises(InvalidInput, match="known metrics: none was logged yet"):
        delete_checkpoints(writer)
    writer.model.log_row(1, 0, "train", {"reward": 1.0, "loss": None})
    writer.model.log_row(1, 1, "val", {"reward": float("nan")})
    for metric in ("val/reward", "reward", "val/", "/reward", "", "val"):
        with pytest.raises(InvalidInput, match=r"so nothing was deleted; known metrics: train/reward$"):
            delete_checkpoints(writer, metric)
    assert with_files(writer.model, tmp_path) == [0, 1, 2, 3]
    assert not list(writer.model.store.list("p/m/deleted/"))


def test_best_among_those_that_still_have_files(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(4))
    writer.model.log_row(1, 0, "val", {"reward": 9.0, "other": 0.0})
    writer.model.log_row(1, 1, "val", {"reward": 1.0, "other": 5.0})
    assert delete_checkpoints(writer, "val/other") == [0, 2]
    commit_steps(writer, tmp_path, range(4, 6))
    assert delete_checkpoints(writer, "val/reward") == [3, 4]
    assert with_files(writer.model, tmp_path) == [1, 5]


def test_nothing_to_delete(writer: Writer, tmp_path: Path) -> None:
    assert delete_checkpoints(writer) == []
    commit_steps(writer, tmp_path, range(1))
    writer.model.log_row(1, 0, "val", {"reward": 0.0})
    assert delete_checkpoints(writer) == [] and with_files(writer.model, tmp_path) == [0]


def test_skipped_steps_share_blobs_that_stay_while_one_needs_them(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(6), skipped=(2, 5))
    for step in range(6):
        writer.model.log_row(1, step, "val", {"reward": 1.0 if step == 2 else 0.0})
    assert delete_checkpoints(writer) == [0, 1, 3, 4]
    assert with_files(writer.model, tmp_path) == [2, 5], "their blobs were first put by steps 1 and 4"


def test_refs_batches_and_pending_requests_are_kept(writer: Writer, tmp_path: Path) -> None:
    model = writer.model
    commit_steps(writer, tmp_path, range(5))
    keys = [s.key for s in model.steps()]
    model.store.create("p/m/refs/good one", json.dumps({"manifest": keys[1]}).encode())
    batch = model.put_blob(b"waiting")
    pending = TrainRequestRecord(request="w", batch=batch, config={}, head_step=3, head_manifest=keys[3], created=1.0)
    model.begin_request(pending)
    same_bytes = model.put_blob((tmp_path / "out0/trainer/state.json").read_bytes())
    model.begin_request(pending.model_copy(update={"request": "w2", "batch": same_bytes}))
    model.log_row(1, 4, "val", {"reward": 1})
    assert model.refs() == {"good one": keys[1]}
    assert delete_checkpoints(writer) == [0, 2, 3]
    assert with_files(model, tmp_path) == [1, 4]
    assert model.read_blob(batch) == b"waiting" and model.has_blob(same_bytes.sha256)
    assert all(model.has_blob(ref.sha256) for ref in model.manifest_at(3).files.values())


def test_a_damaged_ref_stops_it_before_anything_is_deleted(writer: Writer, tmp_path: Path) -> None:
    commit_steps(writer, tmp_path, range(3))
    writer.model.log_row(1, 2, "val", {"reward": 1})
    for junk in (b"{", b'{"manifest": "p/m/manifests/gone.json"}'):
        writer.model.store.put("p/m/refs/x", junk)
        with pytest.raises(CorruptObject):
            delete_checkpoints(writer)
    assert with_files(writer.model, tmp_path) == [0, 1, 2]


def test_killed_in_the_middle_it_goes_on_the_next_time(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = writer.model
    commit_steps(writer, tmp_path, range(4))
    model.log_row(1, 3, "val", {"reward": 1})
    real, calls = model.store.delete, iter(range(3))

    def delete(key: str) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(key)

    with monkeypatch.context() as patch:
        patch.setattr(model.store, "delete", delete)
        with pytest.raises(KeyboardInterrupt):
            delete_checkpoints(writer)
    assert with_files(model, tmp_path) == [3]
    assert len(blobs(model)) == 2 * 4 - 2
    assert delete_checkpoints(writer) == []
    assert len(blobs(model)) == 2


def test_needs_the_lease_before_every_delete(writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_steps(writer, tmp_path, range(3))
    writer.model.log_row(1, 2, "val", {"reward": 1})
    mark = retention._mark

    def mark_and_lose(*args: object) -> None:
        mark(*args)  # type: ignore[arg-type]
        writer.close()

    monkeypatch.setattr(retention, "_mark", mark_and_lose)
    with pytest.raises(LeaseLost):
        delete_checkpoints(writer)
    assert len(blobs(writer.model)) == 6


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 3), st.integers(0, 8), st.sampled_from(["val", "train"])),
        st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-2, 2)),
    ),
    st.sets(st.integers(0, 8), min_size=1),
)
def test_best_step_is_the_newest_of_the_highest(
    logged: dict[tuple[int, int, str], float | None], steps: set[int]
) -> None:
    rows = [
        HistoryRow(attempt=a, step=s, split=split, time=0, metrics={"reward": v}) for (a, s, split), v in logged.items()
    ]
    values = {}
    for step in steps:
        attempts = [a for a, s, split in logged if (s, split) == (step, "val")]
        value = logged[max(attempts), step, "val"] if attempts else None
        if value is not None and abs(value) < float("inf"):
            values[step] = value
    if not values:
        with pytest.raises(InvalidInput):
            best_step(rows, steps, "val/reward")
        return
    best = best_step(rows, steps, "val/reward")
    assert values[best] == max(values.values())
    assert all(s <= best for s, v in values.items() if v == values[best])
