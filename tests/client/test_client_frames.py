"""load_trajectories: every logged trajectory is a row, and no metric is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import art_sky as art
from art_sky.client.frames import write_parquet
from art_sky.config import LoRAConfig
from art_sky.errors import CorruptObject, NotFound
from art_sky.schemas import ModelRecord
from art_sky.store import open_store
from art_sky.store.batches import encode_batch
from art_sky.store.model_store import ModelStore
from art_sky.store.trajectory_files import iter_trajectories

TOOLS = [{"type": "function", "function": {"name": "look"}}]


def a_choice(content: str = "hi") -> dict[str, Any]:
    return {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "token_logprobs": [-0.5, -0.25],
    }


def a_trajectory(reward: float = 0.5, **values: Any) -> dict[str, Any]:
    return {"messages_and_choices": [{"role": "user", "content": "q"}, a_choice()], "reward": reward, **values}


def a_group(*trajectories: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {"trajectories": list(trajectories), **values}


def log(folder: Path, name: str, split: str, step: int, *groups: dict[str, Any], project: str = "p") -> str:
    model = ModelStore(open_store(str(folder)), project, name)
    if not model.exists():
        model.create(
            ModelRecord(
                project=project, name=name, base_model="b", lora=LoRAConfig(), created=1.0, created_by="art-sky"
            )
        )
    return model.write_trajectories(split, step, 1, encode_batch(groups))


def test_a_trajectory_is_a_row_with_everything_in_it(tmp_path: Path) -> None:
    other = {"messages_and_choices": [a_choice("sub")], "tools": TOOLS}
    first = a_trajectory(
        0.25, metrics={"acc": True, "n": 3}, metadata={"k": ["\ud800"]}, logs=["a"], additional_histories=[other]
    )
    log(
        tmp_path, "m", "val", 3,
        a_group(a_trajectory(1)),
        a_group(
            first, a_trajectory(0, tools=TOOLS), exceptions=[{"type": "E"}], metadata={"task": 7}, metrics={"j": 1}
        ),
    )  # fmt: skip
    frame = art.load_trajectories(tmp_path)
    assert frame.columns == [
        "project", "model", "split", "step", "attempt", "group_index", "trajectory_index", "reward", "metric_acc",
        "metric_n", "prompt_tokens", "sampled_tokens", "group_exceptions", "messages", "tools", "additional_histories",
        "metadata", "logs", "group_metadata", "group_metrics",
    ]  # fmt: skip
    assert frame["group_index"].to_list() == [0, 1, 1] and frame["trajectory_index"].to_list() == [0, 0, 1]
    row = frame.row(1, named=True)
    parsed = {k: json.loads(v) if k in frame.columns[13:] and v is not None else v for k, v in row.items()}
    assert parsed == {
        "project": "p", "model": "m", "split": "val", "step": 3, "attempt": 1, "group_index": 1, "trajectory_index": 0,
        "reward": 0.25, "metric_acc": 1.0, "metric_n": 3.0, "prompt_tokens": 6, "sampled_tokens": 4,
        "group_exceptions": 1,
        "messages": [
            {"role": "user", "content": "q", "trainable": False},
            {"role": "assistant", "content": "hi", "trainable": True},
        ],
        "tools": None, "metadata": {"k": ["\ud800"]}, "logs": ["a"],
        "additional_histories": [
            {"messages": [{"role": "assistant", "content": "sub", "trainable": True}], "tools": TOOLS}
        ],
        "group_metadata": {"task": 7}, "group_metrics": {"j": 1},
    }  # fmt: skip
    assert json.loads(frame["tools"][2]) == TOOLS


def test_a_metric_that_comes_up_late_is_not_lost(tmp_path: Path) -> None:
    log(tmp_path, "m", "train", 1, *[a_group(a_trajectory(metrics={"a": 1}))] * 300)
    log(tmp_path, "m", "train", 2, a_group(a_trajectory(metrics={"late": 2, "big": 10**400, "\ud800": 1})))
    frame = art.load_trajectories(tmp_path)
    assert frame["metric_late"].to_list() == [None] * 300 + [2.0]
    assert frame["metric_a"].null_count() == 1 and frame["metric_big"][-1] == float("inf")
    assert "metric_\\ud800" in frame.columns


def test_rows_are_in_order_and_can_be_chosen(tmp_path: Path) -> None:
    for project, name, split, step in [
        ("p", "b", "val", 10), ("p", "b", "val", 9), ("p", "b", "train", 1), ("p", "a", "val", 2), ("q", "a", "val", 0),
    ]:  # fmt: skip
        log(tmp_path, name, split, step, a_group(a_trajectory()), project=project)
    log(tmp_path, "b", "val", 9, a_group(a_trajectory(0.75)))

    def shown(**choice: Any) -> list[tuple[Any, ...]]:
        return art.load_trajectories(str(tmp_path), **choice).select("project", "model", "split", "step").rows()

    everything = [
        ("p", "a", "val", 2), ("p", "b", "train", 1), ("p", "b", "val", 9), ("p", "b", "val", 9), ("p", "b", "val", 10),
        ("q", "a", "val", 0),
    ]  # fmt: skip
    assert shown() == everything
    assert shown(split="train") == everything[1:2] and shown(project="q") == everything[5:]
    assert shown(models="a") == [everything[0], everything[5]] and shown(models=["b"], split="val") == everything[2:5]
    assert shown(split="test") == [] and art.load_trajectories(tmp_path, split="test").schema["reward"] == pl.Float64
    assert art.load_trajectories(tmp_path.as_uri(), models="b", split="val")["reward"].to_list() == [0.5, 0.75, 0.5]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"project": "pp"}, "project 'pp'.*did you mean 'p'"),
        ({"models": "agant"}, "no model 'agant'.*did you mean 'agent'"),
        ({"models": ["agent", "x"]}, "no model 'x'"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, choice: dict[str, Any], message: str) -> None:
    log(tmp_path, "agent", "val", 1, a_group(a_trajectory()))
    with pytest.raises(NotFound, match=message):
        art.load_trajectories(tmp_path, **choice)


def test_an_empty_store_is_no_empty_frame(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no model"):
        art.load_trajectories(tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    log(tmp_path, "m", "val", 1, a_group(a_trajectory()))
    key = log(tmp_path, "m", "val", 2, a_group(a_trajectory()))
    (tmp_path / key).write_bytes((tmp_path / key).read_bytes()[:-1])
    with pytest.raises(CorruptObject, match=rf"{key}.*delete it"):
        art.load_trajectories(tmp_path)


def test_reading_goes_object_by_object(tmp_path: Path) -> None:
    for step in (1, 2):
        log(tmp_path, "m", "val", step, a_group(a_trajectory(step)))
    (tmp_path / "p/m/trajectories/val/notes.txt").write_text("somebody else's")
    store = open_store(str(tmp_path))
    logged = iter_trajectories(store, "p", "m")
    assert next(logged).groups[0]["trajectories"][0]["reward"] == 1
    (tmp_path / "p/m/trajectories/val/00000002-0001.jsonl.zst").write_bytes(b"damaged after the first was read")
    with pytest.raises(CorruptObject):
        next(logged)
    with pytest.raises(NotFound):
        next(iter_trajectories(store, "p", "other"))


def test_parquet(tmp_path: Path) -> None:
    log(tmp_path, "m", "val", 1, a_group(a_trajectory(metrics={"a": 1})))
    frame = art.load_trajectories(tmp_path)
    for _ in range(2):
        path = write_parquet(frame, tmp_path / "out" / "t.parquet")
        assert pl.read_parquet(path).equals(frame)
    assert [p.name for p in path.parent.iterdir()] == ["t.parquet"]


def test_without_polars_it_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["polars"] = None
import art_sky
try:
    art_sky.load_trajectories(".")
except art_sky.errors.InvalidConfig as e:
    print(e)
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "pip install 'art-sky[data]'" in shown.stdout
