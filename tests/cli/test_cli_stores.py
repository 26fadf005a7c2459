"""models and steps, read from a store without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_store import make_model, run

from art_sky.store.folder import FolderStore
from art_sky.store.protocol import StoredObject

pytestmark = pytest.mark.usefixtures("here")


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / ".art-sky", "proj", "agent", 3)
    assert run("models") == 0
    out = capsys.readouterr().out
    assert "proj/agent" in out and "tiny" in out and re.search(r"\d+s ago", out)
    assert run("models", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["store"] == f"file://{tmp_path}/.art-sky"
    assert [(m["name"], m["step"]) for m in document["models"]] == [("agent", 3)]


def test_many_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All are shown, in their order; finding one by its name reads none of the others."""
    for n in range(12):
        make_model(tmp_path / "runs", "proj", f"agent-{n:02d}", 0)
    assert run("models", "--store", "runs", "--json") == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)["models"]] == [f"agent-{n:02d}" for n in range(12)]
    read: list[str] = []
    original = FolderStore.get

    def watched(self: FolderStore, key: str) -> StoredObject:
        read.append(key)
        return original(self, key)

    monkeypatch.setattr(FolderStore, "get", watched)
    for name in ("agent-07", "proj/agent-07"):
        assert run("steps", name, "--store", "runs") == 0
    assert {key.split("/")[1] for key in read if not key.startswith(".models")} == {"agent-07"}
    assert {key for key in read if key.startswith(".models")} == {".models/proj/agent-07.json"}
    assert run("steps", "AGENT-07", "--store", "runs") == 1
    assert "there is no model 'AGENT-07'" in capsys.readouterr().err


def test_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--store", "empty") == 0
    assert "No model is in" in capsys.readouterr().out
    assert not (tmp_path / "empty").exists(), "reading creates nothing"
    assert run("models", "--store", "empty", "--json") == 0
    assert json.loads(capsys.readouterr().out)["models"] == []


def test_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "runs", "proj", "agent", 3)
    assert run("steps", "agent", "--store", "runs") == 0
    out = capsys.readouterr().out
    assert "skipped: no group had a spread" in out and "120" in out and "0.75" in out
    assert run("steps", "proj/agent", "--store", "runs", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["head"]["step"] == 3
    assert [(s["step"], s["updates"], s["reward"]) for s in document["steps"]] == [
        (0, 0, 0.0), (1, 1, 0.1), (2, 0, 0.2), (3, 1, 0.3),
    ]  # fmt: skip
    assert document["steps"][3]["val_reward"] == 0.75 and document["steps"][3]["seconds"] == 3.0


def test_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "runs", "one", "agent", 0)
    make_model(tmp_path / "runs", "two", "agent", 0)
    assert run("steps", "agent", "--store", "runs") == 1
    assert "'agent' is in several projects; give one of one/agent, two/agent" in capsys.readouterr().err
    assert run("steps", "two/agnet", "--store", "runs") == 1
    assert "did you mean 'two/agent'?" in capsys.readouterr().err
    assert run("steps", "agent", "--store", "runs", "--cluster", "x") == 2
    assert run("models", "--store", "ftp://host/x") == 1
    assert "unknown scheme 'ftp'" in capsys.readouterr().err
