"""`art-sky replay`: what failed is listed, and its batch is trained again, once, on a server of its own."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cli_store import make_model, run
from training.make_batch import make_groups

from art_sky.cli import replay
from art_sky.client.local_backend import LocalBackend
from art_sky.client.model import TrainableModel
from art_sky.config import EngineConfig, SFTConfig, TrainConfig
from art_sky.errors import InvalidConfig
from art_sky.schemas import TrainRequestRecord
from art_sky.store.batches import encode_batch
from art_sky.store.gc import find_garbage
from art_sky.store.model_store import ModelStore

pytestmark = pytest.mark.usefixtures("here")
CONFIG = TrainConfig(learning_rate=1e-2)


def ask(model: ModelStore, request: str, batch: bytes, *outcomes: Any, config: Any = CONFIG) -> str:
    """A train request that a server tried, with these outcomes, and the hash of its batch."""
    ref = model.put_blob(batch)
    head = model.head()
    model.begin_request(
        TrainRequestRecord(
            request=request, batch=ref, config=config.model_dump(), head_step=head.step, head_manifest=head.manifest,
            created=time.time(),
        )
    )  # fmt: skip
    for outcome in outcomes:
        model.end_attempt(model.begin_attempt(request, 1), outcome, f"it was {outcome}")
    return ref.sha256


def test_the_list_has_what_failed_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "runs", "proj", "agent", 1)
    assert run("replay", "agent", "--store", "runs") == 0
    assert "No train request of proj/agent has failed" in capsys.readouterr().out
    nan = ask(model, "nan", b"a", "interrupted", "failed")
    ask(model, "killer", b"b", "trainer_died", "trainer_died", "trainer_died")
    ask(model, "waits", b"c", "trainer_died")
    ask(model, "stopped", b"d", "cancelled")
    assert run("replay", "agent", "--store", "runs", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(f["request"], f["attempts"], f["batch_kept"]) for f in document["failed"]] == [
        ("nan", 2, True), ("killer", 3, True),
    ]  # fmt: skip
    first, second = document["failed"]
    assert (first["cause"], first["batch"], first["config"]["learning_rate"]) == ("it was failed", nan, 1e-2)
    assert second["cause"].startswith("3 attempts ended the trainer")
    assert run("replay", "agent", "--store", "runs") == 0
    out = capsys.readouterr().out
    assert "it was failed" in out and "waits" not in out and "stopped" not in out
    for request, says in [("r1", "made step 1"), ("waits", "is not over"), ("stopped", "was cancelled")]:
        assert run("replay", "agent", request, "--store", "runs") == 1
        assert says in capsys.readouterr().err
    assert run("replay", "agent", "never", "--store", "runs") == 1
    assert run("replay", "agent", "--set", "epochs=2", "--store", "runs") == 2


def test_settings_are_changed_by_name() -> None:
    stored = TrainConfig(learning_rate=1e-2, loss_fn="ppo").model_dump()
    made = replay.changed(stored, ("learning_rate=1e-6", "loss_fn=dapo", "kl_penalty_coef=0.1"))
    assert made == TrainConfig(learning_rate=1e-6, loss_fn="dapo", kl_penalty_coef=0.1)
    assert replay.changed(SFTConfig().model_dump(), ("batch_size=3",)) == SFTConfig(batch_size=3)
    with pytest.raises(InvalidConfig, match="unknown option 'lerning_rate'"):
        replay.changed(stored, ("lerning_rate=1",))
    with pytest.raises(InvalidConfig, match="learning_rate"):
        replay.changed(stored, ("learning_rate=fast",))
    assert replay.replay_id("r", made) == replay.replay_id("r", made.model_copy())
    assert len({replay.replay_id("r", made), replay.replay_id("q", made), replay.replay_id("r", CONFIG)}) == 3


def test_gc_leaves_the_batch_of_a_failed_request_for_the_grace_period_after_the_failure(tmp_path: Path) -> None:
    model = make_model(tmp_path / "runs", "proj", "agent", 1)
    waited = ask(model, "nan", b"a")
    stopped = ask(model, "stopped", b"b", "cancelled")
    two_days = 2 * 24 * 3600.0
    now = time.time() + two_days  # both were uploaded two days ago
    attempt = model.begin_attempt("nan", 1)
    model.end_attempt(attempt, "failed", "loss is nan")
    model.update("requests/nan.1.json", lambda old: {**(old or {}), "ended": now - 3600})

    def hashes(infos: list[Any]) -> set[str]:
        return {info.key.rpartition("/")[2] for info in infos}

    found = find_garbage(model, now=now)
    assert hashes(found.objects) == {stopped} and hashes(found.young) == {waited}
    later = find_garbage(model, now=now + two_days)
    assert hashes(later.objects) == {stopped, waited}


def test_a_failed_batch_is_trained_again_once(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_register(tmp_path / "runs", tiny_model))
    model = ModelStore(replay.chosen_store(str(tmp_path / "runs"), None), "proj", "agent")
    ask(model, "nan", encode_batch(make_groups(tiny_model, groups=1, size=3, seed=5)), "failed")
    answers = []
    for _ in range(2):
        assert run("replay", "agent", "nan", "--set", "learning_rate=1e-3", "--store", "runs", "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    first, second = answers
    assert (first["replayed"], first["step"], first["updates"]) == ("nan", 1, 1)
    assert (second["manifest"], second["request_id"]) == (first["manifest"], first["request_id"])
    assert [s.manifest.request for s in model.steps()][1:] == [first["request_id"]]
    assert model.manifest(first["manifest"]).config["learning_rate"] == 1e-3
    assert [(r.step, r.split) for r in model.history()] == [(1, "train")]


async def _register(store: Path, base_model: Path) -> None:
    async with LocalBackend(store, engine=EngineConfig(dtype="float32", threads=1)) as backend:
        await TrainableModel(name="agent", project="proj", base_model=base_model).register(backend)
