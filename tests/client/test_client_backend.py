"""The HTTP backend: errors, dropped connections, restarts, cancelled callers, lost tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_fake_server import TOKEN, FakeServer
from fastapi import HTTPException

import art_sky as art
from art_sky.client.http_backend import HttpBackend
from art_sky.client.transport import Transport
from art_sky.errors import (
    ArtSkyError,
    Busy,
    ChildDied,
    Conflict,
    CorruptObject,
    InvalidConfig,
    InvalidInput,
    InvalidReward,
    MissingTokens,
    ServerUnreachable,
    TrainFailed,
    Unauthorized,
    VersionMismatch,
)
from art_sky.schemas import FileRef
from art_sky.trajectories import choice_from_json

Model = art.TrainableModel[Any]


def choice(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": None,
        "message": {"role": "assistant", "content": "yes"},
        "prompt_token_ids": [1, 2],
        "token_ids": [3],
        "token_logprobs": [-0.5],
        "sampling": {"completion_id": "c", "model": "agent@0", "temperature": 1.0, "comparable": True},
    }
    fields |= changes
    return choice_from_json({k: v for k, v in fields.items() if v != "gone"})


def groups(*choices: Any, reward: float = 1.0) -> list[art.TrajectoryGroup]:
    one = [art.Trajectory(messages_and_choices=[{"role": "user", "content": "q"}, c], reward=reward) for c in choices]
    return [art.TrajectoryGroup(one)]


async def test_a_broken_stream_is_read_on_from_its_offset(server: FakeServer, model: Model) -> None:
    server.break_stream_after = [2, 0, 1]
    result = await model.train(groups(choice()))
    assert result.step == 1
    assert server.offsets == [0, 2, 2, 3]
    assert len([c for c in server.calls if c[1].endswith("/train")]) == 1


async def test_a_restarted_server_is_told_again(server: FakeServer, model: Model) -> None:
    server.hold_job = asyncio.Event()
    task = asyncio.create_task(model.train(groups(choice()), request_id="r1"))
    await server.watched.wait()
    server.restart()
    server.hold_job.set()  # the stream ends, the job is unknown, and so is the model
    result = await task
    assert result.step == 1
    assert [e["train"]["request_id"] for e in server.logged if "train" in e] == ["r1", "r1"]
    assert len([c for c in server.calls if c == ("POST", "/api/v1/models")]) == 2


async def test_the_same_request_id_gets_the_same_result(server: FakeServer, model: Model) -> None:
    first = await model.backend.train_request(model, groups(choice()), art.TrainConfig(), "once")
    again = await model.backend.train_request(model, groups(choice()), art.TrainConfig(), "once")
    assert first == again and await model.get_step() == 1


async def test_cancelling_the_caller_cancels_the_job(server: FakeServer, model: Model) -> None:
    server.hold_job = asyncio.Event()
    task = asyncio.create_task(model.train(groups(choice()), request_id="r1"))
    await server.watched.wait()
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 1
    assert server.jobs["r1"].state == "cancelled"


async def test_a_job_may_outlive_its_caller(server: FakeServer) -> None:
    async with HttpBackend(Transport(server.base_url, TOKEN), cancel_jobs=False) as backend:
        model: Model = art.TrainableModel(name="agent", project="p", base_model="tiny")
        await model.register(backend)
        server.hold_job = asyncio.Event()
        task = asyncio.create_task(model.train(groups(choice()), request_id="r1"))
        await server.watched.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.jobs["r1"].state == "running"
        server.hold_job.set()
        assert (await model.train(groups(choice()), request_id="r1")).step == 1


async def test_a_failed_job_raises_its_own_error(server: FakeServer, model: Model) -> None:
    server.fail_job = TrainFailed("the loss is NaN; lower the learning rate")
    with pytest.raises(TrainFailed, match="the loss is NaN"):
        await model.train(groups(choice()))
    assert server.rows == {}


async def test_errors_that_pass_are_waited_out_and_others_are_not(server: FakeServer, model: Model) -> None:
    server.errors = [Busy("starting; call again"), ChildDied("restarting; call again"), HTTPException(502)]
    assert await model.get_step() == 0
    server.errors = [Conflict("taken; use another")]
    with pytest.raises(Conflict, match="taken"):
        await model.get_step()
    server.errors = [HTTPException(500)]
    with pytest.raises(ArtSkyError, match="500"):
        await model.get_step()


async def test_a_wrong_token(server: FakeServer) -> None:
    async with art.ServerBackend(server.base_url, "wrong") as backend:
        with pytest.raises(Unauthorized):
            await backend.register(art.TrainableModel(name="agent", project="p", base_model="tiny"))


async def test_no_answer_ends_after_the_patience() -> None:
    now = 0.0
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    transport = Transport(
        "http://127.0.0.1:1", "t", patience=30, handler=httpx.MockTransport(refuse), sleep=sleep, clock=lambda: now
    )
    with pytest.raises(ServerUnreachable, match=r"no answer from the server at http://127\.0\.0\.1:1 .*refused"):
        await transport.json("GET", "/api/v1/status")
    assert 20 < sum(waits) <= 30 and max(waits) <= 5 and waits[0] <= 0.1
    assert len(set(waits)) == len(waits)  # jittered
    with pytest.raises(ServerUnreachable):
        async with transport.lines("/x", {}):
            pass
    with pytest.raises(InvalidConfig, match="no address"):
        Transport("127.0.0.1:80", "t")


async def test_another_release_is_refused(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with art.ServerBackend(server.base_url, TOKEN) as backend:
        model: Model = art.TrainableModel(name="agent", project="p", base_model="tiny")
        status = await backend.register(model)
        monkeypatch.setattr(art, "__version__", "9.9.9")
        real = Transport.json

        async def old(self: Transport, *args: Any, **options: Any) -> Any:
            return {**await real(self, *args, **options), "server_version": status.server_version + ".old"}

        monkeypatch.setattr(Transport, "json", old)
        with pytest.raises(VersionMismatch, match="pip install art-sky=="):
            await backend.register(model)


@pytest.mark.parametrize("lost", ["prompt_token_ids", "token_ids", "token_logprobs", "sampling"])
async def test_a_choice_without_its_tokens_names_the_place(model: Model, server: FakeServer, lost: str) -> None:
    broken = choice(**{lost: "gone"})
    if lost != "sampling":
        broken.sampling = {**broken.sampling, "completion_id": None}
    two = groups(choice()) + groups(choice(), broken)
    with pytest.raises(MissingTokens, match="group 1, trajectory 1, message 1"):
        await model.train(two)
    assert [e for e in server.logged if "train" in e] == []


async def test_lost_tokens_are_found_again_by_the_completions_id(model: Model, server: FakeServer) -> None:
    server.drop_fields = True
    completion = await model.openai_client().chat.completions.create(
        model="agent", messages=[{"role": "user", "content": "q"}], n=2
    )
    assert not hasattr(completion.choices[0], "token_ids")
    second = completion.choices[1].model_copy(update={"completion_id": completion.id})
    await model.train(groups(completion, second))
    sent = server.batch(server.logged[0]["train"]["batch"])[0]["trajectories"]
    assert [t["messages_and_choices"][1]["token_ids"] for t in sent] == [[7, 8, 0], [7, 8, 1]]
    server.exchanges.clear()
    with pytest.raises(MissingTokens, match=r"group 0, trajectory 0, message 1.*no exchange chatcmpl-0"):
        await model.train(groups(completion))


async def test_rewards_and_metrics_are_checked_before_anything_is_sent(model: Model, server: FakeServer) -> None:
    bad = groups(choice(), choice())
    bad[0].trajectories[1].__dict__["reward"] = float("nan")
    with pytest.raises(InvalidReward, match="group 0, trajectory 1"):
        await model.train(bad)
    bad = groups(choice())
    bad[0].trajectories[0].metrics["x"] = float("inf")
    with pytest.raises(InvalidInput, match="metric 'x' of trajectory 0 of group 0"):
        await model.train(bad)
    bad[0].trajectories[0].metrics = {"reward": 1}
    with pytest.raises(InvalidInput, match="'reward' of trajectory 0 of group 0 is taken"):
        await model.log(bad)
    bad = groups(choice())
    bad[0].trajectories[0].metadata["x"] = object()
    with pytest.raises(InvalidInput, match="group 0 cannot be written as JSON"):
        await model.train(bad)

    async def rollout() -> art.Trajectory:
        return art.Trajectory()

    pending = art.TrajectoryGroup([rollout()])
    with pytest.raises(InvalidInput, match="1 rollouts of this group have not run"):
        await model.train([pending])
    pending.discard()
    assert server.blobs == {}


async def test_empty_groups_and_failed_ones_are_sent_as_they_are(model: Model, server: FakeServer) -> None:
    await model.train([art.TrajectoryGroup([]), art.TrajectoryGroup([ValueError("x")])])
    sent = server.batch(server.logged[0]["train"]["batch"])
    assert [len(g["trajectories"]) for g in sent] == [0, 0] and sent[1]["exceptions"][0]["type"] == "ValueError"
    assert server.rows["p/agent", 1, "train"] == {"loss": 0.5, "exception_rate": 1, "trajectories": 0, "groups": 2}
    await model.train([])
    assert server.batch(server.logged[2]["train"]["batch"]) == []


async def test_surrogates_cross_the_wire(model: Model, server: FakeServer) -> None:
    text = "a\ud800b<|im_end|>"
    one = groups(choice())
    one[0].trajectories[0].messages_and_choices[0] = {"role": "user", "content": text}
    one[0].trajectories[0].log(text)
    await model.train(one)
    sent = server.batch(server.logged[0]["train"]["batch"])[0]["trajectories"][0]
    assert sent["messages_and_choices"][0]["content"] == text and sent["logs"] == [text]
    assert await model.merge_state({"text": text}) == {"text": text}


async def test_state(model: Model) -> None:
    assert await model.read_state() is None
    assert await model.merge_state({"epoch": 1}) == {"epoch": 1}
    assert await model.merge_state({"index": 2}) == {"epoch": 1, "index": 2}
    await model.overwrite_state({"done": True})
    assert await model.read_state() == {"done": True}
    with pytest.raises(InvalidInput, match="the state cannot be written as JSON"):
        await model.merge_state({"x": float("nan")})


async def test_checkpoints(model: Model, server: FakeServer, backend: HttpBackend, tmp_path: Path) -> None:
    await model.train(groups(choice()))
    assert [c.step for c in await backend.checkpoints(model)] == [0, 1]
    assert await model.delete_checkpoints() == [1, 2]
    assert server.logged[-1] == {"delete": "val/reward"}
    (row,) = await backend.history(model)
    assert (row.step, row.split) == (1, "train")
    server.files = {
        "adapter/adapter_config.json": b"{}",
        "adapter/adapter_model.safetensors": b"x" * 3000,
        "trainer/state.json": b"{}",
        "trainer/optimizer.safetensors": b"y",
    }
    adapter = await backend.download_checkpoint(model, None, tmp_path / "a")
    assert {p.name for p in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "a" / "trainer").exists()
    await backend.download_checkpoint(model, 1, tmp_path / "b", optimizer=True)
    assert (tmp_path / "b/trainer/optimizer.safetensors").read_bytes() == b"y"
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="give another folder"):
        await backend.download_checkpoint(model, 1, tmp_path / "file")


@pytest.mark.parametrize(("name", "sha256"), [("adapter/x", "0" * 64), ("../x", None), ("/x", None)])
def test_a_damaged_download_is_noticed(tmp_path: Path, name: str, sha256: str | None) -> None:
    from art_sky.client.checkpoints import write_file

    ref = FileRef(sha256=sha256 or hashlib.sha256(b"data").hexdigest(), size=4)
    with pytest.raises(CorruptObject):
        write_file(tmp_path / "a", name, b"data", ref)
    assert list(tmp_path.iterdir()) == []


async def test_wrong_names_and_options_are_refused_here(server: FakeServer, model: Model, backend: HttpBackend) -> None:
    sent = len(server.calls)
    with pytest.raises(InvalidInput, match="split"):
        await model.log(groups(choice()), split="Val Set")
    with pytest.raises(InvalidInput, match="request_id"):
        await model.train(groups(choice()), request_id="../x")
    with pytest.raises(InvalidConfig, match=r"'learningrate'; known: .*learning_rate"):
        await backend.train(model, groups(choice()), learningrate=1)
    with pytest.raises(InvalidConfig, match="learning_rate: Input should be greater than 0"):
        await backend.train(model, groups(choice()), learning_rate=0)
    with pytest.raises(InvalidConfig, match="only sampled tokens are trained"):
        await backend.train(model, groups(choice()), allow_training_without_logprobs=True)
    with pytest.raises(InvalidConfig, match=r"config=TrainConfig\("):
        await model.train(groups(choice()), config={"learning_rate": 1})  # type: ignore[arg-type]  # the point
    with pytest.raises(InvalidInput, match="group 0 is str; give TrajectoryGroup"):
        await model.train(["x"])  # type: ignore[list-item]  # the point
    blobs = [c for c in server.calls[sent:] if c[0] != "PUT"]
    assert blobs == []


async def test_progress_is_drawn_on_a_terminal(
    model: Model, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    server.events = [{"stored_bytes": 3 << 20, "of_bytes": 12 << 20, "seconds": 2.0}]
    await model.train(groups(choice()))
    said = capsys.readouterr().err
    assert "train agent" in said and "3/12" in said and "MiB into the store, 1.5 MiB/s" in said


async def test_a_model_that_is_not_registered_says_so() -> None:
    model: Model = art.TrainableModel(name="agent", project="p", base_model="tiny")
    for call in (model.get_step, model.read_state, lambda: model.train([])):
        with pytest.raises(InvalidInput, match=r"call `await model.register\(backend\)` first"):
            await call()
    with pytest.raises(InvalidInput, match="register it first"):
        model.openai_client()
    with pytest.raises(InvalidInput, match="give inference_base_url"):
        art.Model(name="gpt", project="p").openai_client()


async def test_connect(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from art_sky.errors import NotFound

    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path))
    folder = tmp_path / "clusters" / "mine"
    folder.mkdir(parents=True)
    (folder / "token").write_text(TOKEN + "\n")
    cluster = {
        "name": "mine", "cloud": "local", "state": "up", "base_url": server.base_url, "store": "file:///x",
        "token_file": str(folder / "token"), "log_file": "x", "created": 0.0,
    }  # fmt: skip
    (folder / "cluster.json").write_text(json.dumps(cluster))
    for backend in (art.connect("mine"), art.connect(server.base_url, TOKEN)):
        async with backend:
            status = await backend.register(art.TrainableModel(name="agent", project="p", base_model="tiny"))
            assert status.step == 0
    with pytest.raises(NotFound, match="did you mean 'mine'"):
        art.connect("mime")
    with pytest.raises(InvalidInput, match="give token="):
        art.connect(server.base_url)
    (folder / "cluster.json").write_text(json.dumps({**cluster, "state": "down"}))
    with pytest.raises(ServerUnreachable, match="'mine' is down"):
        art.connect("mine")
    (folder / "cluster.json").write_text("{")
    with pytest.raises(CorruptObject):
        art.connect("mine")
