"""push, pull, fork, gc, verify, check, export, tag and diff from the command line."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from cli_store import make_model, run

from art_sky.cli.output import size
from art_sky.node.records import LedgerEntry, ledger_key
from art_sky.store import open_store
from art_sky.store.batches import encode_batch
from art_sky.store.model_store import ModelStore


@pytest.fixture(autouse=True)
def agent(here: None, tmp_path: Path) -> None:
    make_model(tmp_path / ".art-sky", "proj", "agent", 3)


def document(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run(*args, "--json") == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_push_and_pull(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("push", "agent", "--to", "bucket") == 0
    out = capsys.readouterr().out
    assert "proj/agent in file://" in out and "at step 3: copied 1 blobs (2 B)" in out
    assert run("push", "agent", "--to", "bucket") == 0
    assert "Nothing new" in capsys.readouterr().out
    pulled = document(capsys, "pull", "agent", "--from", "bucket", "--store", "elsewhere")
    assert pulled["step"] == 3 and pulled["blobs"] == 1 and not pulled["unchanged"]
    assert run("steps", "agent", "--store", "elsewhere") == 0
    assert "0.75" in capsys.readouterr().out
    assert run("pull", "agent@1", "--from", "bucket") == 2
    assert "without a step" in capsys.readouterr().err
    assert run("pull", "agnet", "--from", "bucket") == 1
    assert "did you mean 'agent'?" in capsys.readouterr().err
    assert run("push", "agent") == 2
    assert "--to" in capsys.readouterr().err


def test_bytes_and_rate_on_a_terminal_and_nothing_on_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("push", "agent", "--to", "one") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("COLUMNS", "120")
    assert run("push", "agent", "--to", "two", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["step"] == 3
    assert "push proj/agent" in said.err and "bytes" in said.err


def test_pull_into_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelStore(open_store(str(tmp_path / ".art-sky")), "proj", "agent")
    for split, step in (("train", 1), ("train", 2), ("val", 2)):
        groups = [{"trajectories": [{"messages_and_choices": [], "reward": step / 10, "metrics": {split: 1}}] * 2}]
        model.write_trajectories(split, step, 1, encode_batch(groups))
    assert run("pull", "agent", "--format", "parquet", "--to", "tables", "--from", ".art-sky") == 0
    out = capsys.readouterr().out
    assert "train.parquet: 4 trajectories of 2 steps (1 to 2)" in out and "val.parquet: 2 trajectories" in out
    train = pl.read_parquet(tmp_path / "tables" / "train.parquet")
    assert train["step"].to_list() == [1, 1, 2, 2] and train["reward"].to_list() == [0.1, 0.1, 0.2, 0.2]
    assert "metric_train" in train.columns and "metric_val" not in train.columns
    parquet = ("pull", "agent", "--format", "parquet", "--to", "some")
    found = document(capsys, *parquet, "--split", "train", "--steps", "2-7")
    assert found["files"] == [{"file": "some/train.parquet", "split": "train", "rows": 2, "steps": [2]}]
    assert [p.name for p in (tmp_path / "some").iterdir()] == ["train.parquet"]
    assert document(capsys, *parquet, "--steps", "1")["files"][0]["rows"] == 2
    assert run(*parquet, "--split", "test") == 1
    assert "it has: train of steps 1 to 2, val of steps 2 to 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--format", "parquet"], "--to FOLDER"),
        (["--format", "parquet", "--to", "x", "--from", "a", "--store", "b"], "not two of them"),
        (["--format", "parquet", "--to", "x", "--steps", "3-"], "is not one step"),
        (["--format", "arrow"], "is not one of"),
        (["--from", "a", "--split", "val"], "--split is for --format parquet"),
        ([], "--from URL"),
    ],
)
def test_pull_options_that_do_not_fit(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "agent", *args) == 2
    assert message in capsys.readouterr().err


def test_parquet_without_polars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    assert run("pull", "agent", "--format", "parquet", "--to", "tables") == 1
    assert "pip install 'art-sky[data]'" in capsys.readouterr().err


def test_fork(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fork", "agent@1", "child") == 0
    assert "proj/child in file://" in (out := capsys.readouterr().out) and "no bytes were copied" in out
    made = document(capsys, "fork", "agent", "other/child", "--to", "bucket", "--copy")
    assert made["model"] == "other/child" and made["copied"] and made["copied_because"] == "it was asked for"
    assert run("steps", "proj/child") == 0
    assert "forked from proj/agent@1" in capsys.readouterr().out
    assert run("fork", "agent", "child") == 1
    assert "exists already" in capsys.readouterr().err
    assert run("fork", "agent@x", "child2") == 1
    assert "a step is a number" in capsys.readouterr().err
    assert run("fork", "agent", "../child") == 1
    assert "not a valid name" in capsys.readouterr().err


def test_gc_is_a_dry_run_until_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blob = tmp_path / ".art-sky" / "proj" / "agent" / "blobs" / ("0" * 64)
    blob.write_bytes(b"12345")
    assert run("gc") == 0
    assert "Nothing was changed" not in capsys.readouterr().out, "it is younger than the grace period"
    assert run("gc", "--grace-hours", "0") == 0
    assert "Nothing was changed. Delete it with --delete." in capsys.readouterr().out
    dry = document(capsys, "gc", "agent", "--grace-hours", "0")
    assert not dry["deleted"] and dry["models"][0]["bytes"] == 5 and blob.exists()
    done = document(capsys, "gc", "agent", "--grace-hours", "0", "--delete")
    assert done["models"][0]["objects"] == dry["models"][0]["objects"] and not blob.exists()
    assert run("verify", "agent") == 0


def test_gc_tells_what_old_clusters_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(str(tmp_path / ".art-sky"))
    entry = LedgerEntry(
        "artsky-00000001", "artsky-00000001-1", "i-1", "aws", "us-east-1", "p5.4xlarge", False, 6.0, 0.0, 7200.0, 3600.0
    )
    key = ledger_key(entry.cluster, entry.node)
    store.put(key, json.dumps(dataclasses.asdict(entry)).encode())
    assert document(capsys, "gc")["clusters"] == []  # it was written a moment ago
    assert document(capsys, "gc", "agent", "--logs-days", "0")["clusters"] == []
    found = document(capsys, "gc", "--logs-days", "0")["clusters"]
    assert [(c["cluster"], c["dollars"]) for c in found] == [(entry.cluster, {entry.node: 6.0})]
    assert run("gc", "--logs-days", "0") == 0
    out = capsys.readouterr().out
    assert entry.cluster in out and "Nothing was changed" in out and store.get(key)
    assert run("gc", "--logs-days", "0", "--delete") == 0
    assert [info.key for info in store.list("_clusters/")] == ["_clusters/artsky-00000001/total.json"]


def test_verify_and_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("push", "agent", "--to", "bucket") == 0
    assert run("verify", "agent") == 0
    assert "all whole" in capsys.readouterr().out
    for blob in (tmp_path / ".art-sky" / "proj" / "agent" / "blobs").iterdir():
        blob.write_bytes(b"[]")
    assert run("verify", "agent") == 1
    out = capsys.readouterr().out
    assert "damaged: proj/agent/blobs/" in out and "steps 0, 1, 2, 3" in out and "art-sky repair" in out
    report = document(capsys, "verify", "agent", code=1)
    assert [d["problem"] for d in report["damages"]] == ["damaged"]
    assert document(capsys, "repair", "agent", "--from", "empty", "--apply", code=1)["repairs"] == []
    assert run("repair", "agent", "--from", "bucket") == 1
    assert "Nothing was changed. Mend it with --apply." in (out := capsys.readouterr().out) and "copy it from" in out
    (tmp_path / ".art-sky" / "proj" / "agent" / "HEAD").unlink()
    done = document(capsys, "repair", "agent", "--from", "bucket", "--apply")
    assert [r["key"].split("/")[2] for r in done["repairs"]] == ["HEAD", "blobs"] and done["damages"] == []
    assert run("repair", "agent") == 0
    assert "is whole" in capsys.readouterr().out


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "bucket") == 0
    out = capsys.readouterr().out
    assert "training: safe" in out and "a stale swap is refused" in out
    assert document(capsys, "check")["safe_to_train"]
    (tmp_path / "file").write_text("x")
    assert run("check", "file") == 1
    assert "is not a folder" in capsys.readouterr().err


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "agent@1", "out") == 0
    assert "its base model is tiny" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_config.json").read_text() == "{}"
    assert run("export", "agent@1", "out") == 1
    assert "exists already" in capsys.readouterr().err
    assert document(capsys, "export", "agent", "newest")["step"] == 3


def test_tag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tag", "agent@1", "good") == 0
    assert "good is proj/agent@1" in capsys.readouterr().out
    assert document(capsys, "tag", "agent", "newest")["step"] == 3
    assert [s["tags"] for s in document(capsys, "steps", "agent")["steps"]] == [[], ["good"], [], ["newest"]]
    assert run("steps", "agent") == 0
    assert "good" in capsys.readouterr().out
    assert run("tag", "agent@2", "good") == 1
    assert "is step 1 already" in capsys.readouterr().err
    assert run("tag", "agent@9", "x") == 1
    assert "no step 9; its steps are 0 to 3" in capsys.readouterr().err
    assert run("tag", "agent", "fork-x") == 2
    assert run("tag", "agent", "good", "--delete") == 0
    assert run("tag", "agent", "good", "--delete") == 1
    assert "has no tag 'good'" in capsys.readouterr().err


def test_tag_of_a_fork(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fork", "agent@1", "child") == 0
    (name,) = document(capsys, "steps", "proj/agent")["steps"][1]["tags"]
    assert run("tag", "proj/agent", name, "--delete") == 1
    assert "proj/child in file://" in capsys.readouterr().err
    assert run("tag", "proj/agent", name, "--force") == 2
    assert run("tag", "proj/agent", name, "--delete", "--force") == 0
    assert document(capsys, "steps", "proj/agent")["steps"][1]["tags"] == []


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", "agent@1", "agent") == 0
    out = capsys.readouterr().out
    assert "proj/agent@1" in out and "proj/agent@3" in out and "0.75" in out and "The settings are the same" in out
    found = document(capsys, "diff", "agent@0", "agent@1")
    assert {"name": "train/reward", "a": 0.0, "b": 0.1} in found["metrics"] and found["same_files"]


def test_size() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536 << 20, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB"]
