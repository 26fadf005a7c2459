"""launch, status, logs and down as commands, against a stand-in for the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_store import run

from art_sky.controller.clouds import local
from art_sky.controller.clouds.local import LocalCloud

FAKE = (sys.executable, str(Path(__file__).parents[1] / "controller" / "fake_server.py"))


@pytest.fixture(autouse=True)
def fake_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    made = LocalCloud.__init__

    def init(self: LocalCloud) -> None:
        made(self, server=FAKE, start_seconds=20, flush_seconds=5, term_seconds=1)

    monkeypatch.setattr(local.LocalCloud, "__init__", init)
    yield
    for cluster in LocalCloud().list():
        LocalCloud().down(cluster.name)


def test_a_cluster_from_launch_to_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("launch", "night", "--cloud", "local", "--store", "runs", "--kv-cache-mib", "64") == 0
    out = capsys.readouterr().out
    token_file = tmp_path / "home" / "clusters" / "night" / "state" / "token"
    assert "http://127.0.0.1:" in out and str(token_file) in out and "art-sky status" in out
    assert token_file.read_text() not in out, "the token itself is never printed"
    config = json.loads((tmp_path / "home" / "clusters" / "night" / "config.json").read_text())
    assert config["store"] == f"file://{tmp_path}/runs" and config["idle_minutes"] == 60
    assert config["engine"]["kv_cache_mib"] == 64 and config["engine"]["max_batch"] == 64

    assert run("launch", "night") == 1
    assert "error: cluster 'night' is already up at" in capsys.readouterr().err

    assert run("status") == 0
    out = capsys.readouterr().out
    assert "night" in out and "5s of 1h 00m" in out and "p/agent" in out and f"file://{tmp_path}/runs" in out
    assert run("status", "--json") == 0
    (cluster,) = json.loads(capsys.readouterr().out)["clusters"]
    assert cluster["state"] == "up" and cluster["server"]["models"][0]["step"] == 3 and cluster["problem"] is None

    assert run("logs", "night", "-n", "1") == 0
    assert capsys.readouterr().out.startswith("listening on http://127.0.0.1:")

    assert run("down", "night", "--json") == 0
    assert json.loads(capsys.readouterr().out)["clusters"][0]["state"] == "down"
    assert run("logs", "-f", "night") == 0
    out, err = capsys.readouterr()
    assert "listening on" in out and err == "cluster 'night' is down\n"
    assert run("status") == 0
    assert "No cluster is up" in capsys.readouterr().out
    assert run("status", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out)["clusters"][0]["state"] == "down"


def test_a_server_that_does_not_answer_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("launch", "one", "--json") == 0
    assert run("launch", "two", "--json") == 0
    capsys.readouterr()
    (tmp_path / "home" / "clusters" / "one" / "state" / "token").write_text("wrong")
    assert run("status", "--json") == 0
    one, two = json.loads(capsys.readouterr().out)["clusters"]
    assert one["server"] is None and "wrong token" in one["problem"] and two["server"] is not None
    assert run("status") == 0
    assert "one: wrong token" in capsys.readouterr().out
    assert run("down", "--all") == 0
    assert run("down", "--all") == 0
    assert "No cluster is up" in capsys.readouterr().out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("down") == 2
    assert run("down", "x", "--all") == 2
    assert run("launch", "--idle-minutes", "-1") == 1
    assert "idle_minutes" in capsys.readouterr().err
    assert run("launch", "../up") == 1
    assert "not a valid name" in capsys.readouterr().err
    assert run("logs", "nothing-here") == 1
    assert "there is no cluster 'nothing-here' (there is none yet)" in capsys.readouterr().err
