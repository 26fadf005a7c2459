"""The store in a bucket: a run outlives the machine that it began on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from e2e_run import TRAIN, files_of, make_backend, make_model, sample, stored


async def test_a_machine_lost_in_the_middle_of_a_step_is_continued_elsewhere(
    undisturbed, tiny_model, tmp_path, bucket
) -> None:
    """Client, server and its disk are gone. The next server finishes the step from the stored batch, unasked."""
    groups, expected = undisturbed
    lost, saved = tmp_path / "lost", tmp_path / "groups.json"
    saved.write_text(json.dumps([g.model_dump(mode="json") for g in groups]))
    script = Path(__file__).with_name("e2e_train_once.py")
    client = subprocess.Popen([sys.executable, script, lost, tiny_model, saved, "left-behind", bucket])
    store = stored(bucket)
    deadline = time.monotonic() + 90
    while not store.attempts("left-behind"):
        assert client.poll() is None and time.monotonic() < deadline
    server = json.loads((lost / ".server" / "server-0" / "server.json").read_text())["pid"]
    for pid in [client.pid, server, *(c.pid for c in psutil.Process(server).children(recursive=True))]:
        os.kill(pid, signal.SIGKILL)
    client.wait()
    shutil.rmtree(lost)
    assert store.head().step == 0
    async with make_backend(tmp_path / "elsewhere", bucket) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        async with asyncio.timeout(60):
            while await model.get_step() == 0:
                await asyncio.sleep(0.1)
        result = await model.train(groups, config=TRAIN, request_id="left-behind")  # the client asks again, late
        assert result.step == 1
        follow = await model.train(await sample(model, seed=2), config=TRAIN)
        assert follow.step == 2
    assert files_of(bucket)[:2] == expected
