"""kill -9 of each process at the worst moment: no step is lost, repeated or applied twice, and HEAD loads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_run import TRAIN, child_pid, choices, files_of, make_backend, make_model, manifests, sample, stored


@pytest.mark.parametrize("where", ["trainer-mid-step", "after-blobs", "after-manifest", "after-head"])
async def test_a_kill_in_a_train_call_gives_one_step(where, undisturbed, tiny_model, run_path, monkeypatch) -> None:
    groups, expected = undisturbed
    marker = run_path.parent / "armed"
    async with make_backend(run_path) as backend:
        monkeypatch.setenv("ART_SKY_FAILPOINT", f"{where}@{marker}")  # read by the children, armed by the file
        model = make_model(tiny_model)
        await model.register(backend)
        marker.touch()
        result = await model.train(groups, config=TRAIN, request_id="the-one")
        assert not marker.exists(), "nothing was killed"
        assert result.step == 1
        again = await model.train(groups, config=TRAIN, request_id="the-one")
        assert (again.step, again.manifest) == (1, result.manifest)
        assert await model.get_step() == 1
        follow = await sample(model, seed=2)  # name@1 serves
        assert {c.sampling["model"] for g in follow for t in g for c in choices(t)} == {"agent@1"}
        await model.train(follow, config=TRAIN)
    assert files_of(run_path)[:2] == expected
    store = stored(run_path)
    assert manifests(run_path)[1].request == "the-one"
    assert store.head().step == 2
    rows = [r for r in store.history() if (r.step, r.split) == (1, "train")]
    assert len(rows) == 1


async def test_a_kill_of_the_engine_during_rollouts_loses_nothing(tiny_model, run_path) -> None:
    async with make_backend(run_path) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        await sample(model, seed=1, groups=1, size=1)
        rollouts = asyncio.create_task(sample(model, seed=3, groups=8, size=4, turns=3))
        status = await backend.server_status()
        while not (status.engine["running"] and status.engine["tokens_sampled"] > 20):
            status = await backend.server_status()
        os.kill(child_pid(status.pid, "art_sky.inference.worker"), signal.SIGKILL)
        groups = await rollouts
        assert all(len(g.trajectories) == 4 and not g.exceptions for g in groups)
        result = await model.train(groups, config=TRAIN)
        assert (result.step, result.updates) == (1, 1)
        assert (await backend.server_status()).engine["restarts"] >= 1
    assert stored(run_path).head().step == 1


async def test_a_step_that_was_left_behind_is_finished_by_whoever_comes_next(undisturbed, tiny_model, run_path) -> None:
    """Client and server both killed in the middle of a step."""
    groups, expected = undisturbed
    saved = run_path.parent / "groups.json"
    saved.write_text(json.dumps([g.model_dump(mode="json") for g in groups]))
    script = Path(__file__).with_name("e2e_train_once.py")
    client = subprocess.Popen([sys.executable, script, run_path, tiny_model, saved, "left-behind"])
    announced = run_path / ".server" / "server-0" / "server.json"
    deadline = time.monotonic() + 60
    while not (announced.exists() and list(run_path.glob("tests/agent/requests/left-behind.*"))):
        assert client.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    server = json.loads(announced.read_text())["pid"]
    os.kill(server, signal.SIGKILL)
    client.kill()
    client.wait()
    assert stored(run_path).head().step == 0
    async with make_backend(run_path) as successor:
        model = make_model(tiny_model)
        await model.register(successor)
        result = await model.train(groups, config=TRAIN, request_id="left-behind")
        assert result.step == 1
        assert await model.get_step() == 1
    assert files_of(run_path) == expected
