"""Train requests: accepted once, applied at most once, and told about from any offset."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from server_fakes import GROUP, JSON, FakeTrainer, Harness, harness, until

from art_sky.errors import ChildDied, MissingTokens, NoDiskSpace, TrainFailed
from art_sky.server import live_job
from art_sky.store.writer import Writer

DIED = ChildDied("the trainer ended; call again")


async def step(server: Harness) -> int:
    return (await server.client.get("/api/v1/models/p/agent")).json()["step"]


async def test_train_commits_the_next_step(server: Harness) -> None:
    batch = await server.upload([GROUP])
    reply = await server.train("r1", batch, learning_rate=1e-4)
    assert reply.status_code == 202 and reply.json()["state"] == "queued"
    job = await server.finish("r1")
    assert job["state"] == "committed" and job["attempts"] == 1
    result = job["result"]
    assert (result["step"], result["updates"], result["metrics"]) == (1, 1, {"loss": 0.5})
    assert server.trainer.tasks[0].config.learning_rate == 1e-4
    reply = await server.chat("hi")
    assert reply.json()["model"] == "agent@1"
    assert server.engine.requests[0].adapter.name == "p/agent@1"
    weights = Path(server.engine.requests[0].adapter.path) / "adapter_model.safetensors"
    assert weights.read_text() == "untrained r1"
    assert (await server.chat("hi", model="agent@0")).json()["model"] == "agent@0"
    manifest = (await server.client.get("/api/v1/models/p/agent/checkpoints/1")).json()
    assert manifest["batch"]["sha256"] == batch and manifest["request"] == "r1"
    ref = manifest["files"]["adapter/adapter_model.safetensors"]
    blob = await server.client.get(f"/api/v1/models/p/agent/blobs/{ref['sha256']}")
    assert blob.content == b"untrained r1"
    async with asyncio.timeout(10):  # the job ends before its folder is removed
        while list((server.server.state / "work").glob("r1*")):
            await asyncio.sleep(0.01)


async def test_the_trainer_gets_the_step_that_a_kl_penalty_refers_to(server: Harness) -> None:
    batch = await server.upload([GROUP])
    for name, options in (("r1", {}), ("r2", {}), ("r3", {"kl_penalty_reference_step": 1})):
        await server.train(name, batch, kl_penalty_coef=0.1, **options)
        assert (await server.finish(name))["state"] == "committed"
    assert server.trainer.references == ["untrained r1"]
    await server.train("r4", batch, kl_penalty_coef=0.1, kl_penalty_reference_step=9)
    job = await server.finish("r4")
    assert (job["state"], await step(server)) == ("failed", 3)
    assert "no step 9" in job["error"]["message"]
    await server.train("r5", batch)
    assert (await server.finish("r5"))["state"] == "committed"


async def test_events_are_read_again_from_any_offset(server: Harness) -> None:
    await server.train("r1", await server.upload([GROUP]))
    events = await server.events("r1")
    assert [e["offset"] for e in events] == list(range(len(events)))
    states = [e["data"]["state"] for e in events if e["kind"] == "state"]
    stored = [e["data"] for e in events if "stored_bytes" in e["data"]]
    assert stored and stored[-1]["stored_bytes"] == stored[-1]["of_bytes"] > 0
    assert states == ["queued", "running", "committing", "committed"]
    assert [e["data"]["micro_batch"] for e in events if "micro_batch" in e["data"]] == [1, 2]
    assert events[-1]["data"]["result"]["step"] == 1
    for offset in range(len(events)):
        assert await server.events("r1", offset) == events[offset:]
    assert await server.events("r1", 99) == events  # the server was restarted: its events count anew


async def test_stream_sends_heartbeats(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_job, "HEARTBEAT_SECONDS", 0.01)
    server.trainer.gate = asyncio.Event()
    await server.train("r1", await server.upload([GROUP]))
    job = await server.server.jobs.get("r1")
    stream = job.events(0)
    while await anext(stream) is not None:
        pass
    server.trainer.gate.set()
    assert [e async for e in stream if e][-1].data["state"] == "committed"


async def test_same_id_is_the_same_job(server: Harness) -> None:
    batch = await server.upload([GROUP])
    replies = await asyncio.gather(*(server.train("r1", batch) for _ in range(5)))
    assert {r.status_code for r in replies} == {202}
    await server.finish("r1")
    assert (await server.train("r1", batch)).json()["result"]["step"] == 1
    assert len(server.trainer.tasks) == 1 and await step(server) == 1
    other = await server.upload([GROUP, GROUP])
    for again in (await server.train("r1", other), await server.train("r1", batch, learning_rate=1.0)):
        assert again.status_code == 409 and again.json()["error"]["code"] == "conflict"
    missing = await server.train("r2", "0" * 64)
    assert missing.status_code == 404 and "uploaded" in missing.json()["error"]["message"]
    assert (await server.train("../x", batch)).status_code == 422


async def test_jobs_run_one_after_another(server: Harness) -> None:
    batch = await server.upload([GROUP])
    for i in range(4):
        await server.train(f"r{i}", batch)
    assert [(await server.finish(f"r{i}"))["result"]["step"] for i in range(4)] == [1, 2, 3, 4]
    await until(lambda: "p/agent@4" in server.engine.prepared)


async def test_skipped_batch_commits_its_parents_files(server: Harness) -> None:
    await server.train("r1", await server.upload([]))
    result = (await server.finish("r1"))["result"]
    assert (result["step"], result["updates"], result["reason"]) == (1, 0, "no group")
    manifests = [(await server.client.get(f"/api/v1/models/p/agent/checkpoints/{i}")).json() for i in (0, 1)]
    assert manifests[0]["files"] == manifests[1]["files"]
    await server.chat("hi", model="agent@0")
    await server.chat("hi", model="agent@1")
    assert len({r.adapter.name for r in server.engine.requests}) == 1  # one adapter, one cache


@pytest.mark.parametrize(
    ("error", "code"),
    [(TrainFailed("the loss is nan; again"), "train_failed"), (MissingTokens("group 0; mend"), "missing_tokens")],
)
async def test_failure_leaves_head(server: Harness, error: Exception, code: str) -> None:
    server.trainer.faults = [error]
    batch = await server.upload([GROUP])
    await server.train("r1", batch)
    job = await server.finish("r1")
    assert job["state"] == "failed" and job["error"]["code"] == code
    assert await step(server) == 0
    assert (await server.train("r1", batch)).json()["state"] == "failed"
    await server.train("r2", batch)
    assert (await server.finish("r2"))["result"]["step"] == 1


async def test_unexpected_error_is_a_failed_job(server: Harness) -> None:
    server.trainer.faults = [RuntimeError("bug")]
    batch = await server.upload([GROUP])
    await server.train("r1", batch)
    assert "bug" in (await server.finish("r1"))["error"]["message"]
    await server.train("r1", batch)  # nothing was wrong with the request: it may be sent again
    assert (await server.finish("r1"))["state"] == "committed"


async def test_dead_trainer_is_tried_again(server: Harness) -> None:
    server.trainer.faults = [DIED, DIED]
    await server.train("r1", await server.upload([GROUP]))
    job = await server.finish("r1")
    assert job["state"] == "committed" and job["attempts"] == 3 and job["result"]["step"] == 1
    kinds = [e["kind"] for e in await server.events("r1")]
    assert kinds.count("warning") == 2


async def test_three_deaths_fail_for_good(server: Harness, tiny_model: Path, tmp_path: Path) -> None:
    server.trainer.faults = [DIED] * 3
    batch = await server.upload([GROUP])
    await server.train("r1", batch)
    job = await server.finish("r1")
    assert job["state"] == "failed" and "3 attempts" in job["error"]["message"]
    assert (await server.train("r1", batch)).json()["state"] == "failed"
    await server.server.close()
    async with harness(tiny_model, tmp_path) as later:
        await later.register()
        assert (await later.train("r1", batch)).json()["state"] == "failed"
        assert later.trainer.tasks == []


async def test_cancel_between_micro_batches(server: Harness) -> None:
    server.trainer.gate = asyncio.Event()
    batch = await server.upload([GROUP])
    await server.train("r1", batch)
    await server.train("r2", batch)
    assert (await server.client.post("/api/v1/jobs/r2/cancel")).json()["state"] == "cancelled"
    await until(lambda: server.trainer.tasks)
    assert (await server.client.post("/api/v1/jobs/r1/cancel")).status_code == 200
    job = await server.finish("r1")
    assert job["state"] == "cancelled" and job["error"]["code"] == "cancelled"
    assert server.trainer.cancelled == 1 and await step(server) == 0
    server.trainer.gate.set()
    await server.train("r3", batch)
    assert (await server.finish("r3"))["result"]["step"] == 1
    assert (await server.client.post("/api/v1/jobs/r3/cancel")).json()["state"] == "committed"
    assert (await server.train("r2", batch)).json()["state"] == "cancelled"
    assert (await server.client.post("/api/v1/jobs/none/cancel")).status_code == 404


async def test_restart_answers_from_the_store(server: Harness, tiny_model: Path, tmp_path: Path) -> None:
    batch = await server.upload([GROUP])
    await server.train("r1", batch)
    before = await server.finish("r1")
    await server.server.close()
    async with harness(tiny_model, tmp_path) as later:
        await later.register()
        assert await step(later) == 1
        job = (await later.client.get("/api/v1/jobs/r1")).json()
        assert job["result"]["manifest"] == before["result"]["manifest"] and job["state"] == "committed"
        assert (await later.train("r1", batch)).json()["result"]["step"] == 1
        assert (await later.train("r1", batch, learning_rate=1.0)).status_code == 409
        assert later.trainer.tasks == []
        assert (await later.client.get("/api/v1/jobs/r9")).status_code == 404


async def test_interrupted_jobs_go_on_by_themselves(server: Harness, tiny_model: Path, tmp_path: Path) -> None:
    server.trainer.gate = asyncio.Event()
    batch = await server.upload([GROUP])
    for id in ("r1", "r2"):
        await server.train(id, batch)
    await until(lambda: server.trainer.tasks)
    await server.server.close()
    async with harness(tiny_model, tmp_path) as later:
        await until(lambda: len(later.server.jobs.all()) == 2)  # the model comes back without its client
        jobs = [await later.finish(id) for id in ("r1", "r2")]
        assert [j["result"]["step"] for j in jobs] == [1, 2]
        assert jobs[0]["attempts"] == 2


async def test_finished_but_unreached_manifest_is_adopted(
    server: Harness, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Writer, "_advance", killed)
    await server.train("r1", await server.upload([GROUP]))
    async with asyncio.timeout(20):
        await asyncio.gather(server.server.jobs._runner, return_exceptions=True)
    monkeypatch.undo()
    await server.server.close()
    async with harness(tiny_model, tmp_path) as later:
        await later.register()
        assert (await later.finish("r1"))["result"]["step"] == 1
        assert later.trainer.tasks == []  # adopted, not trained again


async def test_store_fault_keeps_the_request_open(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NoDiskSpace("the disk is full; free some space")

    batch = await server.upload([GROUP])
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "commit", full)
        await server.train("r1", batch)
        job = await server.finish("r1")
    assert job["state"] == "failed" and job["error"]["code"] == "no_disk_space" and await step(server) == 0
    await server.train("r1", batch)
    assert (await server.finish("r1"))["result"]["step"] == 1


async def test_log_history_and_checkpoints(server: Harness) -> None:
    url = "/api/v1/models/p/agent"
    batch = await server.upload([GROUP])
    await server.train("r1", batch)
    await server.finish("r1")
    for body in ({"split": "val", "metrics": {"reward": 0.5}, "batch": batch}, {"split": "val", "metrics": {"n": 3}}):
        logged = await server.client.post(f"{url}/log", json=body)
        assert logged.json() == {"attempt": 1, "step": 1, "split": "val"}, logged.text
    await server.client.post(f"{url}/log", json={"split": "val", "step": 0, "metrics": {"reward": 0.1}})
    rows = (await server.client.get(f"{url}/history")).json()
    assert [(r["step"], r["metrics"]) for r in rows] == [(0, {"reward": 0.1}), (1, {"reward": 0.5, "n": 3.0})]
    for bad in ({"split": "Val"}, {"split": "val", "step": 7}, {"split": "val", "step": -1}, {"split": "val", "x": 1}):
        assert (await server.client.post(f"{url}/log", json=bad)).status_code in (404, 422)
    found = (await server.client.get(f"{url}/checkpoints")).json()
    assert [(c["step"], c["best"], c["deleted"]) for c in found] == [(0, False, False), (1, True, False)]
    assert (await server.client.delete(f"{url}/checkpoints")).json() == [0]
    assert [c["deleted"] for c in (await server.client.get(f"{url}/checkpoints")).json()] == [True, False]
    assert (await server.chat("hi", model="agent@0")).status_code == 404
    assert (await server.chat("hi")).status_code == 200
    unknown = await server.client.delete(f"{url}/checkpoints", params={"best_metric": "val/none"})
    assert unknown.status_code == 400


async def test_state_is_kept(server: Harness) -> None:
    url = "/api/v1/models/p/agent/state"
    assert (await server.client.get(url)).json() is None
    await server.client.patch(url, json={"a": 1})
    assert (await server.client.patch(url, json={"b": [2]})).json() == {"a": 1, "b": [2]}
    await server.client.put(url, content=b'{"c": "\\ud800"}', headers=JSON)
    assert (await server.client.get(url)).json() == {"c": "\ud800"}


async def test_blobs_are_checked(server: Harness) -> None:
    url = "/api/v1/models/p/agent/blobs"
    wrong = await server.client.put(f"{url}/{'0' * 64}", content=b"x")
    assert wrong.status_code == 400 and "hash" in wrong.json()["error"]["message"]
    assert (await server.client.put(f"{url}/../../x", content=b"x")).status_code in (404, 405)
    assert (await server.client.put(f"{url}/ABC", content=b"x")).status_code == 422
    assert (await server.client.get(f"{url}/{'0' * 64}")).status_code == 404
    assert not list((server.server.state / "uploads").iterdir())


async def test_init_failure_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    trainer = FakeTrainer(faults=[ChildDied("no memory; again")])
    async with harness(tiny_model, tmp_path, trainer=trainer) as h:
        assert (await h.register()).status_code == 503
        assert not (tmp_path / "store" / "p").exists()
        assert (await h.register()).status_code == 200


async def test_a_full_disk_of_the_server_is_one_line_and_the_same_request_goes_on_later(
    server: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "work/batch")

    batch = await server.upload([GROUP])
    monkeypatch.setattr("art_sky.server.jobs._fetch_batch", full)
    await server.train("r1", batch)
    error = (await server.finish("r1"))["error"]
    assert error["code"] == "no_disk_space" and "work/batch" in error["message"] and "free some" in error["message"]
    monkeypatch.setattr("art_sky.server.api._receive", full)
    reply = await server.client.put("/api/v1/models/p/agent/blobs/" + "0" * 64, content=b"x")
    assert reply.status_code == 507 and reply.json()["error"]["code"] == "no_disk_space"
    monkeypatch.undo()
    await server.train("r1", batch)
    assert (await server.finish("r1"))["state"] == "committed"
