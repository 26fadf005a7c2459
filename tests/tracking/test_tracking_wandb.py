"""The real wandb client: offline, with its file read back, and against a stand-in for the service."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from fake_wandb import FakeWandb, OfflineRun, offline_runs

from art_sky.tracking import start
from art_sky.tracking.wandb import WandbTracker, choose_mode

SECRET = "s3cr3t-value-that-nobody-may-see"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    wandb.teardown()  # it remembers folder and address of its first run


@pytest.fixture
def service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setenv("WANDB_BASE_URL", fake.url)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    yield fake
    fake.close()


def points(run: OfflineRun, key: str) -> list[tuple[int, float]]:
    return [(row["training_step"], row[key]) for row in run.rows if key in row]


def test_offline_run_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", ["agent.py", "--password", SECRET])
    config = {"base_model": "b", "api_key": "plain", "note": f"use {SECRET}", "train": {"max_tokens": 8}}
    tracker = WandbTracker("proj", "agent", config, "offline")
    for step in range(1, 4):
        tracker.log(1, step, "train", {"reward": step / 10, "loss": -0.1, "kl": 0.0, "tokens_per_second": 50.0})
    tracker.log(1, 0, "val", {"reward": 0.05})  # late
    tracker.log(1, 3, "train", {"reward": 0.3, "ratio_p95": 1.5, "grad_norm": None, "entropy": float("nan")})
    tracker.finish()

    (run,) = offline_runs(folder)
    assert (run.id, run.project) == ("agent-1", "proj")
    assert run.config["base_model"] == "b" and run.config["train"] == {"max_tokens": 8}
    assert run.config["api_key"] == "(redacted)" and run.config["note"] == "use (redacted)"
    assert SECRET.encode() not in run.raw, "neither from the configuration nor from the command line"
    assert run.axes["train/*"] == run.axes["val/*"] == run.axes["*"] == "training_step"
    assert points(run, "train/reward") == [(1, 0.1), (2, 0.2), (3, 0.3)], "logged twice, shown once"
    assert points(run, "train/ratio_p95") == [(3, 1.5)], "what the second log added"
    assert points(run, "val/reward") == [(0, 0.05)]
    assert points(run, "train/loss") and points(run, "train/kl") and points(run, "train/tokens_per_second")
    assert not any("train/grad_norm" in row or "train/entropy" in row for row in run.rows)


def test_another_process_goes_on_under_the_same_id(folder: Path) -> None:
    first = WandbTracker("proj", "agent", {}, "offline")
    first.log(1, 1, "train", {"reward": 0.1})
    first.finish()
    second = WandbTracker("proj", "agent", {}, "offline")
    second.log(1, 1, "train", {"reward": 0.1})
    second.log(1, 2, "train", {"reward": 0.2})
    second.log(2, 2, "train", {"reward": 0.4})  # after a rewind
    second.finish()
    runs = offline_runs(folder)
    assert sorted(run.id for run in runs) == ["agent-1", "agent-1", "agent-2"]
    assert sorted(p for run in runs if run.id == "agent-1" for p in points(run, "train/reward")) == [(1, 0.1), (2, 0.2)]


def test_a_line_that_a_crash_cut_off_hides_no_other(folder: Path) -> None:
    first = WandbTracker("proj", "agent", {}, "offline")
    first.log(1, 1, "train", {"reward": 0.1})
    first.finish()
    sent = folder / "home" / "tracking" / "wandb" / "proj" / "agent.jsonl"
    with sent.open("a") as file:
        file.write("\n[1, 2, ")
    second = WandbTracker("proj", "agent", {}, "offline")
    second.log(1, 3, "train", {"reward": 0.3})
    second.finish()
    third = WandbTracker("proj", "agent", {}, "offline")
    third.log(1, 1, "train", {"reward": 0.1})
    third.log(1, 3, "train", {"reward": 0.3})
    third.finish()
    assert len(offline_runs(folder)) == 2, "the third had nothing to say"


def test_online_and_resumed(service: FakeWandb) -> None:
    tracking = start("proj", "agent", {"base_model": "b", "token": SECRET})
    assert tracking is not None, "WANDB_API_KEY is in the environment"
    for step in range(1, 4):
        tracking.log(1, step, "train", {"reward": step / 10})
    tracking.finish()
    # A second process is given the whole history, of which it shows what is missing.
    rows = [(1, step, "train", {"reward": step / 10}) for step in range(1, 6)]
    again = start("proj", "agent", {"base_model": "b"}, history=rows)
    assert again is not None
    again.finish()
    shown = [(row["training_step"], row["train/reward"]) for row in service.rows["agent-1"]]
    assert shown == [(step, step / 10) for step in range(1, 6)]
    assert service.complete == ["agent-1", "agent-1"]
    assert service.configs["agent-1"]["base_model"]["value"] == "b"
    assert not any(SECRET.encode() in body for body in service.bodies)


def test_offline_runs_of_two_processes_upload_without_loss(
    service: FakeWandb, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in ((1, 2), (3, 4)):
        tracker = WandbTracker("proj", "agent", {}, "offline")
        for step in steps:
            tracker.log(1, step, "train", {"reward": step / 10})
        tracker.finish()
    folders = sorted(str(f) for f in folder.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    for one in folders:
        subprocess.run([sys.executable, "-m", "wandb", "sync", one], check=True, capture_output=True, timeout=60)
    assert [row["training_step"] for row in service.rows["agent-1"]] == [1, 2, 3, 4]


def test_mode(
    folder: Path, service: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "art_sky.tracking"):
        assert choose_mode() == "offline"
        monkeypatch.delenv("WANDB_API_KEY")
        assert choose_mode() == "offline"
    assert ["no answer from" in r.getMessage() for r in caplog.records] == [True, False]
    assert "WANDB_API_KEY" in caplog.records[1].getMessage()
    (folder / "no-netrc").write_text("machine 127.0.0.1 login user password " + "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", service.url)
    assert choose_mode() == "online", "`wandb login` keeps the key in .netrc"


def test_a_service_that_refuses_is_answered_by_going_offline(
    folder: Path, service: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    tracking = start("proj", "agent", {}, "wandb")
    assert tracking is not None
    tracking.log(1, 1, "train", {"reward": 0.1})
    tracking.finish()
    (run,) = offline_runs(folder)
    assert points(run, "train/reward") == [(1, 0.1)]
