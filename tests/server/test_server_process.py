"""The real process and real sockets: start, address file, signals, owner, clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from server_fakes import GROUP, FakeEngine, FakeTrainer, harness, until

from art_sky import __version__
from art_sky.config import ServerConfig
from art_sky.server import main as main_module
from art_sky.server.parts import Parts
from art_sky.store import open_store
from art_sky.store.batches import encode_batch


def write_config(folder: Path, **fields: Any) -> Path:
    config = {"store": f"file://{folder / 'store'}", "state_dir": str(folder / "state"), **fields}
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def start(config: Path, *more: str, **how: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "art_sky.server", "--config", str(config), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **how)


def announced(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "state" / "server.json").exists():
            return dict(json.loads((folder / "state" / "server.json").read_text()))
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1].decode())


def test_process_announces_itself_and_ends_on_sigterm(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = start(config)
    try:
        found = announced(tmp_path, process)
        assert found["pid"] == process.pid and found["version"] == __version__
        assert httpx.get(f"{found['base_url']}/health", trust_env=False).json()["status"] == "ok"
        assert httpx.get(f"{found['base_url']}/api/v1/status", trust_env=False).status_code == 401
        token = (tmp_path / "state" / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        reply = httpx.get(f"{found['base_url']}/api/v1/status", headers=headers, trust_env=False)
        assert reply.json()["pid"] == process.pid
        twin = start(config)
        assert twin.wait(60) == 1 and b"another server uses" in twin.communicate()[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.communicate()[1].decode()
        assert "has ended" in log and token not in log
        assert not (tmp_path / "state" / "server.json").exists()
    finally:
        process.kill()


def test_process_ends_with_its_owner(tmp_path: Path) -> None:
    theirs, ours = os.pipe()
    process = start(write_config(tmp_path), "--owner-fd", str(theirs), pass_fds=[theirs])
    os.close(theirs)
    try:
        announced(tmp_path, process)
        os.close(ours)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_start_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (write_config(tmp_path, port=port), f"127.0.0.1:{port}"),
            (tmp_path / "missing.json", "cannot read"),
        ]
        for config, says in cases:
            assert main_module.main(["--config", str(config)]) == 1
            lines = capsys.readouterr().err.strip().splitlines()
            assert len(lines) == 1 and says in lines[0]
    for fields, says in [
        ({"prot": 1}, "unknown option 'prot'"),
        ({"host": "0.0.0.0"}, "host"),
        ({"state_dir": "/proc/nowhere"}, "state_dir that can be written"),
        ({"store": "gs://x"}, "unknown scheme"),
    ]:
        assert main_module.main(["--config", str(write_config(tmp_path, **fields))]) == 1
        assert says in capsys.readouterr().err


@asynccontextmanager
async def served(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine, FakeTrainer]]:
    """A server with fakes on a real socket, ended by POST /shutdown."""
    engine, trainer = FakeEngine(tiny_model), FakeTrainer()
    parts = Parts(lambda *_: engine, lambda *_: trainer, lambda name: tiny_model, open_store)
    config = ServerConfig(store=f"file://{tmp_path / 'store'}", state_dir=str(tmp_path / "state"))
    running = asyncio.create_task(main_module.serve(config, parts, main_module._listen(config)))
    address = tmp_path / "state" / "server.json"
    await until(lambda: address.exists() or running.done())
    url = json.loads(address.read_text())["base_url"]
    headers = {"authorization": f"Bearer {(tmp_path / 'state' / 'token').read_text().strip()}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30) as client:
        body = {"project": "p", "name": "agent", "base_model": "tiny", "client_version": __version__}
        assert (await client.post("/api/v1/models", json=body)).status_code == 200
        try:
            yield client, engine, trainer
        finally:
            assert (await client.post("/api/v1/shutdown")).status_code == 202
            async with asyncio.timeout(20):
                await running


BODY = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


class FirstToken(asyncio.Event):
    """Lets one token through; the others wait for the event."""

    passed = False

    async def wait(self) -> Literal[True]:
        if self.passed:
            return await super().wait()
        self.passed = True
        return True


async def test_tokens_stream_as_they_come(tiny_model: Path, tmp_path: Path) -> None:
    async with served(tiny_model, tmp_path) as (client, engine, _):
        engine.gate = FirstToken()
        async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
            lines = reply.aiter_lines()
            assert '"content":"h"' in await anext(lines)
            engine.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_cancels_the_sampling(tiny_model: Path, tmp_path: Path, stream: bool) -> None:
    async with served(tiny_model, tmp_path) as (client, engine, _):
        engine.gate = asyncio.Event()  # never a token
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={**BODY, "stream": stream}, timeout=0.3)
        await until(lambda: engine.cancelled)


async def test_client_that_leaves_in_the_middle_of_a_stream(tiny_model: Path, tmp_path: Path) -> None:
    async with served(tiny_model, tmp_path) as (client, engine, _):
        engine.gate = FirstToken()
        async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
            await anext(reply.aiter_lines())
        await until(lambda: engine.cancelled)
        engine.script, engine.gate = (lambda r: ["ok", 2]), None
        reply = await client.post("/v1/chat/completions", json=BODY)
        assert reply.json()["choices"][0]["message"]["content"] == "ok"


async def test_shutdown_leaves_a_running_job_to_the_next_server(tiny_model: Path, tmp_path: Path) -> None:
    data = encode_batch([GROUP])
    sha = hashlib.sha256(data).hexdigest()
    async with served(tiny_model, tmp_path) as (client, _, trainer):
        trainer.gate = asyncio.Event()
        await client.put(f"/api/v1/models/p/agent/blobs/{sha}", content=data)
        await client.post("/api/v1/models/p/agent/train", json={"request_id": "r1", "batch": sha})
        await until(lambda: trainer.tasks)
    async with harness(tiny_model, tmp_path) as later:
        await later.register()
        assert (await later.finish("r1"))["result"]["step"] == 1


async def test_a_draining_server_finishes_what_it_accepted_refuses_the_rest_and_ends(
    tiny_model: Path, tmp_path: Path
) -> None:
    data = encode_batch([GROUP])
    sha = hashlib.sha256(data).hexdigest()
    train = "/api/v1/models/p/agent/train"
    async with served(tiny_model, tmp_path) as (client, _, trainer):
        trainer.gate = asyncio.Event()
        await client.put(f"/api/v1/models/p/agent/blobs/{sha}", content=data)
        for request in ("r1", "r2"):
            await client.post(train, json={"request_id": request, "batch": sha})
        await client.post("/api/v1/shutdown", params={"drain_seconds": 20})
        refused = await client.post(train, json={"request_id": "r3", "batch": sha})
        assert refused.status_code == 503 and refused.json()["error"]["retryable"]
        again = await client.post(train, json={"request_id": "r2", "batch": sha})
        assert again.status_code == 202 and again.json()["state"] == "queued"
        trainer.gate.set()
        events = (await client.get("/api/v1/jobs/r2/events")).text
        assert '"step": 2' in events or '"step":2' in events
    assert json.loads((tmp_path / "state" / "unfinished.json").read_text())["requests"] == []
    async with harness(tiny_model, tmp_path) as later:
        assert (await later.register()).json()["step"] == 2
        assert (await later.client.get("/api/v1/jobs/r3")).status_code == 404  # it was never accepted


async def test_a_drain_has_a_deadline_and_names_what_is_left(tiny_model: Path, tmp_path: Path) -> None:
    data = encode_batch([GROUP])
    sha = hashlib.sha256(data).hexdigest()
    async with served(tiny_model, tmp_path) as (client, _, trainer):
        trainer.gate = asyncio.Event()  # never opened
        await client.put(f"/api/v1/models/p/agent/blobs/{sha}", content=data)
        await client.post("/api/v1/models/p/agent/train", json={"request_id": "r1", "batch": sha})
        await until(lambda: trainer.tasks)
        await client.post("/api/v1/shutdown", params={"drain_seconds": 0.05})
    told = json.loads((tmp_path / "state" / "unfinished.json").read_text())
    assert told == {"pid": os.getpid(), "requests": ["p/agent r1"]}


async def test_models_that_come_back_after_a_restart_are_no_work(tiny_model: Path, tmp_path: Path) -> None:
    async with harness(tiny_model, tmp_path) as before:
        await before.register()
    async with harness(tiny_model, tmp_path) as after:
        began = after.server.activity._last
        await until(lambda: after.server.registry.all())
        assert after.server.activity._last == began
        await after.register()
        assert after.server.activity._last > began
