"""Bad input to the real trainer, through the HTTP API: a typed error that names the cause, HEAD where it was, and a
server and trainer that go on. The trainer is the worker's own code in this process, so that a fault can be set."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_fakes import FakeChild, FakeEngine, Harness, harness
from training.make_batch import make_choice, make_group, make_groups, make_trajectory

from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.store.failed import find_failed
from art_sky.training import losses
from art_sky.training.worker import Worker

LORA = {"rank": 4}


class WorkerHere:
    """`TrainerProcess` without a process."""

    def __init__(self, folder: Path) -> None:
        self.child = FakeChild()
        self._worker = Worker(folder, "float32", 1)

    async def init(self, task: InitTask) -> None:
        await asyncio.to_thread(self._worker.init, self._call(task))

    async def train(self, task: TrainTask) -> AsyncGenerator[dict[str, Any] | TrainOutcome, None]:
        yield TrainOutcome.model_validate(await asyncio.to_thread(self._worker.train, self._call(task)))

    async def close(self) -> None: ...

    def _call(self, task: InitTask | TrainTask) -> Any:
        channel, cancelled = SimpleNamespace(beat=0), threading.Event()
        return SimpleNamespace(params=task.model_dump(), channel=channel, cancelled=cancelled, event=lambda event: None)


@pytest.fixture
async def trained(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    """A server with the model p/agent at step 0, and the real trainer."""
    trainer: Any = WorkerHere(tiny_model)
    async with harness(tiny_model, tmp_path, trainer=trainer) as h:
        assert (await h.register(lora=LORA)).status_code == 200
        yield h


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[Any]:
    return make_groups(tiny_model, groups=2, size=3, seed=5)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with layers half as wide."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("narrow")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


async def fails(h: Harness, request: str, groups: list[Any], code: str, says: str, **config: Any) -> None:
    """The request fails with this error; nothing is committed, and its batch is kept."""
    registry = h.server.registry.get("p", "agent")
    before = registry.store.head()
    batch = await h.upload(groups)
    assert (await h.train(request, batch, **config)).status_code == 202
    job = await h.finish(request)
    assert (job["state"], job["error"]["code"]) == ("failed", code), job
    assert says in job["error"]["message"], job
    assert registry.store.head().manifest == before.manifest
    assert registry.store.request(request).batch.sha256 == batch and registry.store.has_blob(batch)
    assert [a.outcome for a in registry.store.attempts(request)] == ["failed"]
    assert says in find_failed(registry.store, request).cause  # `art-sky replay` can train it again


async def works(h: Harness, request: str, groups: list[Any]) -> None:
    before = h.server.registry.get("p", "agent").step
    await h.train(request, await h.upload(groups), learning_rate=1e-3)
    result = (await h.finish(request))["result"]
    assert (result["step"], result["updates"]) == (before + 1, 1)
    assert math.isfinite(result["metrics"]["loss"]) and result["metrics"]["memory/peak_mib"] > 10


@pytest.mark.parametrize("where", ["loss", "gradient", "update"])
async def test_what_is_not_finite_commits_nothing(
    trained: Harness, groups: list[Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {}
    if where == "update":
        config["learning_rate"] = 1e38  # beyond float32
    else:
        broken = dataclasses.replace(losses.LOSSES["cispo"], token_loss=BROKEN[where])
        monkeypatch.setitem(losses.LOSSES, "cispo", broken)
    await fails(trained, "bad", groups, "train_failed", f"the {where}", **config)
    monkeypatch.undo()
    await works(trained, "good", groups)


def _loss_nan(logp: Any, old: Any, advantage: Any, bounds: Any, mean: Any) -> Any:
    return logp * math.nan, logp.detach() > 0


def _gradient_nan(logp: Any, old: Any, advantage: Any, bounds: Any, mean: Any) -> Any:
    return (logp - logp.detach()).abs().sqrt(), logp.detach() > 0  # 0, with an infinite slope


BROKEN = {"loss": _loss_nan, "gradient": _gradient_nan}


async def test_a_token_outside_the_vocabulary_is_named(trained: Harness, groups: list[Any]) -> None:
    choices = [make_choice([5, 6], [7, 100000 + i], [-1.0, -1.0]) for i in range(2)]
    foreign = make_group([make_trajectory([choice], float(i)) for i, choice in enumerate(choices)])
    await fails(trained, "bad", [foreign], "invalid_input", "token id 100000 is outside the model's vocabulary")
    await works(trained, "good", groups)


async def test_sequences_beyond_the_model_are_dropped_and_counted_or_refused(
    trained: Harness, groups: list[Any]
) -> None:
    """The model has a context of 512 tokens; none is cut to it."""
    choices = [make_choice([5] * 510, [7, 8, 9 + i], [-1.0] * 3) for i in range(2)]
    long = make_group([make_trajectory([choice], float(i)) for i, choice in enumerate(choices)])
    batch = [*groups, long]
    await trained.train("drop", await trained.upload(batch), learning_rate=1e-3)
    result = (await trained.finish("drop"))["result"]
    assert (result["step"], result["updates"]) == (1, 1)
    assert result["metrics"]["data/too_long_dropped"] == 2
    assert result["metrics"]["data/tokens_total"] < 510
    said = "group 2, trajectory 0: a sequence of 513 tokens is longer than 512"
    await fails(trained, "refuse", batch, "sequence_too_long", said, too_long="refuse")
    await trained.train("only", await trained.upload([long]))
    result = (await trained.finish("only"))["result"]
    assert (result["step"], result["updates"]) == (2, 0) and "2 x sequence too long" in result["reason"]
    await works(trained, "good", groups)


async def test_sequences_beyond_the_budget_are_trained_whole(trained: Harness, groups: list[Any]) -> None:
    """`micro_batch_tokens` bounds what is computed at a time, not what is trained."""
    found = []
    for request, tokens in (("all", 4096), ("few", 16)):
        config = {"learning_rate": 1e-12, "micro_batch_tokens": tokens}
        await trained.train(request, await trained.upload(groups), **config)
        found.append((await trained.finish(request))["result"]["metrics"])
    whole, parts = found
    assert parts["data/micro_batches"] > whole["data/micro_batches"]
    for metric in ("loss", "grad_norm", "data/tokens_trained"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-4), metric


async def test_nothing_to_train_on_is_a_step_that_says_so(trained: Harness, groups: list[Any]) -> None:
    silent = make_group([make_trajectory([{"role": "user", "content": "?"}], float(i)) for i in range(2)])
    await trained.train("none", await trained.upload([silent]))
    result = (await trained.finish("none"))["result"]
    assert (result["step"], result["updates"]) == (1, 0) and result["reason"]
    await works(trained, "good", groups)


async def test_targets_that_match_nothing_register_nothing(trained: Harness, groups: list[Any]) -> None:
    reply = await trained.register("other", lora={**LORA, "target_modules": ["no_such_layer"]})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_config"
    assert "no_such_layer" in reply.json()["error"]["message"]
    assert (await trained.client.get("/api/v1/models/p/other")).status_code == 404
    assert (await trained.register("other", lora=LORA)).json()["step"] == 0
    await works(trained, "good", groups)


async def test_the_adapter_of_another_base_model_is_refused(
    tiny_model: Path, narrow: Path, groups: list[Any], tmp_path: Path
) -> None:
    trainer: Any = WorkerHere(tiny_model)
    async with harness(tiny_model, tmp_path, trainer=trainer) as before:
        await before.register(lora=LORA)
    trainer = WorkerHere(narrow)  # what the name of the base model stands for has changed, behind the server's back
    async with harness(tiny_model, tmp_path, engine=FakeEngine(tiny_model), trainer=trainer) as after:
        await after.register(lora=LORA)
        said = "made for the base model 'tiny', and this trainer runs the Qwen3ForCausalLM in "
        await fails(after, "bad", groups, "base_mismatch", said)
        assert (await after.say())["message"]["content"] == "hello"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"vocab_size": 300},
            "vocabulary 102; here 'tiny' is a Qwen3ForCausalLM with 4 layers of width 128, vocabulary 300",
        ),
        (
            {"num_hidden_layers": 5},
            "4 layers of width 128, vocabulary 102; here 'tiny' is a Qwen3ForCausalLM with 5 layers",
        ),
    ],
)
async def test_a_base_model_that_has_changed_is_refused_at_registration(
    tiny_model: Path, groups: list[Any], tmp_path: Path, changes: dict[str, int], says: str
) -> None:
    """So no adapter is trained or sampled from on another vocabulary, where every matrix still fits."""
    first: Any = WorkerHere(tiny_model)
    async with harness(tiny_model, tmp_path, trainer=first) as before:
        await before.register(lora=LORA)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changes))
    async with harness(other, tmp_path) as after:
        reply = await after.register(lora=LORA)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "base_mismatch")
        assert says in reply.json()["error"]["message"], reply.text
        assert (await after.register("new", lora=LORA)).status_code == 200
    again: Any = WorkerHere(tiny_model)
    async with harness(tiny_model, tmp_path, trainer=again) as back:
        assert (await back.register(lora=LORA)).status_code == 200
        await works(back, "good", groups)
