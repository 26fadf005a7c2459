"""The command line's tools on models in a bucket, the main path of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from cli_store import make_model, run
from store.s3_servers import store_url

from art_sky.store import open_store
from art_sky.store.batches import encode_batch
from art_sky.store.model_store import ModelStore

Say = Callable[..., Any]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """What a command prints with --json."""
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def said(*args: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run(*args, "--json") == code
        return json.loads(capsys.readouterr().out)

    return said


def test_tools_on_a_bucket(seaweedfs: str, say: Say, tmp_path: Path) -> None:
    laptop = make_model(tmp_path / "laptop", "proj", "agent", 3)
    laptop.write_trajectories("val", 3, 1, encode_batch([{"trajectories": [{"reward": 1.0}]}]))
    url = store_url(seaweedfs)
    at = ("--store", url)
    assert say("check", url)["safe_to_train"]
    assert say("push", "agent", "--to", url, "--store", "laptop")["step"] == 3
    assert say("push", "agent", "--to", url, "--store", "laptop")["unchanged"]
    bucket = ModelStore(open_store(url), "proj", "agent")

    assert say("tag", "agent@1", "good", *at)["step"] == 1
    assert say("steps", "agent", *at)["steps"][1]["tags"] == ["good"]
    assert say("diff", "agent@0", "agent@1", *at)["same_files"]
    assert say("export", "agent@1", "peft", *at)["files"] == ["adapter_config.json"]
    assert (tmp_path / "peft" / "adapter_config.json").read_text() == "{}"

    assert not say("fork", "agent@2", "child", *at)["copied"]
    (name,) = (tag for tag in bucket.refs() if tag.startswith("fork-"))
    assert run("tag", "agent", name, "--delete", *at) == 1
    assert run("tag", "agent", name, "--delete", "--force", *at) == 0

    bucket.put_blob(b"garbage")
    assert len(say("gc", "agent", "--grace-hours", "0", *at)["models"][0]["objects"]) == 1
    assert say("gc", "agent", "--grace-hours", "0", "--delete", *at)["models"][0]["bytes"] == 7
    assert say("verify", "agent", *at)["damages"] == []

    lost = bucket.blob_key(bucket.manifest_at(3).files["adapter/adapter_config.json"].sha256)
    for key in (lost, "proj/agent/HEAD"):
        bucket.store.delete(key)
    assert say("verify", "agent", *at, code=1)["damages"][0]["key"] == "proj/agent/HEAD"
    mended = say("repair", "agent", "--from", "laptop", "--apply", *at)["repairs"]
    assert {repair["key"] for repair in mended} == {"proj/agent/HEAD", lost}

    assert say("pull", "agent", "--from", url, "--store", "elsewhere")["step"] == 3
    assert say("verify", "agent", "--store", "elsewhere")["damages"] == []
    assert say("pull", "agent", "--format", "parquet", "--to", "tables", *at)["files"][0]["rows"] == 1
    assert pl.read_parquet("tables/val.parquet")["reward"].to_list() == [1.0]
