"""What agents see of a server that is restarted, or replaced by one on another machine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from server_fakes import Harness, harness

from art_sky.errors import Conflict
from art_sky.schemas import ModelStatus, RegisterRequest
from art_sky.server import models
from art_sky.server.server import Server


async def test_calls_wait_for_a_model_that_comes_back_after_a_restart(
    server: Harness, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.register("second")
    await server.server.close()
    gate = asyncio.Event()
    register = Server.register

    async def slow(self: Server, request: RegisterRequest) -> ModelStatus:
        await gate.wait()
        if request.name == "second":
            raise Conflict("another machine has it; wait")
        return await register(self, request)

    monkeypatch.setattr(Server, "register", slow)
    async with harness(tiny_model, tmp_path) as later:
        assert (await later.chat("hi", model="never-was")).status_code == 404
        assert (await later.chat("hi", model="other/agent")).status_code == 404
        names = ("agent", "p/agent@0", "agent@7", "second")
        calls = [asyncio.create_task(later.chat("hi", model=name)) for name in names]
        calls.append(asyncio.create_task(later.client.get("/v1/models/agent")))
        done, _ = await asyncio.wait(calls, timeout=0.2)
        assert not done, "told that there is no such model, an agent would not ask again"
        gate.set()
        assert [r.status_code for r in await asyncio.gather(*calls)] == [200, 200, 404, 404, 200]


async def test_a_model_that_does_not_come_back_in_time_is_told(
    server: Harness, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.server.close()

    async def never(self: Server, request: RegisterRequest) -> ModelStatus:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Server, "register", never)
    monkeypatch.setattr(models, "RESTORE_SECONDS", 0.05)
    async with harness(tiny_model, tmp_path) as later:
        reply = await later.chat("hi")
        assert reply.status_code == 503 and reply.json()["error"]["retryable"] is True


async def test_a_damaged_list_of_models_does_not_keep_the_server_down(
    server: Harness, tiny_model: Path, tmp_path: Path
) -> None:
    await server.server.close()
    (tmp_path / "state" / "models.json").write_text('[["p", "ag')
    async with harness(tiny_model, tmp_path) as later:
        assert (await later.chat("hi")).status_code == 404
        await later.register()
        assert (await later.chat("hi")).status_code == 200


async def test_a_rollout_outlives_its_machine(server: Harness, tiny_model: Path, tmp_path: Path) -> None:
    one, closed, late = [(await server.client.post("/api/v1/models/p/agent/rollouts")).json() for _ in range(3)]
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}

    async def call(h: Harness, address: dict[str, str], key: str | None = None) -> int:
        path = f"/rollouts/{address['rollout']}/v1/chat/completions"
        headers = {"authorization": f"Bearer {key or address['api_key']}"}
        return (await h.client.post(path, json=body, headers=headers)).status_code

    assert await call(server, one) == 200
    await server.server.close()
    token = (tmp_path / "state" / "token").read_text()
    shutil.rmtree(tmp_path / "state")
    _token_file(tmp_path / "state", token)
    async with harness(tiny_model, tmp_path, models=["p/agent"]) as later:
        other = one["api_key"].replace("p/agent", "q/agent")
        for key in (closed["api_key"], other, one["api_key"][:-1], "rk-" + "0" * 64 + ".p/agent"):
            assert await call(later, one, key) == 401
        path = f"/api/v1/rollouts/{one['rollout']}"
        assert (await later.client.get(f"{path}/exchanges")).json() == {"exchanges": [], "complete": False}
        assert await call(later, one) == 200
        found = (await later.client.get(f"{path}/exchanges")).json()
        assert len(found["exchanges"]) == 1 and found["complete"] is False, "what the first machine had is lost"
        await later.client.delete(f"/api/v1/rollouts/{closed['rollout']}")
        assert await call(later, closed) == 404, "closed is closed, wherever it was opened"
        await later.server.close()
    async with harness(tiny_model, tmp_path) as again:
        assert await call(again, one) == 200 and await call(again, late) == 200
        assert await call(again, closed) == 404
        found = (await again.client.get(f"{path}/exchanges")).json()
        assert len(found["exchanges"]) == 2 and found["complete"] is False
        await again.client.delete(path)
        assert await call(again, one) == 404


def _token_file(folder: Path, token: str) -> None:
    folder.mkdir()
    (folder / "token").touch(0o600)
    (folder / "token").write_text(token)
